"""What the mock engine and the simulator have in common: blocks, pools, schedulers."""
