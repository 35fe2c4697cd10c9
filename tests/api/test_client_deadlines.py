"""How long a client is waited for, on a clock that the test turns."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, cast

import pytest

from router.api.client_deadlines import ClientDeadlines, ClientTimeouts

QUIET = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
"""Nothing ever comes."""


class Timer:
    """One that was set, or has gone off."""

    def __init__(self, timers: list[Any], own: Any) -> None:
        self._timers, self._own = timers, own

    def cancel(self) -> None:
        self._timers.remove(self._own)


class Clock:
    """An event loop's timers; nothing else of it."""

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
        """Let so much time pass, timer by timer."""
        until_s = self.now_s + by_s
        while due := min((timer for timer in self.timers if timer[0] <= until_s), key=lambda t: t[0], default=None):
            self.timers.remove(due)
            self.now_s = due[0]
            due[1]()
        self.now_s = until_s


class Wire:
    """A transport that holds so many bytes."""

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
        timeouts = ClientTimeouts(keep_alive_s=75.0, request_s=10.0, write_s=20.0)
        self.deadlines = ClientDeadlines(loop, transport, timeouts, self._too_late)

    @property
    def ended(self) -> str:
        """How the connection did."""
        return self.wire.ended

    def _too_late(self) -> None:
        self.late += 1


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_a_client_that_asks_nothing_is_hung_up_on(scene: Scene) -> None:
    """Not a second too early."""
    scene.deadlines.await_request()
    scene.clock.turn(74.9)
    assert scene.ended == ""
    scene.clock.turn(0.2)
    assert scene.ended == "closed"


def test_a_request_has_its_own_time_however_long_the_silence_before_it(scene: Scene) -> None:
    """And being late is said once."""
    scene.deadlines.await_request()
    scene.clock.turn(70)
    scene.deadlines.await_rest_of_request()
    scene.clock.turn(9.9)
    assert not scene.late
    scene.clock.turn(100)
    assert (scene.late, scene.ended) == (1, "")


def test_a_client_is_not_hung_up_on_while_what_it_asks_is_unread(scene: Scene) -> None:
    """The event loop has not come to it: closed now, its request would be lost."""
    with (pair := socket.socketpair())[0], pair[1]:
        scene.wire.socket = pair[0]
        pair[1].send(b"POST")
        scene.deadlines.await_request()
        scene.clock.turn(80)
        assert scene.ended == ""
        pair[0].recv(4)
        scene.clock.turn(1)
        assert scene.ended == "closed"


def test_a_client_that_is_hurried_has_less_time_to_ask(scene: Scene) -> None:
    """Now and after its next answer; for everything else it has as long as ever."""
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


def test_while_it_is_our_turn_nobody_is_late(scene: Scene) -> None:
    """An answer takes as long as it takes."""
    scene.deadlines.await_rest_of_request()
    scene.deadlines.disarm()
    scene.clock.turn(1000)
    assert (scene.late, scene.ended) == (0, "")
    assert not scene.clock.timers


def test_a_client_that_takes_nothing_is_cut_off(scene: Scene) -> None:
    """Closing would wait for it for ever."""
    scene.wire.held_bytes = 1000
    scene.deadlines.await_reading()
    scene.clock.turn(19.9)
    assert scene.ended == ""
    scene.clock.turn(0.2)
    assert scene.ended == "aborted"


def test_a_client_that_takes_a_little_is_waited_for(scene: Scene) -> None:
    """Each byte gives it its time again."""
    scene.wire.held_bytes = 10
    scene.deadlines.await_reading()
    for _ in range(9):
        scene.wire.held_bytes -= 1
        scene.clock.turn(15)
    assert scene.ended == ""
    scene.clock.turn(40)
    assert scene.ended == "aborted"


def test_what_is_held_when_nothing_is_asked_must_be_read_first(scene: Scene) -> None:
    """An idle connection with bytes on it is not idle; afterwards it is."""
    scene.wire.held_bytes = 10
    scene.deadlines.await_request()
    scene.clock.turn(5)
    scene.wire.held_bytes = 0
    scene.clock.turn(69)
    assert scene.ended == ""
    scene.clock.turn(30)
    assert scene.ended == "closed"


def test_many_requests_share_few_timers(scene: Scene) -> None:
    """One look in the shortest of the waits."""
    for _ in range(1000):
        scene.deadlines.await_rest_of_request()
        scene.deadlines.disarm()
        scene.deadlines.await_request()
        scene.clock.turn(0.01)
    assert scene.clock.set <= 3
