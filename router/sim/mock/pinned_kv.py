"""Which KV waits for a decode leg, and for how long?

Every entry is taken once at most, by its key, or its lease ends; until then its blocks count as used. This file never
speaks HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from router.sim.mock.handoff_counters import HandoffCounters


@dataclass(slots=True, eq=False)
class PinnedKv:
    """The KV of one prefill leg. `digest` tells of which prompt it is."""

    key: str
    digest: int
    tokens: int
    blocks: tuple[int, ...]
    cached_tokens: int
    release: Callable[[], None]
    """Gives its blocks back; called once."""
    delivered: asyncio.Future[bool] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """True once a decode leg has it, False once nobody will ever have it."""


class PinTable:
    """What one life of an engine keeps for others."""

    def __init__(self, lease_s: float, counters: HandoffCounters) -> None:
        self._lease_s = lease_s
        self._counters = counters
        self._waiting: dict[str, tuple[PinnedKv, asyncio.TimerHandle]] = {}
        self._taken: dict[PinnedKv, None] = {}
        self._arrival = asyncio.Event()

    @property
    def keys(self) -> tuple[str, ...]:
        """Whatever still has blocks in use: what waits to be taken, and what is on its way."""
        return (*self._waiting, *(kept.key for kept in self._taken))

    def keep(self, kept: PinnedKv) -> None:
        """From now on `take` finds it. A key that is in use already loses what it had."""
        if kept.key in self._waiting:
            self._drop(kept.key)
        timer = asyncio.get_running_loop().call_later(self._lease_s, self._expire, kept.key)
        self._waiting[kept.key] = (kept, timer)
        self._arrival.set()
        self._arrival = asyncio.Event()

    async def take(self, key: str, *, wait: bool) -> PinnedKv | None:
        """The KV under a key, which nobody can take again; None where there is none, unless told to `wait` for it."""
        while wait and key not in self._waiting:
            await self._arrival.wait()
        if key not in self._waiting:
            return None
        kept, timer = self._waiting.pop(key)
        timer.cancel()
        self._taken[kept] = None
        return kept

    def free(self, kept: PinnedKv) -> None:
        """What was taken has arrived, or never will: its blocks are free again."""
        if kept in self._taken:
            del self._taken[kept]
            _end(kept, delivered=True)

    def drop(self, kept: PinnedKv) -> None:
        """Nobody needs it any more."""
        if kept.key in self._waiting and self._waiting[kept.key][0] is kept:
            self._drop(kept.key)

    def expire_all(self) -> None:
        """End every lease now. What is already on its way is not under one."""
        for key in list(self._waiting):
            self._expire(key)

    def forget(self) -> None:
        """The engine died: its cache is gone, and what was kept in it."""
        for key in list(self._waiting):
            self._drop(key)
        for kept in list(self._taken):
            self.free(kept)

    def _expire(self, key: str) -> None:
        self._counters.expired += 1
        self._drop(key)

    def _drop(self, key: str) -> None:
        kept, timer = self._waiting.pop(key)
        timer.cancel()
        _end(kept, delivered=False)


def _end(kept: PinnedKv, *, delivered: bool) -> None:
    kept.release()
    if not kept.delivered.done():
        kept.delivered.set_result(delivered)
