"""The series that a worker sends to another one, whose page has those of all workers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping

import msgspec
from prometheus_client.registry import Collector

from router.observe.declared.declaration import Join
from router.observe.exposition import Dump, Registry
from router.observe.fast_metrics import Labelled, Labels, Numbers

_Rows = list[tuple[Labels, Numbers]]
_decode = msgspec.msgpack.Decoder(dict[str, msgspec.Raw]).decode
_decode_rows = msgspec.msgpack.Decoder(_Rows).decode


async def dump_metrics(registry: Registry) -> bytes:
    """The series that differ between workers, collected one metric in each turn of the event loop."""
    found: dict[str, _Rows] = {}
    for collector in registry.collectors:
        found.update(_rows(collector))
        await asyncio.sleep(0)
    return msgspec.msgpack.encode(found)


def _rows(collector: Collector) -> Iterator[tuple[str, _Rows]]:
    """The series of a collector by family."""
    if not isinstance(collector, Labelled):
        for family in collector.collect():
            yield family.name, [(tuple(one.labels.values()), [one.value]) for one in family.samples]
    elif collector.declared.join is not Join.SAME:
        yield collector.declared.name, list(collector.series().items())


def read_dump(dump: bytes) -> Dump:
    """The series of another worker, each family decoded when it is read. Raises `ValueError` for an invalid dump."""
    families = _decode(dump)

    def series(name: str) -> Mapping[Labels, Numbers]:
        return dict(_decode_rows(families[name])) if name in families else {}

    return series
