"""Publishes the blocks of a Mooncake store, which is one holder.

Polls the store's master for the names of all objects (`/get_all_keys`). The response has about a hundred bytes per key
and lists only complete objects; the difference to the previous response shows what was added and removed. The
alternative `/batch_query_keys` needs the names in advance and returns three times the bytes. A block is one object per
part of the model (tensor, context and pipeline ranks; keys and values), and is held only with all of them. Objects are
named by the engine's hash, without tokens; the events of the engines resolve the hashes.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

import structlog

from router.errors import UpstreamError
from router.feeds.kv_zmq import KvSink
from router.types import BlocksRemoved, BlocksStored, KvEvent, Tier

MAX_POLL_SHARE = 0.1
"""Maximum share of time spent polling: a large store is polled less often."""
TIMEOUT_S = 30.0

_VLLM = re.compile(
    r"(?P<pool>.+)@tp_rank:(?P<part>\d+@pcp\d+@dcp\d+@pp_rank:\d+)@group:(?P<group>\d+)@(?P<digest>[0-9a-f]{16,})"
)
_HICACHE = re.compile(r"(?:(?P<pool>.+)_)?(?P<digest>[0-9a-f]{64})_(?P<part>(?:\d+_){0,2}[kv]|_k)")

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ObjectName:
    """A parsed object name. `pool` separates models and deployments in one store; `engine_hash` is the block's hash in
    the engine's events; `part` is the part of the block; `group` its attention group."""

    pool: str
    engine_hash: int
    part: str
    group: int = 0


def parse_name(name: str) -> ObjectName | None:
    """Parse a name of vLLM's MooncakeStoreConnector or SGLang's HiCache; None for any other name.

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
    """The blocks of one pool, from the listed names. A block is complete if it has all parts seen so far, of any block.
    If a model has several attention groups, `group` is the one that needs every block of a prefix."""

    def __init__(self, pool: str, group: int = 0) -> None:
        self._pool = pool
        self._group = group
        self._names: set[str] = set()
        self._parts: set[str] = set()
        self._present: dict[int, int] = {}
        """Number of stored parts by engine hash."""
        self._held: set[int] = set()

    @property
    def held_blocks(self) -> int:
        return len(self._held)

    def update(self, names: Iterable[str]) -> list[KvEvent]:
        """Replace the listing. Returns the changes as events, removals first."""
        listed = set(names)
        removed, added = self._names - listed, listed - self._names
        self._names = listed
        parts_before = len(self._parts)
        touched = self._count(removed, -1) | self._count(added, +1)
        return self._events(touched if len(self._parts) == parts_before else self._held | touched)

    def _count(self, names: Iterable[str], by: int) -> set[int]:
        touched = set()
        for name in names:
            parsed = parse_name(name)
            if parsed is not None and parsed.pool == self._pool and parsed.group == self._group:
                self._parts.add(parsed.part)
                self._present[parsed.engine_hash] = self._present.get(parsed.engine_hash, 0) + by
                touched.add(parsed.engine_hash)
        return touched

    def _events(self, touched: set[int]) -> list[KvEvent]:
        present = {engine_hash: self._present.get(engine_hash, 0) for engine_hash in touched}
        complete = {engine_hash for engine_hash, parts in present.items() if parts == len(self._parts)}
        removed, stored = (touched - complete) & self._held, complete - self._held
        self._held -= removed
        self._held |= stored
        for engine_hash, parts in present.items():
            if not parts:
                del self._present[engine_hash]
        events: list[KvEvent] = []
        if removed:
            events.append(BlocksRemoved(block_hashes=tuple(removed), tier=Tier.REMOTE))
        if stored:
            events.append(BlocksStored(block_hashes=tuple(stored), tier=Tier.REMOTE))
        return events


@dataclass(slots=True, eq=False)
class MooncakeSource:
    """Polls one pool of one store. `master_url` is the master's HTTP admin port."""

    holder: str
    master_url: str
    listing: Listing
    sink: KvSink
    get_url: Callable[[str, float], Awaitable[bytes]]
    poll_interval_s: float
    _complete: bool | None = None

    async def run(self) -> None:
        now_s = asyncio.get_running_loop().time
        while True:
            started_s = now_s()
            await self.poll()
            await asyncio.sleep(max(self.poll_interval_s, (now_s() - started_s) / MAX_POLL_SHARE))

    async def poll(self) -> None:
        """Poll once. While the master does not answer, the known blocks stay."""
        try:
            body = await self.get_url(self.master_url.rstrip("/") + "/get_all_keys", TIMEOUT_S)
        except UpstreamError as error:
            if self._complete is not False:
                log.warning("Mooncake master does not answer", holder=self.holder, error=repr(error))
            self._set_complete(complete=False)
            return
        await self._update(body.decode(errors="replace"))
        self._set_complete(complete=True)

    async def _update(self, text: str) -> None:
        held = self.listing.held_blocks
        # in a thread: comparing a million names takes a second
        events = await asyncio.to_thread(lambda: self.listing.update(text.split("\n")))
        if held and not self.listing.held_blocks:
            log.info("store is empty after a restart or clear", holder=self.holder)
            self.sink.restarted(self.holder)
        elif events:
            self.sink.apply(self.holder, tuple(events))

    def _set_complete(self, *, complete: bool) -> None:
        if self._complete is not complete:
            self._complete = complete
            self.sink.stream_state(self.holder, complete=complete)
