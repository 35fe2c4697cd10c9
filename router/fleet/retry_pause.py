"""How long to wait before another try."""

from __future__ import annotations

MAX_DOUBLINGS = 40
"""Keeps the product a float, however long an outage lasts."""


def retry_pause_s(failures: int, first_s: float, max_s: float) -> float:
    """The pause after a number of failures in a row: `first_s`, doubled by each after the first, at most `max_s`."""
    return min(first_s * 2.0 ** min(failures - 1, MAX_DOUBLINGS), max_s)
