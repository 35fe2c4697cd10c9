"""Is this message the next one of its stream?

A stream is the numbered messages of one publisher: one (pod, data-parallel rank), from 0 in each epoch of the engine.
Pure state machine; the feed decides what to do about a gap.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    """What to do with a message."""

    APPLY = "apply"
    DUPLICATE = "duplicate"
    GAP = "gap"
    """Earlier messages are missing: request a replay from `StreamPosition.expected`."""
    RESTART = "restart"
    """The engine restarted: its previous blocks are gone."""


@dataclass(slots=True)
class StreamPosition:
    """Position in one stream. `complete` is False once messages are lost for good."""

    expected: int = 0
    complete: bool = True
    _last_live: int = -1
    """Number of the last live message."""

    def observe(self, number: int, *, replayed: bool = False) -> Verdict:
        """Classify a message by its number. Only APPLY advances the position.

        Live messages arrive in order, so a lower number than the last live one means a restart. A number that is only
        below `expected` is a duplicate: a replay delivered it while it waited in the socket.
        """
        if not replayed:
            last_live, self._last_live = self._last_live, number
            if number < last_live or number == last_live == 0:
                return Verdict.RESTART
        if number < self.expected:
            return Verdict.DUPLICATE
        if number > self.expected:
            return Verdict.GAP
        self.expected += 1
        return Verdict.APPLY

    def skip_to(self, number: int) -> None:
        """Give up on the messages before `number` and continue there, incomplete."""
        self.complete = False
        self.expected = number

    def restart(self) -> None:
        """Start a new epoch of the publisher."""
        self.expected, self.complete, self._last_live = 0, True, -1
