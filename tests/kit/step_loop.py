"""An event loop in virtual time, whose connections are pairs of pipes in memory, and which calls a function before its
nth callback.

Tests use that to cancel a task at every point at which the event loop can: also between the callback that sets a result
and the one that resumes the task that waits for it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.kit.virtual_time import VirtualTimeLoop

if TYPE_CHECKING:
    from tests.kit.scripted_pods import ScriptedPod


class Pipe(asyncio.Transport):
    """One end of a connection. What is written arrives at the other end in a later callback."""

    other: Pipe

    def __init__(self, loop: asyncio.AbstractEventLoop, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._loop = loop
        self._protocol = protocol
        self._arrived: deque[bytes] = deque()
        """Not delivered yet; b"" is the end."""
        self._reads = True
        self._closing = False

    def write(self, data: Any) -> None:
        if data and not self._closing:
            self.other.receive(bytes(data))

    def receive(self, data: bytes) -> None:
        self._arrived.append(data)
        self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        while self._arrived and self._reads and not self._closing:
            if data := self._arrived.popleft():
                self._protocol.data_received(data)
            elif not self._protocol.eof_received():
                self.close()

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.other.receive(b"")

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._loop.call_soon(self._protocol.connection_lost, None)
            self.other.receive(b"")

    abort = close

    def lose(self) -> None:
        """The connection is lost, and its protocol is called at once."""
        if not self._closing:
            self._closing = True
            self._protocol.connection_lost(None)
            self.other.receive(b"")

    def is_closing(self) -> bool:
        return self._closing

    def is_reading(self) -> bool:
        return self._reads and not self._closing

    def pause_reading(self) -> None:
        self._reads = False

    def resume_reading(self) -> None:
        self._reads = True
        self._loop.call_soon(self._deliver)


class _Callbacks(deque[asyncio.Handle]):
    """The callbacks of a loop that are ready to run. Calls `interrupt` before the one that is `left` callbacks away."""

    left = 0
    interrupt: Callable[[], object]

    def popleft(self) -> asyncio.Handle:
        if self.left:
            self.left -= 1
            if not self.left:
                self.interrupt()
        return super().popleft()


class StepLoop(VirtualTimeLoop):
    """Connects to `pods` by host name, and to no other host. `problems`: what the loop would have logged."""

    _ready: _Callbacks
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self) -> None:
        super().__init__()
        self._ready = _Callbacks(self._ready)
        self.pods: dict[str, ScriptedPod] = {}
        self.problems: list[dict[str, Any]] = []
        self.set_exception_handler(lambda _, context: self.problems.append(context))

    def interrupt_before(self, callback: int, interrupt: Callable[[], object]) -> None:
        """Call `interrupt` before the callback of this number, counted from 1 for the next one."""
        self._ready.left, self._ready.interrupt = callback, interrupt

    @property
    def interrupted(self) -> bool:
        """Whether that has happened."""
        return not self._ready.left

    async def settle(self) -> None:
        """Run all other callbacks until none is ready."""
        await asyncio.sleep(0)
        while self._ready:
            await asyncio.sleep(0)

    def timers(self) -> list[asyncio.TimerHandle]:
        """Timers that have not been cancelled."""
        return [timer for timer in self._scheduled if not timer.cancelled()]

    async def create_connection(self, protocol_factory: Any, host: Any = None, *_: Any, **__: Any) -> Any:
        """Suspends before and after the connection is made, like a real one."""
        await asyncio.sleep(0)
        if host not in self.pods:
            raise ConnectionRefusedError
        near, far = self.connect(protocol_factory(), self.pods[host])
        try:
            await asyncio.sleep(0)
        except BaseException:
            near.close()
            raise
        return near, far

    def connect(self, protocol: asyncio.Protocol, pod: ScriptedPod) -> tuple[Pipe, Any]:
        """A connection between a protocol and a pod."""
        served = asyncio.StreamReaderProtocol(asyncio.StreamReader(loop=self), pod, loop=self)
        near, far = Pipe(self, protocol), Pipe(self, served)
        near.other, far.other = far, near
        served.connection_made(far)
        protocol.connection_made(near)
        return near, protocol
