"""Deadlines of clients, on a fake clock."""

from __future__ import annotations

import asyncio
import atexit
import socket
from collections.abc import Callable
from typing import Any, cast

import pytest

from router.config.schema import Limits
from router.frontends.http.client_deadlines import ClientDeadlines

QUIET = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
"""It never receives anything."""
atexit.register(QUIET.close)


class Timer:
    """A timer handle."""

    def __init__(self, timers: list[Any], own: Any) -> None:
        self._timers, self._own = timers, own

    def cancel(self) -> None:
        self._timers.remove(self._own)


class Clock:
    """The timers of an event loop."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.set = 0

    def time(self) -> float:
        return self.now_s

    def call_later(self, delay_s: float, act: Callable[[], None]) -> Any:
        self.set += 1
        self.timers.append(timer := (self.now_s + delay_s, act))
        return Timer(self.timers, timer)

    def turn(self, by_s: float) -> None:
        """Advance the clock; timers fire in order."""
        until_s = self.now_s + by_s
        while due := min((timer for timer in self.timers if timer[0] <= until_s), key=lambda t: t[0], default=None):
            self.timers.remove(due)
            self.now_s = due[0]
            due[1]()
        self.now_s = until_s


class Wire:
    """A transport with `held_bytes` in its buffer."""

    def __init__(self) -> None:
        self.held_bytes = 0
        self.ended = ""
        self.socket = QUIET

    def get_write_buffer_size(self) -> int:
        return self.held_bytes

    def get_extra_info(self, _name: str) -> socket.socket:
        return self.socket

    def is_closing(self) -> bool:
        return bool(self.ended)

    def close(self) -> None:
        self.ended = "closed"

    def abort(self) -> None:
        self.ended = "aborted"


class Scene:
    def __init__(self) -> None:
        self.clock, self.wire, self.late = Clock(), Wire(), 0
        loop, transport = cast(asyncio.AbstractEventLoop, self.clock), cast(asyncio.Transport, self.wire)
        limits = Limits(request_timeout_s=10.0, write_timeout_s=20.0, slow_read_timeout_s=200.0)
        self.deadlines = ClientDeadlines(loop, transport, limits, 75.0, self._too_late)

    @property
    def ended(self) -> str:
        """How the connection was closed, if it was."""
        return self.wire.ended

    def _too_late(self) -> None:
        self.late += 1


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_an_idle_client_is_disconnected_after_the_keep_alive_timeout(scene: Scene) -> None:
    """Not earlier."""
    scene.deadlines.await_request()
    scene.clock.turn(74.9)
    assert scene.ended == ""
    scene.clock.turn(0.2)
    assert scene.ended == "closed"


def test_the_request_timeout_starts_with_the_request(scene: Scene) -> None:
    """The callback is called once."""
    scene.deadlines.await_request()
    scene.clock.turn(70)
    scene.deadlines.await_rest_of_request()
    scene.clock.turn(9.9)
    assert not scene.late
    scene.clock.turn(100)
    assert (scene.late, scene.ended) == (1, "")


def test_an_idle_client_with_unread_bytes_is_not_disconnected(scene: Scene) -> None:
    """Its request would be lost."""
    with (pair := socket.socketpair())[0], pair[1]:
        scene.wire.socket = pair[0]
        pair[1].send(b"POST")
        scene.deadlines.await_request()
        scene.clock.turn(80)
        assert scene.ended == ""
        pair[0].recv(4)
        scene.clock.turn(1)
        assert scene.ended == "closed"


def test_shorten_applies_only_to_the_time_between_requests(scene: Scene) -> None:
    """To the present wait and to later ones."""
    scene.deadlines.await_request()
    scene.clock.turn(1)
    scene.deadlines.shorten(0.2)
    scene.clock.turn(0.1)
    scene.deadlines.await_rest_of_request()
    scene.clock.turn(9.9)
    assert (scene.late, scene.ended) == (0, "")
    scene.deadlines.disarm()
    scene.clock.turn(1000)
    scene.deadlines.await_request()
    scene.clock.turn(0.1)
    assert (scene.late, scene.ended) == (0, "")
    scene.clock.turn(0.2)
    assert scene.ended == "closed"


def test_no_deadline_applies_while_a_request_is_served(scene: Scene) -> None:
    """However long it takes."""
    scene.deadlines.await_rest_of_request()
    scene.deadlines.disarm()
    scene.clock.turn(1000)
    assert (scene.late, scene.ended) == (0, "")
    assert not scene.clock.timers


def test_a_client_that_reads_nothing_is_aborted(scene: Scene) -> None:
    """A close would wait for its buffer to drain."""
    scene.wire.held_bytes = 1000
    scene.deadlines.await_reading()
    scene.clock.turn(19.9)
    assert scene.ended == ""
    scene.clock.turn(0.2)
    assert scene.ended == "aborted"


def test_every_read_restarts_the_write_timeout(scene: Scene) -> None:
    """The number of bytes read does not matter."""
    scene.wire.held_bytes = 10
    scene.deadlines.await_reading()
    for _ in range(9):
        scene.wire.held_bytes -= 1
        scene.clock.turn(15)
    assert scene.ended == ""
    scene.clock.turn(40)
    assert scene.ended == "aborted"


def test_a_client_that_reads_too_slowly_is_aborted(scene: Scene) -> None:
    """However steadily."""
    scene.wire.held_bytes = 60_000
    scene.deadlines.await_reading()
    for _ in range(199):
        scene.wire.held_bytes -= 1
        scene.clock.turn(1)
    assert scene.ended == ""
    for _ in range(15):
        scene.wire.held_bytes -= 1
        scene.clock.turn(1)
    assert scene.ended == "aborted"


def test_a_client_may_read_slowly_whose_buffer_is_not_full(scene: Scene) -> None:
    """It holds no stream up. Each time that its buffer is full, the time begins again."""
    for _ in range(5):
        scene.wire.held_bytes = 60_000
        scene.deadlines.await_reading()
        for _ in range(18):
            scene.wire.held_bytes -= 2500
            scene.clock.turn(10)
        scene.deadlines.drained()
    for _ in range(100):
        scene.wire.held_bytes -= 1
        scene.clock.turn(10)
    assert scene.ended == ""


def test_a_connection_with_buffered_bytes_is_not_idle(scene: Scene) -> None:
    """It becomes idle when they are read."""
    scene.wire.held_bytes = 10
    scene.deadlines.await_request()
    scene.clock.turn(5)
    scene.wire.held_bytes = 0
    scene.clock.turn(69)
    assert scene.ended == ""
    scene.clock.turn(30)
    assert scene.ended == "closed"


def test_requests_do_not_set_timers_of_their_own(scene: Scene) -> None:
    """One timer per shortest timeout."""
    for _ in range(1000):
        scene.deadlines.await_rest_of_request()
        scene.deadlines.disarm()
        scene.deadlines.await_request()
        scene.clock.turn(0.01)
    assert scene.clock.set <= 3
