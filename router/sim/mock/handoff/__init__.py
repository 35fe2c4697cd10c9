"""How KV passes from one engine stand-in to another."""
