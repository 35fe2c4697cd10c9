"""The rules of the script in Redis that divides limits, for tests without Redis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from router.admission.sharing import ROW_TTL_S, SILENT_S, CeilingReport, Grant, Grants


class _Row(msgspec.Struct, gc=False):
    used: int
    ceiling: int
    at_s: float


@dataclass(slots=True)
class ShareBook:
    """What each process has used and may use. `rows`: by limit and process."""

    rows: dict[str, dict[str, _Row]] = field(default_factory=dict)
    members: dict[str, float] = field(default_factory=dict)

    def exchange(self, member: str, reports: Sequence[CeilingReport], now_s: float) -> Grants:
        """Record these reports of a process. O(reports x processes)."""
        self.members[member] = now_s
        for gone in [one for one, at_s in self.members.items() if at_s + ROW_TTL_S < now_s]:
            del self.members[gone]
        return Grants([self._grant(member, report, now_s) for report in reports], len(self.members))

    def _grant(self, member: str, report: CeilingReport, now_s: float) -> Grant:
        rows = self.rows.setdefault(report.meter, {})
        alive = {one for one, at_s in self.members.items() if at_s + SILENT_S >= now_s}
        for gone in [one for one, row in rows.items() if row.at_s + report.kept_s < now_s]:
            del rows[gone]
        others = {one: row for one, row in rows.items() if one != member}
        free = report.limit - sum(row.ceiling if one in alive else row.used for one, row in others.items())
        ceiling = max(report.used, min(report.used + report.wanted, free))
        if ceiling:
            rows[member] = _Row(report.used, ceiling, now_s)
        else:
            rows.pop(member, None)
        if not rows:
            del self.rows[report.meter]
        return Grant(ceiling, sum(row.used for row in others.values()), free - ceiling)
