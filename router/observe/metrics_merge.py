"""Merges the metrics of several workers.

Counters, histograms and the gauges of each worker's own state are added up. Metrics that are equal in all workers are
taken from the worker that is scraped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

import msgspec
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.samples import Sample

SUMMED_GAUGES = frozenset({"warmroute_in_flight_requests", "warmroute_pod_in_flight_requests", "warmroute_index_bytes"})
EQUAL_COUNTERS = frozenset({"warmroute_kv_events", "warmroute_policy_reloads"})
"""Every worker counts the same events."""
MINIMUM_GAUGES = frozenset({"warmroute_kv_stream_complete", "warmroute_index_holder_complete"})
"""1 only if it is 1 in every worker."""

Found: TypeAlias = tuple[str, dict[str, str], float]
"""Name, labels and value of a sample."""
Dump: TypeAlias = Mapping[str, list[Found]]
"""Samples by family."""

_decode = msgspec.msgpack.Decoder(dict[str, list[Found]]).decode


async def dump_metrics(registry: CollectorRegistry) -> bytes:
    """The samples that `merge_metrics` needs from this worker, collected one family in each turn of the event loop."""
    families: dict[str, list[Found]] = {}
    for family in registry.collect():
        if _is_merged(family):
            families[family.name] = [sample[:3] for sample in family.samples]
        await asyncio.sleep(0)
    return msgspec.msgpack.encode(families)


def merge_metrics(registry: CollectorRegistry, others: Iterable[bytes]) -> Iterator[Metric]:
    """The families of all workers. Raises `ValueError` where one of `others` is not a dump."""
    dumps = [_decode(dump) for dump in others]
    return (_merged(family, dumps) for family in registry.collect())


def _is_merged(family: Metric) -> bool:
    if family.type == "gauge":
        return family.name in SUMMED_GAUGES | MINIMUM_GAUGES
    return family.name not in EQUAL_COUNTERS


def _merged(family: Metric, others: list[dict[str, list[Found]]]) -> Metric:
    """One family of all workers; series that only other workers have are last."""
    if not _is_merged(family):
        return family
    values: dict[tuple[str, tuple[tuple[str, str], ...]], list[float]] = {}
    for samples in ([sample[:3] for sample in family.samples], *(dump.get(family.name, []) for dump in others)):
        for name, labels, value in samples:
            values.setdefault((name, tuple(labels.items())), []).append(value)
    join = min if family.name in MINIMUM_GAUGES else sum
    result = Metric(family.name, family.documentation, family.type)
    result.samples = [Sample(name, dict(labels), join(found)) for (name, labels), found in values.items()]
    return result
