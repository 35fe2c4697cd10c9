"""The laboratory: mock engine, simulator, traffic, benchmarks, faults. The router never imports it."""
