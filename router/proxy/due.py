"""When is it time for what was to happen later, if nothing happens before?

Appointments of about the same time share one timer of the event loop: nearly all of them are called off, and a timer
for each costs as much as a price. They are kept up to `STEP_S` late. This file does not know what it calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeAlias

STEP_S = 0.005

Appointment: TypeAlias = list[Callable[[], None]]
"""What is called; empty once it was, or was called off."""


class Due:
    """Appointments of one event loop."""

    def __init__(self) -> None:
        self._steps: dict[int, list[Appointment]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def __len__(self) -> int:
        """How many stand."""
        return sum(bool(made) for step in self._steps.values() for made in step)

    def after(self, wait_s: float, call: Callable[[], None]) -> Appointment:
        """Have it called once, in so many seconds; to call it off, clear what is returned. `call` must not raise."""
        loop = self._loop
        if loop is None:  # to ask for the loop is a system call
            loop = self._loop = asyncio.get_running_loop()
        now_s = loop.time()
        step = int((now_s + wait_s) / STEP_S) + 1
        made = [call]
        beside = self._steps.get(step)
        if beside is None:
            self._steps[step] = [made]
            loop.call_later(step * STEP_S - now_s, self._keep, step)
        else:
            beside.append(made)
        return made

    def _keep(self, step: int) -> None:
        for made in self._steps.pop(step):
            if made:
                made.pop()()
