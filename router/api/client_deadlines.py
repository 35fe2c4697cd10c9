"""How long is a client waited for?

One timer a connection for whatever the client has to do next: ask, send the rest of its request, or read what was sent
to it. It goes off no later than the shortest of these waits can be over and looks whether one is, so that a request
costs no timer of its own. A connection on which nothing is asked is closed only if nothing waits in its socket: the one
request that can still be lost is one that crosses our end on its way. This file never reads or writes a byte.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Protocol

AGAIN_S = 0.005
"""After so long the event loop has come to what had not been read."""


@dataclass(frozen=True, slots=True)
class ClientTimeouts:
    """`keep_alive_s`: longest silence between two requests. `request_s`: from the first byte of a request to its last.
    `write_s`: longest time in which a client takes nothing of what is held for it."""

    keep_alive_s: float
    request_s: float
    write_s: float


class ClientDeadlines:
    """With one client. `late` is called when a request is not whole in time; everything else ends the connection."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: asyncio.Transport,
        timeouts: ClientTimeouts,
        late: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._transport = transport
        self._timeouts = timeouts
        self._keep_alive_s = timeouts.keep_alive_s
        self._late = late
        self._shortest_s = min(timeouts.keep_alive_s, timeouts.request_s, timeouts.write_s)
        self._ask_by_s = inf
        self._whole_by_s = inf
        self._read_by_s = inf
        self._held_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def await_request(self) -> None:
        """The client may begin a request."""
        self._whole_by_s, self._ask_by_s = inf, self._loop.time() + self._keep_alive_s
        if self._timer is None:
            self._set()

    def await_rest_of_request(self) -> None:
        """The client has begun a request."""
        self._ask_by_s, self._whole_by_s = inf, self._loop.time() + self._timeouts.request_s
        if self._timer is None:
            self._set()

    def disarm(self) -> None:
        """It is our turn."""
        self._ask_by_s = self._whole_by_s = inf

    def await_reading(self) -> None:
        """More is held for the client than it takes at once; or all there is, and it may never read it."""
        self._held_bytes = self._transport.get_write_buffer_size()
        self._read_by_s = self._loop.time() + self._timeouts.write_s
        if self._timer is None:
            self._set()

    def shorten(self, keep_alive_s: float) -> None:
        """From now on the silence between two requests may be no longer than this."""
        self._keep_alive_s, self._shortest_s = keep_alive_s, min(self._shortest_s, keep_alive_s)
        if self._timer is not None:
            self._timer.cancel()
        self._set()
        if self._ask_by_s < inf:
            self.await_request()

    def end(self) -> None:
        """The connection is gone."""
        if self._timer is not None:
            self._timer.cancel()
        self._late = _nobody

    def _set(self) -> None:
        self._timer = self._loop.call_later(self._shortest_s, self._look)

    def _look(self) -> None:
        self._timer = None
        now_s, held_bytes = self._loop.time(), self._transport.get_write_buffer_size()
        if held_bytes:
            self._look_at_reading(held_bytes, now_s)
            next_s = self._read_by_s
        else:
            self._read_by_s = inf
            if now_s >= self._whole_by_s:
                self._whole_by_s = inf
                self._late()
            elif now_s >= self._ask_by_s:
                if not self._transport.is_closing() and has_unread(self._transport.get_extra_info("socket")):
                    self._timer = self._loop.call_later(AGAIN_S, self._look)
                else:
                    self._transport.close()
                return
            next_s = min(self._ask_by_s, self._whole_by_s)
        if next_s < inf:
            self._timer = self._loop.call_later(min(max(next_s - now_s, 0.0), self._shortest_s), self._look)

    def _look_at_reading(self, held_bytes: int, now_s: float) -> None:
        """What is held only shrinks while the client is slow: nothing is added then."""
        if self._read_by_s == inf or held_bytes < self._held_bytes:
            self._held_bytes, self._read_by_s = held_bytes, now_s + self._timeouts.write_s
        elif now_s >= self._read_by_s:
            self._read_by_s = inf
            self._transport.abort()


class HasFile(Protocol):
    """A socket."""

    def fileno(self) -> int:
        """Its file descriptor."""


def has_unread(*sockets: HasFile) -> bool:
    """Has anything come, or anybody who connects, that the event loop has not come to yet?"""
    poll = select.poll()
    for one in sockets:
        poll.register(one, select.POLLIN)
    return bool(poll.poll(0))


def _nobody() -> None:
    """Whoever was to be told is gone: to know them any longer would be a cycle."""
