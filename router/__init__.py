"""warmroute: the prefix-aware router for LLM inference fleets. Start reading at `router/README.md`."""

__version__ = "0.1.0"
