"""How does TensorRT-LLM speak? (reference/protocols.md section 4.7)

Its KV events are pulled destructively, one reader only, so that the router leaves them alone and predicts.
"""

from __future__ import annotations

from typing import ClassVar

from router.engines.adapter import EngineAdapter


class TrtLlm(EngineAdapter):
    """trtllm-serve."""

    name: ClassVar[str] = "trtllm"
    metrics_path = "/prometheus/metrics"  # /metrics is a JSON queue that a read empties
    running_names = ("trtllm_num_requests_running",)
    waiting_names = ("trtllm_num_requests_waiting",)
    kv_usage_names = ("trtllm_kv_cache_utilization",)
