"""The values of a decision: plans for one request with their costs in milliseconds, and the lease of a chosen plan."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import msgspec

from router.types import Pod, PodId


class Cost(msgspec.Struct, frozen=True, gc=False):
    """Expected milliseconds, in named parts that add up to the total. Thousands are kept: `names` is one tuple for all
    costs of a decision, and the garbage collector does not track the values."""

    names: tuple[str, ...]
    parts_ms: tuple[float, ...]
    total_ms: float

    @classmethod
    def of(cls, parts: Iterable[tuple[str, float]], total_ms: float) -> Cost:
        """A cost from (name, milliseconds) pairs."""
        parts = tuple(parts)
        return cls(tuple(name for name, _ in parts), tuple(ms for _, ms in parts), total_ms)

    @property
    def parts(self) -> tuple[tuple[str, float], ...]:
        """(name, milliseconds) pairs."""
        return tuple(zip(self.names, self.parts_ms, strict=True))


class Pull(msgspec.Struct, frozen=True, gc=False):
    """Fetch leading KV from another pod instead of computing it: `pulled_tokens` are transferred, after which
    `cached_tokens` are on the pod."""

    holder: PodId
    cached_tokens: int
    pulled_tokens: int = 0


class Direct(msgspec.Struct, frozen=True, gc=False):
    """Serve the whole request on one pod, with or without a pull."""

    pod: Pod
    pull: Pull | None = None


class Split(msgspec.Struct, frozen=True, gc=False):
    """Compute the prompt on one pod and hand its KV over to another, which decodes."""

    prefill: Pod
    decode: Pod
    handoff_tokens: int = 0
    """Prompt tokens whose KV is transferred: those that the decode pod does not hold itself."""

    pull: Pull | None = None
    """What the prefill pod fetches first instead of computing it."""

    @property
    def pod(self) -> Pod:
        """The pod that answers the client."""
        return self.decode


Plan: TypeAlias = Direct | Split
"""A way to serve one request."""


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A plan with its cost. `cached_tokens`: prompt tokens expected in the engine's cache. `money`: what a provider is
    expected to take, and after its answer what it took; None for pods."""

    plan: Plan
    cost: Cost
    cached_tokens: int = 0
    money: float | None = None

    @property
    def pod(self) -> Pod:
        return self.plan.pod


class RouteDecision(msgspec.Struct, frozen=True, gc=False):
    """The candidates for one request, best first. A retry uses the next candidate."""

    policy: str
    version: str
    candidates: tuple[Candidate, ...]
    reason: str = ""


class Lease(msgspec.Struct, frozen=True, gc=False):
    """The work booked on a pod for one request, subtracted from the ledger on release."""

    id: int
    pod: PodId
    prefill_tokens: int
    prefill_ms: float
    context_tokens: int
