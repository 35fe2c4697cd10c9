"""Encodes `/metrics` of a mock engine: the vLLM series that a router reads (reference/protocols.md 4.1)."""

from __future__ import annotations

from collections.abc import Mapping

from router.sim.mock.mock_config import MockEngineConfig
from router.sim.mock.pinned_kv import HandoffCounters
from router.sim.pod import SimPod

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


def metrics_body(config: MockEngineConfig, pod: SimPod, handoff: HandoffCounters) -> bytes:
    """The exposition text. Prefix cache counters are in tokens."""
    load, labels = pod.load, _labels({"model_name": config.models[0], "engine": "0"})
    gauges: Mapping[str, float] = {
        "num_requests_running": load.running,
        "num_requests_waiting": load.waiting + handoff.receiving,
        "kv_cache_usage_perc": load.kv_usage,
    }
    lines: list[str] = []
    for name, value in gauges.items():
        lines += (f"# TYPE vllm:{name} gauge", f"vllm:{name}{{{labels}}} {float(value)}")
    for name, value in _counters(config.handoff.dialect, pod, handoff).items():
        lines += (f"# TYPE vllm:{name}_total counter", f"vllm:{name}_total{{{labels}}} {float(value)}")
    lines += ("# TYPE vllm:cache_config_info gauge", f"vllm:cache_config_info{{{_cache_config(config)}}} 1.0")
    return ("\n".join(lines) + "\n").encode()


def _counters(dialect: str, pod: SimPod, handoff: HandoffCounters) -> dict[str, int]:
    counters = pod.counters
    values = {
        "prefix_cache_queries": counters.prompt_tokens,
        "prefix_cache_hits": counters.prefix_cache_hits,
        "prompt_tokens": counters.prompt_tokens,
        "generation_tokens": counters.generation_tokens,
        "num_preemptions": pod.preemptions,
    }
    if dialect:
        values |= {
            "external_prefix_cache_queries": counters.external_prefix_cache_queries,
            "external_prefix_cache_hits": counters.external_prefix_cache_hits,
        }
    if dialect == "nixl":
        values |= {"nixl_num_kv_expired_reqs": handoff.expired, "nixl_num_failed_transfers": handoff.failed}
    return values


def _cache_config(config: MockEngineConfig) -> str:
    return _labels(
        {
            "block_size": config.block_size_tokens,
            "hash_block_size": config.block_size_tokens,
            "num_gpu_blocks": config.num_blocks,
            "kv_cache_size_tokens": config.num_blocks * config.block_size_tokens,
            "prefix_caching_hash_algo": "xxhash",
            "enable_prefix_caching": True,
            "engine": "0",
        }
    )


def _labels(values: Mapping[str, object]) -> str:
    escaped = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    return ",".join(f'{name}="{str(value).translate(escaped)}"' for name, value in values.items())
