"""TensorRT-LLM's `trtllm-serve`, as in docs/engines.md.

Reading its KV events over HTTP removes them, so the router does not. It has no /tokenize and refuses unknown fields.
"""

from __future__ import annotations

from router.engines.adapter import EngineAdapter
from router.engines.prometheus import LoadGauges
from router.types import Endpoint


class Trtllm(EngineAdapter):
    owners = ("tensorrt_llm",)
    chart_names = ("tensorrt-llm", "trtllm-serve")
    image_names = ("tensorrt", "trtllm")
    salted = frozenset({Endpoint.CHAT})  # the models of other requests forbid it: serve/openai_protocol.py
    metrics_path = "/prometheus/metrics"  # /metrics is a queue that reading empties
    gauges = LoadGauges(
        running=("trtllm_num_requests_running",),
        waiting=("trtllm_num_requests_waiting",),
        kv_usage=("trtllm_kv_cache_utilization",),
    )
