"""The state of the pods' event streams."""

from __future__ import annotations

from router.feeds.kv_streams import KvStreams
from router.fleet.fleet import Fleet
from router.observe.metrics import Metrics
from router.stores.prefix_store import LocalStore
from router.types import BlocksRemoved


def test_events_are_counted_as_the_engine_announced_them() -> None:
    """Not the pieces in which they are applied."""
    metrics = Metrics()
    streams = KvStreams(Fleet(), LocalStore(), metrics)
    for blocks in ((1, 2), (3, 4)):
        streams.apply("a", (BlocksRemoved(block_hashes=blocks),))
    streams.applied("a", 1)
    assert metrics.kv_events.labels("a").value == 1.0
