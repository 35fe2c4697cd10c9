"""What is a cost term, what is a filter, and what is a picker?

A filter leaves pods out. A cost term prices one aspect of serving a request on one pod, in milliseconds. A picker
orders the priced candidates. Each is one frozen pydantic model in one file: the docstring is the formula, the fields
are the YAML, the method is the algorithm. Terms see a `Placement`, filters a pod's row in the snapshot; they never
change anything and never see each other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from itertools import repeat
from typing import ClassVar, Protocol, TypeAlias

import msgspec
from pydantic import BaseModel, ConfigDict

from router.decision import Candidate
from router.types import BlocksByTier, InFlight, Link, Links, Pod, PodLoad, PodStatus, Scene, StepBegan


class Configurable(BaseModel):
    """Base of terms and pickers: frozen; unknown keys and numbers that are none are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Side(StrEnum):
    """Which pod a term prices, where prefill and decode are on two."""

    PREFILL = "prefill"
    DECODE = "decode"


class Input(msgspec.Struct, frozen=True):
    """A number that a term's formula reads, as an explanation shows it."""

    name: str
    unit: str
    value: float


class Transfer(msgspec.Struct, frozen=True, gc=False):
    """KV of `tokens` tokens sent by another pod. `transfer_ms` includes the link's `t0_ms` and the sharing of its
    bandwidth with the `concurrent` transfers of the sender; `prefill_ms` is the prefill that the sender computes first.
    """

    sender: Pod
    link: Link
    tokens: int
    concurrent: int
    transfer_ms: float
    prefill_ms: float = 0.0


class Placement(msgspec.Struct, frozen=True, gc=False):
    """One request on one pod: what every cost term reads."""

    pod: Pod
    load: PodLoad
    inflight: InFlight
    prompt_tokens: int
    cached_tokens: int
    """Expected to need no compute there: what it holds, aligned and capped as its engine does; what a pull brings."""
    shared_tokens: int
    """Leading tokens that so much of the traffic shares that every pod should hold them."""
    output_tokens: int
    now_s: float
    links: Links
    own_tokens: int
    """Of `cached_tokens`, what it holds itself."""
    held_tokens: BlocksByTier
    """The same by tier."""
    capacity_tokens: int
    """Of its KV cache; 0 where unknown."""
    fixed_ms: float
    """The part of its next step that does not depend on what prompts are in it."""
    step: StepBegan
    decoding_requests: int = 0
    """Requests that decode there, by the last scrape or by our ledger, whichever is more: a scrape lags, a ledger does
    not include other routers."""
    pull: Transfer | None = None
    """Brings what `own_tokens` lacks of `cached_tokens`."""
    handoff: Transfer | None = None
    """Brings the whole prompt from the pod that computes it."""


class CostTerm(Configurable, ABC):
    """Prices one aspect of a placement."""

    side: ClassVar[Side]
    delays: ClassVar[bool]
    """Is it time until the first token? Otherwise it is what it is worth to spare somebody else: it counts for the
    choice, and not for when the client is expected to hear."""

    @abstractmethod
    def costs_ms(self, placements: Sequence[Placement]) -> Sequence[float]:
        """Expected milliseconds of each; may be negative only where the term's docstring says why.

        All at once, which is two thirds of the price of one at a time; each for itself all the same."""

    @abstractmethod
    def inputs(self, at: Placement) -> Iterator[Input]:
        """Every number that the formula reads of this placement, apart from the term's own parameters. An input of the
        same name has the same value in every term."""

    def cost_ms(self, at: Placement) -> float:
        """The cost of one placement."""
        return self.costs_ms((at,))[0]


class Filter(Configurable, ABC):
    """Leaves pods out before anything is priced: a preference, as long as somebody is left who can serve."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    strict: bool = False
    """Refuse the request (503) where nobody would be left, instead of leaving nobody out."""

    @abstractmethod
    def keeps(self, status: PodStatus) -> bool:
        """Does this pod stay?"""


Filters: TypeAlias = Sequence[tuple[str, Filter]]
"""The filters of a policy by name, in the order of the catalog."""

Costs: TypeAlias = Sequence[tuple[str, CostTerm]]
"""The terms of a policy by name."""


def prices_ms(placements: Sequence[Placement], costs: Costs) -> Iterable[tuple[float, ...]]:
    """For each placement what each term costs. Term by term over all: half the price of going pod by pod."""
    columns = [term.costs_ms(placements) for _, term in costs]
    return zip(*columns, strict=True) if columns else repeat((), len(placements))


class Picker(Protocol):
    """Orders candidates, best first."""

    def rank(self, scene: Scene, candidates: Sequence[Candidate]) -> tuple[Sequence[Candidate], str]:
        """All candidates in order of preference, and one line that says why the first is first."""
