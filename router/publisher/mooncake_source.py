"""Which blocks does a Mooncake store hold?

The store is the holder. Its master is asked, again and again, for the names of everything in it (`/get_all_keys`): that
is one answer of about a hundred bytes a key, it shows what came as well as what went, and it lists an object only once
it is complete. `/batch_query_keys` would need the names beforehand and answers three times as many bytes. A block is
one object for every part of the model (tensor, context and pipeline ranks; keys and values), and held only if all are
there. Blocks are named by the engine's own hash, without tokens: engines that announce theirs say what they stand for.
This file never reads an object, and never writes to the store.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from dataclasses import dataclass

import httpx
import structlog

from router.feeds.kv_zmq import KvSink
from router.types import BlocksRemoved, BlocksStored, KvEvent, Tier

POLL_EVERY_S = 2.0
MOST_OF_THE_TIME = 0.1
"""A store so large that a poll takes long is polled less often: this share of the time at most."""
ANSWER_WITHIN_S = 30.0

_VLLM = re.compile(
    r"(?P<pool>.+)@tp_rank:(?P<part>\d+@pcp\d+@dcp\d+@pp_rank:\d+)@group:(?P<group>\d+)@(?P<digest>[0-9a-f]{16,})"
)
_HICACHE = re.compile(r"(?:(?P<pool>.+)_)?(?P<digest>[0-9a-f]{64})_(?P<part>(?:\d+_){0,2}[kv]|_k)")

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ObjectName:
    """What the name of one stored object says. `pool` is what separates models and deployments in one store;
    `engine_hash` the block's hash as the engine's events have it; `part` which share of the block this is; `group` the
    attention group that it belongs to."""

    pool: str
    engine_hash: int
    part: str
    group: int = 0


def parse_name(name: str) -> ObjectName | None:
    """An object as vLLM's MooncakeStoreConnector or SGLang's HiCache names it; None for anything else.

        vLLM     [<cache_prefix>@]<model>[<namespace>]@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@<digest>
        HiCache  [<tag>_]<model>_<digest>_<tp>[_<pp>]_k, and _v; of MLA models one, <digest>_[<pp>]_k

    vLLM's events carry the last eight bytes of the digest, SGLang's the first. SGLang's side pools (draft models,
    windows, states) are None.
    """
    if found := _VLLM.fullmatch(name):
        return ObjectName(found["pool"], int(found["digest"][-16:], 16), found["part"], int(found["group"]))
    if found := _HICACHE.fullmatch(name):
        return ObjectName(found["pool"] or "", int(found["digest"][:16], 16), found["part"])
    return None


class Listing:
    """One pool's blocks, by what the store lists. Which parts a block has is learnt from the blocks: all that were ever
    seen of any. Of a model with several attention groups follow the one that needs every block of a prefix."""

    def __init__(self, pool: str, group: int = 0) -> None:
        self._pool = pool
        self._group = group
        self._names: set[str] = set()
        self._parts: set[str] = set()
        self._present: dict[int, int] = {}
        """How many parts of a block are there, by engine hash."""
        self._held: set[int] = set()

    @property
    def held_blocks(self) -> int:
        """Blocks that are there in all their parts."""
        return len(self._held)

    def update(self, names: Iterable[str]) -> list[KvEvent]:
        """What has changed, now that the store lists exactly these objects. Removals come first."""
        listed = set(names)
        gone, fresh = self._names - listed, listed - self._names
        self._names = listed
        parts_before = len(self._parts)
        touched = self._count(gone, -1) | self._count(fresh, +1)
        return self._events(touched if len(self._parts) == parts_before else self._held | touched)

    def _count(self, names: Iterable[str], by: int) -> set[int]:
        touched = set()
        for name in names:
            seen = parse_name(name)
            if seen is not None and seen.pool == self._pool and seen.group == self._group:
                self._parts.add(seen.part)
                self._present[seen.engine_hash] = self._present.get(seen.engine_hash, 0) + by
                touched.add(seen.engine_hash)
        return touched

    def _events(self, touched: set[int]) -> list[KvEvent]:
        present = {engine_hash: self._present.get(engine_hash, 0) for engine_hash in touched}
        whole = {engine_hash for engine_hash, parts in present.items() if parts == len(self._parts)}
        removed, stored = (touched - whole) & self._held, whole - self._held
        self._held -= removed
        self._held |= stored
        for engine_hash, parts in present.items():
            if not parts:
                del self._present[engine_hash]
        events: list[KvEvent] = []
        if removed:
            events.append(BlocksRemoved(block_hashes=tuple(removed), tier=Tier.REMOTE))
        if stored:
            named = tuple(stored)
            events.append(
                BlocksStored(block_hashes=named, parent_hash=None, tokens=(), block_size_tokens=0, tier=Tier.REMOTE)
            )
        return events


class MooncakeSource:
    """Follows one pool of one store. `master_url` is that of the master's HTTP admin port. `run` never returns."""

    def __init__(
        self,
        holder: str,
        master_url: str,
        pool: str,
        sink: KvSink,
        client: httpx.AsyncClient,
        *,
        group: int = 0,
        poll_every_s: float = POLL_EVERY_S,
    ) -> None:
        self._holder = holder
        self._url = master_url.rstrip("/") + "/get_all_keys"
        self._sink = sink
        self._client = client
        self._poll_every_s = poll_every_s
        self._listing = Listing(pool, group)
        self._complete: bool | None = None

    async def run(self) -> None:
        """Poll until cancelled."""
        now_s = asyncio.get_running_loop().time
        while True:
            began_s = now_s()
            await self.poll()
            await asyncio.sleep(max(self._poll_every_s, (now_s() - began_s) / MOST_OF_THE_TIME))

    async def poll(self) -> None:
        """Ask once and tell the sink. While the master does not answer, what was known stays."""
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                answer = (await self._client.get(self._url)).raise_for_status()
        except (httpx.HTTPError, TimeoutError) as error:
            if self._complete is not False:
                log.warning("Mooncake's master does not answer", holder=self._holder, why=repr(error))
            self._tell(complete=False)
            return
        await self._take(answer.text)
        self._tell(complete=True)

    async def _take(self, text: str) -> None:
        held = self._listing.held_blocks
        # a store of a million objects takes a second to compare
        events = await asyncio.to_thread(lambda: self._listing.update(text.split("\n")))
        if held and not self._listing.held_blocks:
            log.info("store is empty: its master or its memory was restarted, or it was cleared", holder=self._holder)
            self._sink.restarted(self._holder)
        elif events:
            self._sink.apply(self._holder, tuple(events))

    def _tell(self, *, complete: bool) -> None:
        if self._complete is not complete:
            self._complete = complete
            self._sink.stream_state(self._holder, complete=complete)
