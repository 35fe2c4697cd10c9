"""The metrics of several workers of one router as one page, each joined as it is declared."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeAlias

import msgspec
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.samples import Sample

from router.observe.declared.declaration import Join
from router.observe.declared.metric_catalog import DECLARED

Found: TypeAlias = tuple[str, dict[str, str], float]
"""Name, labels and value of a sample."""
Dump: TypeAlias = Mapping[str, list[Found]]
"""Samples by family."""

_JOINS: dict[Join, Callable[[Iterable[float]], float]] = {
    Join.SUM: sum,
    Join.MAX: max,
    Join.MIN: min,
    Join.WORKER: sum,
}
_decode = msgspec.msgpack.Decoder(dict[str, list[Found]]).decode


async def dump_metrics(registry: CollectorRegistry) -> bytes:
    """The samples that `merge_metrics` needs from this worker, collected one family in each turn of the event loop."""
    families: dict[str, list[Found]] = {}
    for family in registry.collect():
        if DECLARED[family.name].join is not Join.SAME:
            families[family.name] = [sample[:3] for sample in family.samples]
        await asyncio.sleep(0)
    return msgspec.msgpack.encode(families)


def merge_metrics(registry: CollectorRegistry, others: Iterable[bytes]) -> Iterator[Metric]:
    """The families of all workers. Raises `ValueError` where one of `others` is not a dump."""
    dumps = [_decode(dump) for dump in others]
    return (_merged(family, dumps) for family in registry.collect())


def _merged(family: Metric, others: list[dict[str, list[Found]]]) -> Metric:
    """One family of all workers; series that only other workers have are last."""
    join = DECLARED[family.name].join
    if join is Join.SAME:
        return family
    values: dict[tuple[str, tuple[tuple[str, str], ...]], list[float]] = {}
    for samples in ([sample[:3] for sample in family.samples], *(dump.get(family.name, []) for dump in others)):
        for name, labels, value in samples:
            values.setdefault((name, tuple(labels.items())), []).append(value)
    result = Metric(family.name, family.documentation, family.type)
    result.samples = [Sample(name, dict(labels), _JOINS[join](found)) for (name, labels), found in values.items()]
    return result
