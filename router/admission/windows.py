"""Counts what was used in the last minute.

Amounts are added up by second. Each counts for at least `WINDOW_S` and at most a second longer, so no period of
`WINDOW_S` contains more than a window has ever counted at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import merge
from math import inf

WINDOW_S = 60
KEPT_S = WINDOW_S + 1
"""An amount of second `s` leaves at the begin of second `s + KEPT_S`."""


class SlidingWindow:
    """Amounts by second, oldest first, and their sum. `second`: whole seconds of a clock that never goes back."""

    __slots__ = ("_amounts", "expires", "total")

    def __init__(self) -> None:
        self._amounts: dict[int, int] = {}
        self.expires: float = inf
        """Second in which the oldest amount leaves."""
        self.total = 0
        """Right until `expires`; see `at`."""

    def at(self, second: int) -> int:
        """The total in this second."""
        if second >= self.expires:
            self._expire(second)
        return self.total

    def add(self, second: int, amount: int) -> None:
        amounts = self._amounts
        if not amounts:
            self.expires = second + KEPT_S
        amounts[second] = amounts.get(second, 0) + amount
        self.total += amount

    def take_back(self, second: int, amount: int) -> None:
        """Subtract from what was added in that second; nothing if that has left."""
        held = self._amounts.get(second, 0)
        if held:
            taken = amount if amount < held else held
            self._amounts[second] = held - taken
            self.total -= taken

    def set_total(self, second: int, total: int) -> None:
        """Make the total this: by an amount of this second, or by less of the oldest."""
        excess = self.at(second) - total
        if excess < 0:
            return self.add(second, -excess)
        for begun in list(self._amounts):
            taken = min(excess, self._amounts[begun])
            self.take_back(begun, taken)
            excess -= taken
        return None

    def leaving(self) -> list[tuple[int, int]]:
        """(second, amount that leaves then), earliest first."""
        return [(begun + KEPT_S, amount) for begun, amount in self._amounts.items() if amount]

    def empty_at(self) -> int:
        """Second in which the last amount leaves; 0 if it is empty."""
        return next(reversed(self._amounts), -KEPT_S) + KEPT_S

    def _expire(self, second: int) -> None:
        amounts = self._amounts
        for begun in list(amounts):
            if begun + KEPT_S > second:
                self.expires = begun + KEPT_S
                return
            self.total -= amounts.pop(begun)
        self.expires = inf


class UseGauge(SlidingWindow):
    """What is in use now, with the methods of a window: nothing leaves by itself."""

    __slots__ = ()

    def at(self, second: int) -> int:
        return self.total

    def add(self, second: int, amount: int) -> None:
        self.total += amount

    def take_back(self, second: int, amount: int) -> None:
        self.total -= amount

    def set_total(self, second: int, total: int) -> None:
        self.total = total


def freed_at(windows: Sequence[SlidingWindow], amount: int) -> int | None:
    """The second in which this amount will have left these windows together; None where that cannot be known."""
    for second, leaving in merge(*(window.leaving() for window in windows)):
        amount -= leaving
        if amount <= 0:
            return second
    return None
