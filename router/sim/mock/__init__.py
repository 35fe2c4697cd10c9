"""Parts of the mock engine; `router/sim/mock_engine.py` combines them."""
