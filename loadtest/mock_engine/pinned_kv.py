"""KV that a prefill engine holds for decode legs.

An entry is taken by its key, at most once, or it ends with its lease. Its blocks count as used until its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class HandoffCounters:
    """Handoff counters of one engine epoch. As in real engines, wrong KV that is not detected is not counted."""

    receiving: int = 0
    """Requests waiting for their KV."""
    failed: int = 0
    """Decode legs that failed to load their KV."""
    expired: int = 0
    """Prefill legs whose lease ended."""


@dataclass(slots=True, eq=False)
class PinnedKv:
    """The KV of one prefill leg. `digest` identifies its prompt."""

    key: str
    digest: int
    tokens: int
    blocks: tuple[int, ...]
    cached_tokens: int
    release: Callable[[], None]
    """Releases the blocks; called once."""
    delivered: asyncio.Future[bool] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """True once a decode leg has the KV, False once no decode leg can get it."""

    def end(self, *, delivered: bool) -> None:
        self.release()
        if not self.delivered.done():
            self.delivered.set_result(delivered)


class PinTable:
    def __init__(self, lease_s: float, counters: HandoffCounters) -> None:
        self._lease_s = lease_s
        self._counters = counters
        self._waiting: dict[str, tuple[PinnedKv, asyncio.TimerHandle]] = {}
        self._in_transfer: dict[PinnedKv, None] = {}
        self._added = asyncio.Event()

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys whose blocks are in use: waiting or in transfer."""
        return (*self._waiting, *(pinned.key for pinned in self._in_transfer))

    def add(self, pinned: PinnedKv, lease_s: float | None = None) -> None:
        """Hold `pinned` for `take`, for this time or the usual one. Drops an older entry with the same key."""
        if pinned.key in self._waiting:
            self._drop(pinned.key)
        timer = asyncio.get_running_loop().call_later(lease_s or self._lease_s, self._expire, pinned.key)
        self._waiting[pinned.key] = (pinned, timer)
        self._added.set()
        self._added = asyncio.Event()

    async def take(self, key: str, *, wait: bool) -> PinnedKv | None:
        """Start the transfer of the KV under `key`. Without `wait`, returns None where there is none."""
        while wait and key not in self._waiting:
            await self._added.wait()
        if key not in self._waiting:
            return None
        pinned, timer = self._waiting.pop(key)
        timer.cancel()
        self._in_transfer[pinned] = None
        return pinned

    def free(self, pinned: PinnedKv) -> None:
        """End a transfer, successful or not. Idempotent."""
        if pinned in self._in_transfer:
            del self._in_transfer[pinned]
            pinned.end(delivered=True)

    def drop(self, pinned: PinnedKv) -> None:
        if pinned.key in self._waiting and self._waiting[pinned.key][0] is pinned:
            self._drop(pinned.key)

    def clear(self) -> None:
        """Drop everything: the engine has lost its cache."""
        for key in list(self._waiting):
            self._drop(key)
        for pinned in list(self._in_transfer):
            self.free(pinned)

    def _expire(self, key: str) -> None:
        self._counters.expired += 1
        self._drop(key)

    def _drop(self, key: str) -> None:
        pinned, timer = self._waiting.pop(key)
        timer.cancel()
        pinned.end(delivered=False)
