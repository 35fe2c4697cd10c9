"""What do the metrics of several workers say together?

Counters and histograms add up, and so do the gauges of what each worker has of its own; what every worker sees alike is
told by the one that is asked. This file knows what metrics mean, and moves no byte.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

import msgspec
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.samples import Sample

ADDED_GAUGES = frozenset({"warmroute_in_flight_requests", "warmroute_pod_in_flight_requests", "warmroute_index_bytes"})
SEEN_ALIKE = frozenset({"warmroute_kv_events", "warmroute_policy_reloads"})
"""Counters of what every worker follows itself."""
LEAST_GAUGES = frozenset({"warmroute_kv_stream_complete", "warmroute_index_holder_complete"})
"""1 only where it is for every worker."""

Found: TypeAlias = tuple[str, dict[str, str], float]
"""Name, labels and value of a sample."""
Dump: TypeAlias = Mapping[str, list[Found]]
"""Samples by family."""

_decode = msgspec.msgpack.Decoder(dict[str, list[Found]]).decode


async def dump_metrics(registry: CollectorRegistry) -> bytes:
    """All that `joined` adds to with what others have, read off a family in each turn of the event loop."""
    families: dict[str, list[Found]] = {}
    for family in registry.collect():
        if _joins(family):
            families[family.name] = [sample[:3] for sample in family.samples]
        await asyncio.sleep(0)
    return msgspec.msgpack.encode(families)


def merge_metrics(registry: CollectorRegistry, others: Iterable[bytes]) -> Iterator[Metric]:
    """The families of all together. Raises `ValueError` where one of `others` is no dump."""
    dumps = [_decode(dump) for dump in others]
    return (_together(family, dumps) for family in registry.collect())


def _joins(family: Metric) -> bool:
    if family.type == "gauge":
        return family.name in ADDED_GAUGES | LEAST_GAUGES
    return family.name not in SEEN_ALIKE


def _together(family: Metric, others: list[dict[str, list[Found]]]) -> Metric:
    """Series that only others have come last."""
    if not _joins(family):
        return family
    values: dict[tuple[str, tuple[tuple[str, str], ...]], list[float]] = {}
    for samples in ([sample[:3] for sample in family.samples], *(dump.get(family.name, []) for dump in others)):
        for name, labels, value in samples:
            values.setdefault((name, tuple(labels.items())), []).append(value)
    join = min if family.name in LEAST_GAUGES else sum
    merged = Metric(family.name, family.documentation, family.type)
    merged.samples = [Sample(name, dict(labels), join(found)) for (name, labels), found in values.items()]
    return merged
