"""The endpoint picker behind Envoy: what it costs, and what other rules choose."""
