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
    """Messages are missing before it: ask for a replay from `Sequence.expected`."""
    RESTART = "restart"
    """The engine began a new life: what it had is gone."""


class Sequence:
    """Position in one stream. `complete` is False once messages were lost for good."""

    __slots__ = ("complete", "expected")

    def __init__(self) -> None:
        self.expected = 0
        self.complete = True

    def observe(self, number: int, *, replayed: bool = False) -> Verdict:
        """Judge a message by its number. APPLY moves on; nothing else does.

        A live number below the expected one is a new life, since live messages come in order; a replayed one is merely
        known already.
        """
        if number == self.expected:
            self.expected += 1
            return Verdict.APPLY
        if number > self.expected:
            return Verdict.GAP
        return Verdict.DUPLICATE if replayed else Verdict.RESTART

    def skip_to(self, number: int) -> None:
        """Give up on what is missing before `number`: go on there, incomplete."""
        self.complete = False
        self.expected = number

    def restart(self) -> None:
        """A new life of the publisher."""
        self.expected = 0
        self.complete = True
