"""What changed in the fleet: the changes that explain why figures differ from those before."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

ChangeKind: TypeAlias = Literal["ejected", "readmitted", "joined", "left", "restarted", "generation", "policy"]


class Change(msgspec.Struct, frozen=True):
    """One change at the Unix time `at_s`. `subject`: a pod, or the policies that differ."""

    at_s: float
    kind: ChangeKind
    subject: str
    cause: str
