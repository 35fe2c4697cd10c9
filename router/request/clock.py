"""The two clocks of a front, which `request/` reads and never sets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Clock:
    """`now_s` never goes back; `unix_s` is the time of day. Both in seconds; the simulator's are virtual."""

    now_s: Callable[[], float]
    unix_s: Callable[[], float]
