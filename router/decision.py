"""What is decided about a request, and booked for it?

The answer of a policy, as values: ways to serve one request, each with its price in milliseconds, and the place on a
pod that one of them takes. Like all nouns they hold no behaviour beyond one-line readings of their own fields.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, TypeAlias

import msgspec

from router.types import Pod, PodId


class Cost(msgspec.Struct, frozen=True, gc=False):
    """Expected milliseconds, in named parts that add up to the total. Thousands are kept: `names` are one value for all
    prices of a decision, so that a price is one tuple of numbers, in which nothing searches for cycles."""

    names: tuple[str, ...]
    parts_ms: tuple[float, ...]
    total_ms: float

    @classmethod
    def of(cls, parts: Iterable[tuple[str, float]], total_ms: float) -> Cost:
        """From names with their parts."""
        parts = tuple(parts)
        return cls(tuple(name for name, _ in parts), tuple(ms for _, ms in parts), total_ms)

    @property
    def parts(self) -> tuple[tuple[str, float], ...]:
        """Name and milliseconds of each."""
        return tuple(zip(self.names, self.parts_ms, strict=True))


class Pull(msgspec.Struct, frozen=True, gc=False):
    """Fetch leading KV from another pod instead of computing it: `pulled_tokens` travel, and then `cached_tokens` are
    there."""

    holder: PodId
    cached_tokens: int
    pulled_tokens: int = 0


class Direct(msgspec.Struct, frozen=True, gc=False):
    """Serve the whole request on one pod, perhaps after a pull."""

    pod: Pod
    pull: Pull | None = None


class Split(msgspec.Struct, frozen=True, gc=False):
    """Compute the prompt on one pod and hand its KV over to another, which answers."""

    prefill: Pod
    decode: Pod
    handoff_tokens: int = 0
    """Whose KV goes over: those of the prompt that the other does not hold yet."""

    pull: ClassVar[None] = None
    """It pulls nothing beside its handoff."""

    @property
    def pod(self) -> Pod:
        """The one that answers the client."""
        return self.decode


Plan: TypeAlias = Direct | Split
"""One way to serve."""


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A plan with its price. `cached_tokens` is what we expect the engine to find in its cache."""

    plan: Plan
    cost: Cost
    cached_tokens: int = 0

    @property
    def pod(self) -> Pod:
        return self.plan.pod


class RouteDecision(msgspec.Struct, frozen=True, gc=False):
    """Ways to serve one request, best first. A retry is simply the next candidate."""

    policy: str
    version: str
    candidates: tuple[Candidate, ...]
    reason: str = ""


class Lease(msgspec.Struct, frozen=True, gc=False):
    """A booked place on a pod: what the ledger gives back when it is released."""

    id: int
    pod: PodId
    prefill_tokens: int
    prefill_ms: float
    context_tokens: int
