"""Closes a client's connection when the client takes too long: to begin a request, to finish it, or to read a response.

One timer per connection serves all three deadlines. It fires no later than the shortest of them can expire, and then
checks which one did, so that requests set no timers of their own. A connection that is idle for too long is closed
only if its socket holds no unread bytes.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Protocol

RECHECK_S = 0.005
"""Time for the event loop to read bytes that already arrived."""


@dataclass(frozen=True, slots=True)
class ClientTimeouts:
    """How long a client may take."""

    keep_alive_s: float
    """Between two requests."""
    request_s: float
    """From the first byte of a request to its last."""
    write_s: float
    """Without reading anything of what is buffered for it."""


class ClientDeadlines:
    """The deadlines of one connection. `on_late_request` is called when a request is not complete in time; every other
    deadline closes the connection."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: asyncio.Transport,
        timeouts: ClientTimeouts,
        on_late_request: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._transport = transport
        self._timeouts = timeouts
        self._keep_alive_s = timeouts.keep_alive_s
        self._on_late_request = on_late_request
        self._shortest_s = min(timeouts.keep_alive_s, timeouts.request_s, timeouts.write_s)
        self._begin_by_s = inf
        self._complete_by_s = inf
        self._read_by_s = inf
        self._buffered_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def await_request(self) -> None:
        """Wait for the client's next request."""
        self._complete_by_s, self._begin_by_s = inf, self._loop.time() + self._keep_alive_s
        if self._timer is None:
            self._start_timer()

    def await_rest_of_request(self) -> None:
        """Wait for the rest of a request that the client has begun."""
        self._begin_by_s, self._complete_by_s = inf, self._loop.time() + self._timeouts.request_s
        if self._timer is None:
            self._start_timer()

    def disarm(self) -> None:
        """Wait for nothing: the router is to act next."""
        self._begin_by_s = self._complete_by_s = inf

    def await_reading(self) -> None:
        """Wait for the client to read what is buffered for it."""
        self._buffered_bytes = self._transport.get_write_buffer_size()
        self._read_by_s = self._loop.time() + self._timeouts.write_s
        if self._timer is None:
            self._start_timer()

    def shorten(self, keep_alive_s: float) -> None:
        """Set a new, shorter time between two requests, also for the present wait."""
        self._keep_alive_s, self._shortest_s = keep_alive_s, min(self._shortest_s, keep_alive_s)
        if self._timer is not None:
            self._timer.cancel()
        self._start_timer()
        if self._begin_by_s < inf:
            self.await_request()

    def end(self) -> None:
        """The connection is closed."""
        if self._timer is not None:
            self._timer.cancel()
        self._on_late_request = _ignore  # breaks a reference cycle

    def _start_timer(self) -> None:
        self._timer = self._loop.call_later(self._shortest_s, self._check)

    def _check(self) -> None:
        self._timer = None
        now_s, buffered_bytes = self._loop.time(), self._transport.get_write_buffer_size()
        if buffered_bytes:
            self._check_reading(buffered_bytes, now_s)
            next_s = self._read_by_s
        else:
            self._read_by_s = inf
            if now_s >= self._complete_by_s:
                self._complete_by_s = inf
                self._on_late_request()
            elif now_s >= self._begin_by_s:
                if not self._transport.is_closing() and has_unread(self._transport.get_extra_info("socket")):
                    self._timer = self._loop.call_later(RECHECK_S, self._check)
                else:
                    self._transport.close()
                return
            next_s = min(self._begin_by_s, self._complete_by_s)
        if next_s < inf:
            self._timer = self._loop.call_later(min(max(next_s - now_s, 0.0), self._shortest_s), self._check)

    def _check_reading(self, buffered_bytes: int, now_s: float) -> None:
        """The buffer can only shrink here: nothing is added to it for a slow client."""
        if self._read_by_s == inf or buffered_bytes < self._buffered_bytes:
            self._buffered_bytes, self._read_by_s = buffered_bytes, now_s + self._timeouts.write_s
        elif now_s >= self._read_by_s:
            self._read_by_s = inf
            self._transport.abort()


class HasFile(Protocol):
    """A socket."""

    def fileno(self) -> int:
        """Its file descriptor."""


def has_unread(*sockets: HasFile) -> bool:
    """Whether any of these sockets holds bytes or connections that the event loop has not read yet."""
    poll = select.poll()
    for one in sockets:
        poll.register(one, select.POLLIN)
    return bool(poll.poll(0))


def _ignore() -> None:
    pass
