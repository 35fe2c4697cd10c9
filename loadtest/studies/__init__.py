"""Questions that the simulator answers: policies, queues, caches, updates, and other routers."""
