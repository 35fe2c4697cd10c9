"""Compares a pod's blocks in the cluster index with the engine's own replay of its events.

The index is read before and after the replay, so that concurrent changes count neither as missing nor as stale. This
file only reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from router.config.load import load
from router.config.pod_schema import PodConfig
from router.config.schema import RouterConfig
from router.engines.adapter import KvEventSource
from router.engines.engine_catalog import ENGINES
from router.errors import UpstreamError
from router.feeds.kv_zmq import REPLAY_IDLE_MS, fetch_replay
from router.feeds.probe import fetch_facts
from router.feeds.watch import Fetch
from router.frontends.http.upstream import UpstreamPools
from router.index.events import UndecodableBatch, parse_frames
from router.index.holders import HolderId
from router.publisher.changes import HolderPlaces
from router.stores.index_reader import IndexReader
from router.stores.redis_connection import connect
from router.stores.redis_schema import BlockPlace, Keys
from router.types import BlockHash, BlocksCleared, Generation, Pod
from tests.index.decoding import decode_batch
from tests.kit.scenes import make_pod

TIMEOUT_S = 5.0

Held = set[tuple[BlockPlace, BlockHash]]


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """Differences of one holder. `stale` is None if the engine's replay does not start at its first event."""

    holder: HolderId
    indexed: int = 0
    announced: int = 0
    missing: int = 0
    stale: int | None = None
    note: str = ""

    @property
    def agrees(self) -> bool:
        """Whether the blocks were compared and are equal."""
        return not self.note and not self.missing and not self.stale


async def verify_index(path: Path) -> list[VerifyResult]:
    """Compare all holders of the index that a router's configuration names."""
    config = load(path, RouterConfig)
    redis = config.index.redis
    assert redis is not None
    configured = {pod.advertised_url or pod.url: pod for pod in config.pods}
    connection, pools = connect(redis), UpstreamPools(config.limits)
    reader = IndexReader(connection, Keys(redis.namespace))
    try:
        return [
            await verify_holder(
                reader,
                pools.fetch,
                generation,
                holder,
                row.facts.source if row.facts.source in ENGINES else "vllm",
                configured,
            )
            for generation in await reader.generations()
            for holder, row in sorted((await reader.rows(generation)).items())
        ]
    finally:
        pools.close()
        await connection.close()


async def verify_holder(
    reader: IndexReader,
    fetch: Fetch,
    generation: Generation,
    holder: HolderId,
    engine: str,
    configured: Mapping[str, PodConfig],
) -> VerifyResult:
    """Compare one holder. `configured`: pods by URL. Raises `redis.RedisError`."""
    row = await reader.row(generation, holder)
    if row is None:
        return VerifyResult(holder, note="not in the index")
    if row.facts.reach:
        return VerifyResult(holder, note="a store: it has no replay to compare with")
    rank = row.facts.rank if row.facts.rank >= 0 else None
    config = configured.get(row.facts.url)
    credentials = config.credentials if config else {}
    pod = make_pod(holder, url=row.facts.url, engine=engine, dp_rank=rank, **credentials)
    source = await _source(fetch, pod)
    if source is None or source.replay_endpoint is None:
        return VerifyResult(holder, note="the engine is not reachable or has no replay endpoint")
    before = await _indexed(reader, generation, holder)
    messages, ended = await fetch_replay(source.replay_endpoint, 0, REPLAY_IDLE_MS)
    after = await _indexed(reader, generation, holder)
    if not ended:
        return VerifyResult(holder, note="the engine's replay did not end")
    announced, from_start = _announced(messages, generation)
    stale = len((before & after) - announced) if from_start else None
    return VerifyResult(holder, len(after), len(announced), len(announced - (before | after)), stale)


async def _source(fetch: Fetch, pod: Pod) -> KvEventSource | None:
    try:
        return (await fetch_facts(fetch, pod, TIMEOUT_S)).kv_events
    except UpstreamError:
        return None


async def _indexed(reader: IndexReader, generation: Generation, holder: HolderId) -> Held:
    row = await reader.row(generation, holder)
    held: Held = set()
    if row is not None:
        async for tier, layer, blocks in reader.blocks(generation, holder, row):
            held.update(((tier, layer), block) for block in blocks)
    return held


def _announced(messages: Iterable[list[bytes]], generation: Generation) -> tuple[Held, bool]:
    """The blocks held according to the replay, and whether it starts with the engine's first message."""
    places, from_start = HolderPlaces(generation), True
    for position, frames in enumerate(messages):
        try:
            parsed = parse_frames(frames)
            events = decode_batch(parsed[1]) if parsed else ()
        except UndecodableBatch:
            from_start = False
            continue
        from_start = from_start and (position > 0 or (parsed is not None and parsed[0] == 0))
        for event in events:
            if isinstance(event, BlocksCleared):
                places = HolderPlaces(generation)
            else:
                places.apply(event)
    return {(place, block) for place, held in places.held().items() for block in held}, from_start
