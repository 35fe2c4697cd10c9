"""Measures the time between the pieces of one streamed response: about one token each."""

from __future__ import annotations

from collections.abc import Callable


def gaps(stepped: Callable[[float], None], observe: Callable[[float], None]) -> Callable[[float], None]:
    """`stepped`, which receives the arrival time of each piece, and also passes the seconds since the last one to
    `observe`."""
    last_s: float | None = None

    def step(now_s: float) -> None:
        nonlocal last_s
        if last_s is not None:
            observe(now_s - last_s)
        last_s = now_s
        stepped(now_s)

    return step
