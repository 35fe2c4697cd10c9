"""An event loop whose clock jumps to the next timer when nothing else can run: hours take milliseconds, and every run
is the same. While a thread of the loop works, the clock stands still."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple

import pytest

_Result = TypeVar("_Result")
_Arguments = TypeVarTuple("_Arguments")


class _JumpingSelector(selectors.DefaultSelector):
    now_s = 0.0
    working = 0
    """Functions that run in threads. The loop is woken when one has ended."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        waits = self.working and (timeout is None or timeout > 0)
        ready = super().select(None if waits else 0)
        if not ready and timeout is None:
            raise RuntimeError("nothing is left that could ever run")
        if not ready and timeout is not None and timeout > 0:
            self.now_s += timeout
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Starts at 0 s."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*_Arguments], _Result], *args: *_Arguments
    ) -> asyncio.Future[_Result]:
        running = super().run_in_executor(executor, func, *args)
        self._jumping.working += 1
        running.add_done_callback(self._has_worked)
        return running

    def _has_worked(self, _: object) -> None:
        self._jumping.working -= 1


def run_virtually(main: Coroutine[Any, Any, _Result]) -> _Result:
    """Run `main` in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


@pytest.fixture
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """For the `conftest.py` of a folder: its tests run in virtual time where they are marked `virtual`."""
    return "asyncio", {"loop_factory": VirtualTimeLoop} if request.node.get_closest_marker("virtual") else {}
