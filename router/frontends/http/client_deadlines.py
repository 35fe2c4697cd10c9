"""Closes a client's connection when the client takes too long: to begin a request, to finish it, or to read a response.

One timer per connection serves all three deadlines: it fires at the interval of the shortest one and checks all three,
so that no timer is set per request. An idle connection is closed only if its socket holds no unread bytes.
"""

from __future__ import annotations

import asyncio
import select
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from typing import TYPE_CHECKING

from router.frontends.http.exchange import MAX_COMPARED

if TYPE_CHECKING:
    from router.config.schema import Limits

RECHECK_S = 0.005
"""Time for the event loop to read bytes that already arrived."""


@dataclass(slots=True, eq=False)
class ClientDeadlines:
    """The deadlines of one connection. `_on_late_request` is called when a request is not complete in time; every other
    deadline closes the connection."""

    _loop: asyncio.AbstractEventLoop
    _transport: asyncio.Transport
    _limits: Limits
    _keep_alive_s: float
    _on_late_request: Callable[[], None]
    waiting_since_s: float = inf
    """Since when the client's next action has been awaited."""
    _shortest_s: float = field(init=False)
    _act_by_s: float = inf
    """When the client must begin or complete its request; then `_on_late` is called."""
    _on_late: Callable[[], None] = field(init=False)
    _read_by_s: float = inf
    _drain_by_s: float = inf
    _buffered_bytes: int = 0
    _timer: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        limits, self._on_late = self._limits, self._close_idle
        timeouts_s = limits.request_timeout_s, limits.write_timeout_s, limits.slow_read_timeout_s
        self._shortest_s = min(self._keep_alive_s, *timeouts_s)

    def await_request(self) -> None:
        self._await(self._keep_alive_s, self._close_idle)

    def await_rest_of_request(self) -> None:
        self._await(self._limits.request_timeout_s, self._on_late_request)

    def _await(self, timeout_s: float, on_late: Callable[[], None]) -> None:
        self.waiting_since_s = self._loop.time()
        self._act_by_s, self._on_late = self.waiting_since_s + timeout_s, on_late
        if self._timer is None:
            self._start_timer()

    def disarm(self) -> None:
        """Clear both request deadlines: the router acts next."""
        self._act_by_s = inf

    def await_reading(self) -> None:
        self._buffered_bytes, now_s = self._transport.get_write_buffer_size(), self._loop.time()
        self._read_by_s = now_s + self._limits.write_timeout_s
        self._drain_by_s = now_s + self._limits.slow_read_timeout_s
        if self._timer is None:
            self._start_timer()

    def drained(self) -> None:
        """The client has read most of what was buffered for it."""
        self._drain_by_s = inf

    def shorten(self, keep_alive_s: float) -> None:
        """Shorten the time between two requests, also for the current wait."""
        self._keep_alive_s, self._shortest_s = keep_alive_s, min(self._shortest_s, keep_alive_s)
        if self._timer is not None:
            self._timer.cancel()
        self._start_timer()
        if self._act_by_s < inf and self._on_late == self._close_idle:
            self.await_request()

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._on_late = self._on_late_request = lambda: None  # breaks reference cycles

    def _start_timer(self) -> None:
        self._timer = self._loop.call_later(self._shortest_s, self._check)

    def _check(self) -> None:
        self._timer = None
        now_s, buffered_bytes = self._loop.time(), self._transport.get_write_buffer_size()
        if buffered_bytes:
            self._check_reading(buffered_bytes, now_s)
            next_s = min(self._read_by_s, self._drain_by_s)
        else:
            self._read_by_s = self._drain_by_s = inf
            if now_s >= self._act_by_s:
                self._act_by_s = inf
                self._on_late()
            next_s = self._act_by_s
        if next_s < inf:
            self._timer = self._loop.call_later(min(max(next_s - now_s, 0.0), self._shortest_s), self._check)

    def _close_idle(self) -> None:
        if not self._transport.is_closing() and has_unread(self._transport.get_extra_info("socket").fileno()):
            self._act_by_s = self._loop.time() + RECHECK_S
        else:
            self._transport.close()

    def _check_reading(self, buffered_bytes: int, now_s: float) -> None:
        """Abort if the client reads nothing for too long, or too slowly. The buffer only shrinks: nothing is added to
        it meanwhile."""
        if now_s >= self._drain_by_s:
            self._read_by_s = self._drain_by_s = inf
            self._transport.abort()
        elif self._read_by_s == inf or buffered_bytes < self._buffered_bytes:
            self._buffered_bytes, self._read_by_s = buffered_bytes, now_s + self._limits.write_timeout_s
        elif now_s >= self._read_by_s:
            self._read_by_s = inf
            self._transport.abort()


def has_unread(*sockets: int) -> bool:
    """Whether any socket, given by file descriptor, holds bytes or connections that the event loop has not read yet."""
    poll = select.poll()
    for fd in sockets:
        poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


MIN_NEWCOMERS = 64
"""Connections, and TLS handshakes, that are possible while all places are taken."""
MAX_EXCESS = 64
"""More of them lose the first one at once, and not when the event loop has read what it has sent."""


@dataclass(slots=True, eq=False)
class Newcomers:
    """Connections, or TLS handshakes. There may be as many as there are `free_places`, and always a few. If there are
    more, the network with the most loses the one that came first, when what it had sent has been read."""

    free_places: Callable[[], int]
    networks: dict[Callable[[], bool], str] = field(default_factory=dict)
    """By the function that ends a connection and returns True, or returns False to be called again."""

    def add(self, drop: Callable[[], bool], network: str) -> None:
        self.networks[drop] = network
        excess = self._excess()
        if excess > MAX_EXCESS:  # many are accepted in one turn of the event loop, and each is an open file
            self._drop_first()
        elif excess > 0:
            asyncio.get_running_loop().call_later(RECHECK_S, self._drop_first)

    def _excess(self) -> int:
        return len(self.networks) - max(self.free_places(), MIN_NEWCOMERS)

    def _drop_first(self) -> None:
        if self._excess() > 0:
            compared = dict(islice(self.networks.items(), MAX_COMPARED))
            counts = Counter(compared.values())
            first = max(compared, key=lambda one: counts[compared[one]])
            if first():
                self.networks.pop(first, None)
            else:
                self.networks[first] = self.networks.pop(first)
                asyncio.get_running_loop().call_later(RECHECK_S, self._drop_first)
