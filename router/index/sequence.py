"""Is this message the next one of its stream?

A stream is one publisher's numbered messages: one (pod, data-parallel rank), from 0 in each life of the engine. Pure
state machine; what to do about a gap is the feed's business.
"""

from __future__ import annotations

from enum import Enum


class Verdict(Enum):
    """What to do with a message."""

    APPLY = "apply"
    DUPLICATE = "duplicate"
    GAP = "gap"
    """Messages are missing before it: ask for a replay from `StreamPosition.expected`."""
    RESTART = "restart"
    """The engine began a new life: what it had is gone."""


class StreamPosition:
    """Position in one stream. `complete` is False once messages were lost for good."""

    __slots__ = ("_heard", "complete", "expected")

    _heard: int
    """Number of the last live message."""

    def __init__(self) -> None:
        self.restart()

    def observe(self, number: int, *, replayed: bool = False) -> Verdict:
        """Judge a message by its number. APPLY moves on; nothing else does.

        Live messages come in order: one that falls behind the last live one begins a new life. Below the expected
        number alone it is merely known already, because a replay overtook it while it waited in the socket.
        """
        if not replayed:
            heard, self._heard = self._heard, number
            if number < heard or number == heard == 0:
                return Verdict.RESTART
        if number < self.expected:
            return Verdict.DUPLICATE
        if number > self.expected:
            return Verdict.GAP
        self.expected += 1
        return Verdict.APPLY

    def skip_to(self, number: int) -> None:
        """Give up on what is missing before `number`: go on there, incomplete."""
        self.complete = False
        self.expected = number

    def restart(self) -> None:
        """A new life of the publisher."""
        self.expected = 0
        self.complete = True
        self._heard = -1
