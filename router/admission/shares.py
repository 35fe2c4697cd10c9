"""Divides a limit among the processes that enforce it together, so that none asks another during a request.

Each process has a ceiling for what it may have used in the window. The ceilings of one limit never add up to more than
the limit, so it is kept while every process uses what it has without a word to the others. In the background, a process
reports what it used and how much more it expects to need, and gets a new ceiling from the book, a script in Redis
(`stores/quota_book.py`): out of what no other process may use.
"""

from __future__ import annotations

import msgspec

ROW_TTL_S = 3.0
"""A process without a report for this long is gone; what it may use is free."""


class ShareReport(msgspec.Struct, frozen=True, array_like=True):
    """One limit as a process sees it: what it has used, and how much more it wants to be allowed."""

    meter: str
    limit: int
    used: int
    wanted: int


class Grant(msgspec.Struct, frozen=True, array_like=True):
    """The answer to a report: what this process may have used at most, what the others have used, and what no process
    may use yet; this is negative where some used more than their ceiling, because requests cost more than expected."""

    ceiling: int
    others_used: int
    free: int


class Grants(msgspec.Struct, frozen=True, array_like=True):
    """The answers to reports, in their order, and the number of processes."""

    grants: list[Grant]
    members: int


def local_share(limit: int, ceiling: float, free: int, members: int) -> float:
    """What a process may use in the first minute after it lost the book: what it was granted, and its part of what was
    free."""
    return min(limit, ceiling + max(0, free) // members)
