"""What responses in the background still cost: their pods generate after they have answered.

Such a response keeps its place among the concurrent requests of its tenant, and its expected tokens, until a fetched
answer shows what it cost, or until it has probably ended. What is fetched is counted once.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

import msgspec

from router.admission.quotas import Hold
from router.index.stored_responses import MAX_RESPONSES


class _Bill(msgspec.Struct, eq=False):
    """`hold`: until it is settled, if its tenant has quotas. `counted`: output tokens, of which its first answer had
    `answered`; the others were counted when they were fetched."""

    hold: Hold | None
    answered: int
    counted: int


class BackgroundBills:
    """Bills by response id; of more than `MAX_RESPONSES`, the oldest are settled. `settle` ends a hold: its output."""

    def __init__(self, settle: Callable[[Hold, int], None]) -> None:
        self._settle = settle
        self._bills: dict[str, _Bill] = {}
        self._ends: list[tuple[float, str]] = []
        """A heap of the times at which responses have probably ended."""

    def open(self, response_id: str, hold: Hold | None, answered: int, until_s: float) -> None:
        """A response goes on until about `until_s`; its first answer had `answered` output tokens."""
        self._close(self._bills.pop(response_id, None))
        self._bills[response_id] = _Bill(hold, answered, answered)
        heappush(self._ends, (until_s, response_id))
        if len(self._bills) > MAX_RESPONSES:
            self._close(self._bills.pop(next(iter(self._bills))))

    def fetched(self, response_id: str, output_tokens: int, *, is_final: bool) -> int:
        """Those of the fetched tokens that were not counted yet. `is_final`: the response has ended."""
        bill = self._bills.get(response_id)
        if bill is None:
            self.open(response_id, None, 0, 0.0)
            bill = self._bills[response_id]
        if is_final:
            self._close(bill, bill.answered if output_tokens else None)
        more = max(output_tokens - bill.counted, 0)
        bill.counted += more
        return more

    def expire(self, now_s: float) -> None:
        """Settle those that have probably ended, with the expected output. O(1) if there are none."""
        while self._ends and self._ends[0][0] <= now_s:
            self._close(self._bills.get(heappop(self._ends)[1]))

    def _close(self, bill: _Bill | None, output_tokens: int | None = None) -> None:
        """None: the expected output."""
        if bill is not None and bill.hold is not None:
            hold, bill.hold = bill.hold, None
            self._settle(hold, hold.output_tokens if output_tokens is None else output_tokens)
