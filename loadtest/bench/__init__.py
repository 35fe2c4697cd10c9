"""What a request costs: CPU, added latency, memory of streams; against older commits and other routers."""
