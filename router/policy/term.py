"""What is a cost term, and what is a picker?

A cost term prices one aspect of serving a request on one pod, in milliseconds. A picker orders the priced
candidates. Each is one frozen pydantic model in one file: the docstring is the formula, the fields are the YAML,
the method is the algorithm. Terms see a `Placement`; they never change anything and never see each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
from pydantic import BaseModel, ConfigDict

from router.types import Candidate, InFlight, Pod, PodLoad, Scene


class Configurable(BaseModel):
    """Base of terms and pickers: frozen; unknown keys and numbers that are none are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Placement(msgspec.Struct, frozen=True, gc=False):
    """One request on one pod: what every cost term reads."""

    pod: Pod
    load: PodLoad
    inflight: InFlight
    prompt_tokens: int
    cached_tokens: int
    """Expected hit in the pod's cache, aligned to its engine's blocks and capped as engines cap it."""
    shared_tokens: int
    """Leading tokens that so much of the traffic shares that every pod should hold them."""
    output_tokens: int


class CostTerm(Protocol):
    """Prices one aspect of a placement."""

    def cost_ms(self, at: Placement) -> float:
        """Expected milliseconds; may be negative only where the term's docstring says why."""


class Picker(Protocol):
    """Orders candidates, best first."""

    def rank(self, scene: Scene, candidates: Sequence[Candidate]) -> tuple[Sequence[Candidate], str]:
        """All candidates in order of preference, and one line that says why the first is first."""
