"""Divides a limit among the processes that enforce it together, so that none asks another during a request.

Each process has a ceiling for what it may have used in the window. The ceilings of one limit never add up to more than
the limit, so it is kept while every process uses what it has without a word to the others. In the background, a process
reports what it used and how much more it expects to need, and gets a new ceiling from the book: out of what no other
process may use. The book is a `ShareBook` at worker 0, or the same rules as a script in Redis (`stores/quota_book.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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


class _Row(msgspec.Struct, gc=False):
    used: int
    ceiling: int
    at_s: float


@dataclass(slots=True)
class ShareBook:
    """What each process has used and may use. `rows`: by limit and process."""

    rows: dict[str, dict[str, _Row]] = field(default_factory=dict)
    members: dict[str, float] = field(default_factory=dict)

    def exchange(self, member: str, reports: Sequence[ShareReport], now_s: float) -> Grants:
        """Record these reports of a process. O(reports x processes)."""
        self.members[member] = now_s
        for gone in [one for one, at_s in self.members.items() if at_s + ROW_TTL_S < now_s]:
            del self.members[gone]
        return Grants([self._grant(member, report, now_s) for report in reports], len(self.members))

    def _grant(self, member: str, report: ShareReport, now_s: float) -> Grant:
        rows = self.rows.setdefault(report.meter, {})
        for gone in [one for one, row in rows.items() if row.at_s + ROW_TTL_S < now_s]:
            del rows[gone]
        others = [row for one, row in rows.items() if one != member]
        free = report.limit - sum(row.ceiling for row in others)
        ceiling = max(report.used, min(report.used + report.wanted, free))
        if ceiling:
            rows[member] = _Row(report.used, ceiling, now_s)
        else:
            rows.pop(member, None)
        if not rows:
            del self.rows[report.meter]
        return Grant(ceiling, sum(row.used for row in others), free - ceiling)


def local_share(limit: int, ceiling: float, free: int, members: int) -> float:
    """What a process may use in the first minute after it lost the book: what it was granted, and its part of what was
    free."""
    return min(limit, ceiling + max(0, free) // members)
