"""Appointments that share timers."""

from __future__ import annotations

import asyncio

from router.proxy.due import STEP_S, Due


class Clock(asyncio.SelectorEventLoop):
    """A loop whose clock stands still until its next timer is due."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def time(self) -> float:
        return self.now_s

    def pass_time(self, until_s: float) -> None:
        """To that moment, timer by timer."""

        async def nothing() -> None:
            await asyncio.sleep(0)

        while self._scheduled and self._scheduled[0].when() <= until_s:  # type: ignore[attr-defined]
            self.now_s = max(self.now_s, self._scheduled[0].when())  # type: ignore[attr-defined]
            self.run_until_complete(nothing())
        self.now_s = until_s


def kept(waits_s: list[float], until_s: float, called_off: int | None = None) -> tuple[list[float], int]:
    """(which of them were called, in order; how many still stand)."""
    loop, due, called = Clock(), Due(), list[float]()

    async def make() -> None:
        made = [due.after(wait_s, lambda at=wait_s: called.append(at)) for wait_s in waits_s]  # type: ignore[misc]
        if called_off is not None:
            made[called_off].clear()

    try:
        loop.run_until_complete(make())
        loop.pass_time(until_s)
        return called, len(due)
    finally:
        loop.close()


def test_each_is_called_once_at_its_time_or_a_step_later() -> None:
    """Whatever the order in which they were made."""
    assert kept([0.3, 0.1, 0.2], 0.1 - 1e-6) == ([], 3)
    assert kept([0.3, 0.1, 0.2], 0.2 + STEP_S) == ([0.1, 0.2], 1)
    assert kept([0.3, 0.1, 0.2], 10.0) == ([0.1, 0.2, 0.3], 0)


def test_one_that_was_called_off_is_not_called_and_does_not_stand() -> None:
    """Others of the same moment are."""
    assert kept([0.1, 0.1, 0.1], 0.05, called_off=1) == ([], 2)
    assert kept([0.1, 0.1, 0.1], 10.0, called_off=1) == ([0.1, 0.1], 0)


def test_those_of_one_step_share_a_timer() -> None:
    """A thousand cost the loop one."""
    loop, due = Clock(), Due()

    async def make() -> None:
        for _ in range(1000):
            due.after(0.1, lambda: None)

    try:
        loop.run_until_complete(make())
        assert len(loop._scheduled) == 1  # type: ignore[attr-defined]
    finally:
        loop.close()
