"""The parts of the engine stand-in; `router/sim/mock_engine.py` puts them together."""
