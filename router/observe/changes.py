"""What changed in the fleet lately: the changes that explain why figures differ from those before.

The page, `/admin/changes` and the file of receipts show the same values. Nothing here decides what a change is.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Literal, TypeAlias

import msgspec

from router.errors import shortened

MAX_CHANGES = 200
MAX_OF_SUBJECT = 20
"""A pod that flaps hides no change of others."""
MAX_CHARACTERS = 400

ChangeKind: TypeAlias = Literal["ejected", "readmitted", "joined", "left", "restarted", "generation", "policy", "names"]


class Change(msgspec.Struct, frozen=True, tag_field="kind", tag="change"):
    """One change at the Unix time `at_s`. `subject`: a pod, the policies that differ, or the file of names."""

    at_s: float
    what: ChangeKind
    subject: str
    cause: str


class Changes:
    """The last `MAX_CHANGES` changes, of a subject `MAX_OF_SUBJECT`. Each is passed to `write`, which does not wait or
    raise."""

    def __init__(self, write: Callable[[Change], None] = lambda _: None) -> None:
        self._latest: deque[Change] = deque(maxlen=MAX_CHANGES)
        self._write = write

    def add(self, what: ChangeKind, subject: str, cause: str) -> None:
        """Record a change of this moment."""
        change = Change(time.time(), what, shortened(subject, MAX_CHARACTERS), shortened(cause, MAX_CHARACTERS))
        same = [one for one in self._latest if one.subject == change.subject]
        if len(same) >= MAX_OF_SUBJECT:
            self._latest.remove(same[-1])
        self._latest.appendleft(change)
        self._write(change)

    def latest(self, count: int = MAX_CHANGES) -> list[Change]:
        """Newest first."""
        return list(islice(self._latest, count))
