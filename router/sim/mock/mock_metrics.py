"""Encodes `/metrics` of a mock engine: the vLLM series that a router reads (reference/protocols.md 4.1)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping

from router.sim.mock.mock_config import MockEngineConfig
from router.sim.mock.pinned_kv import HandoffCounters
from router.sim.pod import SimPod

TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


class EngineHistogram:
    """Counts by upper bound, and their sum."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str, labels: str) -> Iterator[str]:
        """Exposition lines with cumulative buckets."""
        total = 0
        for bound, count in zip((*map(repr, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{{labels},le="{bound}"}} {total}'
        yield f"{name}_count{{{labels}}} {total}"
        yield f"{name}_sum{{{labels}}} {self._sum}"


def metrics_body(config: MockEngineConfig, pod: SimPod, ttft_s: EngineHistogram, handoff: HandoffCounters) -> bytes:
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
    if config.handoff.dialect:
        lines += _prompt_tokens_by_source(pod, labels)
    lines += ("# TYPE vllm:cache_config_info gauge", f"vllm:cache_config_info{{{_cache_config(config)}}} 1.0")
    lines.append("# TYPE vllm:time_to_first_token_seconds histogram")
    lines += ttft_s.lines("vllm:time_to_first_token_seconds", labels)
    return ("\n".join(lines) + "\n").encode()


def _counters(dialect: str, pod: SimPod, handoff: HandoffCounters) -> dict[str, int]:
    counters = pod.counters
    values = {
        "prefix_cache_queries": counters.prefix_cache_queries,
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


def _prompt_tokens_by_source(pod: SimPod, labels: str) -> Iterator[str]:
    counters = pod.counters
    local, external = counters.prefix_cache_hits, counters.external_prefix_cache_hits
    computed = counters.prompt_tokens - local - external
    yield "# TYPE vllm:prompt_tokens_by_source_total counter"
    sources = {"local_compute": computed, "local_cache_hit": local, "external_kv_transfer": external}
    for source, tokens in sources.items():
        yield f'vllm:prompt_tokens_by_source_total{{{labels},source="{source}"}} {float(tokens)}'


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
    return ",".join(f'{name}="{_escaped(str(value))}"' for name, value in values.items())


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
