"""The longest turn of the event loop and the size of `/metrics` of a large router.

    python -m tests.bench.metrics_bench [ROUNDS]

500 pods, 50 tenants (20 have a label), 4 models, 8 classes and 4 policies; every combination of labels that
can occur. Turns are measured in CPU time of the thread, without garbage collection, which the router does while idle.
Prints one line of JSON for each text format; in OpenMetrics every bucket of a latency has an exemplar.
"""

from __future__ import annotations

import asyncio
import gc
import json
import statistics
import sys
import time
from collections.abc import Coroutine, Iterator, Mapping
from itertools import product
from typing import Any, TypeVar

from router.observe.class_metrics import MAX_TENANT_CHARACTERS, NAMED_TENANTS
from router.observe.fast_metrics import OPEN_METRICS, OTHER, PLAIN, Buckets, Count, Labelled, Labels, TextFormat
from router.observe.metrics import KNOWN_STATES, Metrics
from router.types import FleetSnapshot, PodLoad, PodState, PodStatus, PrefixTrust
from tests.kit.scenes import pod

PODS = 500
MAX_BODY_BYTES, MAX_TURN_MS = 3_200_000, 5.0
FORMATS = {"plain": PLAIN, "openmetrics": OPEN_METRICS}
POD_NAMES = [f"llm-{number:03}-decode-6f9c7d5b84" for number in range(PODS)]
OWN_FITS = 50
"""Pods that differ from their class."""
RESULTS = (
    "ok",
    "client_gone",
    "pod_error",
    "no_ready_pod",
    "saturated",
    "upstream_timeout",
    "malformed_request",
    "too_large",
)
NAMES: Mapping[str, tuple[str, ...]] = {
    "by": ("prior", "learnt"),
    "class": tuple(f"class-{number}" for number in range(8)),
    "coefficient": ("c0_ms", "c1_ms_per_token", "c2_ms_per_token2", "d0_ms", "d1", "d2"),
    "dialect": ("nixl", "mooncake", "p2p"),
    "endpoint": ("chat", "completions", "embeddings", "responses", OTHER),
    "link": ("same_host", "same_rack", "same_zone", "elsewhere"),
    "met": ("true", "false"),
    "model": tuple(f"organization/a-model-{number}" for number in range(4)),
    "phase": ("admit", "fingerprint", "match", "decide", "attempt", "relay", "settle"),
    "plan": ("direct", "pull", "split"),
    "policy": tuple(f"policy-{number}" for number in range(4)),
    "reason": ("connect_failed", "upstream_error", "upstream_timeout", "upstream_broken", "prefix", "price", "cold"),
    "resource": ("prefill", "kv_cache", "decode_steps"),
    "result": RESULTS,
    "role": ("both", "prefill", "decode"),
    "source": ("kubernetes", "file"),
    "stage": ("all", "available", "captured", "delivered"),
    "state": tuple(state.value for state in KNOWN_STATES),
    "subject": tuple(f"organization/a-model-{number}/vllm/h100x4" for number in range(4)),
    "tenant": (*(f"{number:02}-".ljust(MAX_TENANT_CHARACTERS, "t") for number in range(NAMED_TENANTS)), OTHER),
    "tier": ("gpu", "cpu", "disk", "remote", "peer"),
    "trust": tuple(trust.value for trust in PrefixTrust),
    "engine": ("vllm",),
    "version": ("0.32.0",),
    "set_version": ("6f9c7d5b",),
    "python_version": ("3.13.1",),
    "pool": tuple(f"pool-{number}" for number in range(4)),
    "pod": tuple(POD_NAMES),
    "holder": tuple(POD_NAMES),
}
OTHER_NAMES = tuple(f"name-{number}" for number in range(4))
"""Labels that were added since."""
T = TypeVar("T")


def full_metrics() -> Metrics:
    """The metrics of a router, with every series."""
    metrics = Metrics()
    for metric in metrics.registry.collectors:
        if isinstance(metric, Labelled):
            for labels in _labels(metric.declared.labels):
                _fill(metric.labels(*labels), f"{7:032x}" if metric.declared.exemplars else "")
    return metrics


def _labels(names: Labels) -> Iterator[Labels]:
    """All combinations that can occur: a pod has one model, and few of its requests fail."""
    values = [NAMES.get(name, OTHER_NAMES) for name in names]
    for at, name in enumerate(names):
        if name == "result" and "pod" in names:
            values[at] = RESULTS[:3]
        if name == "pod" and "subject" in names:
            values[at] = ("", *POD_NAMES[: OWN_FITS // 4])
        if name == "model" and {"pod", "holder", "pool"} & set(names):
            values[at] = NAMES["model"][:1]
    yield from product(*values)


def _fill(child: Any, trace_id: str) -> None:
    if isinstance(child, Buckets):
        for bound in [*child.bounds] * 6:
            child.observe(bound * 1.01)
        for bound in child.bounds:
            child.observe(bound * 1.01, trace_id)
    elif isinstance(child, Count):
        child.value = 123_456.789


def fleet() -> FleetSnapshot:
    """All pods, ready."""
    load = PodLoad(running=3, waiting=1, kv_usage=0.51, scraped_at_s=1.0)
    return FleetSnapshot(1, tuple(PodStatus(pod(name), PodState.READY, load) for name in POD_NAMES))


def turns_of(work: Coroutine[Any, Any, T]) -> tuple[T, list[float]]:
    """Run a coroutine that only yields to the event loop. Its result, and the CPU milliseconds of each turn."""
    turns_ms: list[float] = []
    while True:
        began_s = time.thread_time()
        try:
            work.send(None)
        except StopIteration as done:
            return done.value, [*turns_ms, (time.thread_time() - began_s) * 1000]
        turns_ms.append((time.thread_time() - began_s) * 1000)


async def _observe(metrics: Metrics, pods: FleetSnapshot) -> None:
    """The gauges of pods, as before each rendering."""
    metrics.observe_fleet(pods, {}, 10_000_000)
    await asyncio.sleep(0)
    metrics.observe_loads(pods, 2.0)


def render(text_format: TextFormat = PLAIN) -> tuple[bytes, list[float]]:
    """The text, and the CPU milliseconds of each turn."""
    metrics, pods = full_metrics(), fleet()
    _, observed_ms = turns_of(_observe(metrics, pods))
    text, rendered_ms = turns_of(metrics.render_in_turns(text_format))
    return text, [*observed_ms, *rendered_ms]


def main(rounds: int) -> None:
    """Print the figures of both formats; exit code 1 if one exceeds its bound."""
    gc.disable()
    are_bounded = [_is_bounded(name, rounds) for name in FORMATS]
    sys.exit(not all(are_bounded))


def _is_bounded(name: str, rounds: int) -> bool:
    longest_ms, text, turns_ms = [], b"", list[float]()
    for _ in range(rounds):
        text, turns_ms = render(FORMATS[name])
        longest_ms.append(max(turns_ms))
        gc.collect()
    found = {
        "format": name,
        "body_bytes": len(text),
        "series": sum(not line.startswith(b"#") for line in text.splitlines()),
        "turns": len(turns_ms),
        "total_ms": round(sum(turns_ms), 1),
        "longest_turn_ms": [round(value, 2) for value in longest_ms],
    }
    print(json.dumps(found))
    return len(text) <= MAX_BODY_BYTES and statistics.median(longest_ms) <= MAX_TURN_MS


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
