"""How does TensorRT-LLM speak?

`trtllm-serve`, as reference/protocols.md 4.7 describes it. Its KV events are read destructively over HTTP, so they are
left to others. It does not tokenize for others, and its bodies may hold no field that it does not know.
"""

from __future__ import annotations

from router.engines.adapter import EngineAdapter
from router.engines.prometheus import LoadGauges


class Trtllm(EngineAdapter):
    """TensorRT-LLM's OpenAI server."""

    metrics_path = "/prometheus/metrics"  # /metrics is a queue that reading empties
    gauges = LoadGauges(
        running=("trtllm_num_requests_running",),
        waiting=("trtllm_num_requests_waiting",),
        kv_usage=("trtllm_kv_cache_utilization",),
    )
