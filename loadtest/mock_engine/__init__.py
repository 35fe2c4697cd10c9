"""An engine without a model: real tokens, real blocks, KV events, the timing of a GPU."""
