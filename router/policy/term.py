"""The base classes of filters, cost terms and pickers.

A filter excludes pods. A cost term prices one aspect of serving a request on one pod, in milliseconds. A picker orders
the priced candidates. Each is a frozen pydantic model: the docstring is the formula, the fields are the YAML keys, the
method is the algorithm. Terms read a `Placement`, filters a row of the fleet snapshot; they change nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from itertools import repeat
from math import inf
from operator import itemgetter, methodcaller
from typing import ClassVar, Protocol, TypeAlias

import msgspec
from pydantic import BaseModel, ConfigDict

from router.cost_model import BYTES_PER_MS_PER_GB_PER_S
from router.decision import Candidate
from router.policy.standing import Standing, current_step
from router.types import (
    BlocksByTier,
    InFlight,
    Link,
    Links,
    Pod,
    PodId,
    PodLoad,
    PodStatus,
    Scene,
    ScenePicture,
)


class Configurable(BaseModel):
    """Base of filters, terms, pickers and rules of classes: frozen, without unknown keys, infinities and NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Side(StrEnum):
    """The pod of a split that a term prices."""

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


class RequestFacts(msgspec.Struct, frozen=True, gc=False):
    """What all placements of one request have in common. `output_tokens` is expected."""

    scene: Scene
    """Everything else that a term may read."""
    prompt_tokens: int
    output_tokens: int
    now_s: float
    links: Links
    shared_tokens: int = 0
    """Leading tokens shared by so much of the traffic that every pod should hold them."""


class Placement(msgspec.Struct, frozen=True, gc=False):
    """One request on one pod: the input of every cost term."""

    request: RequestFacts
    pod: Pod
    standing: Standing
    """What is true of the pod for every request."""
    work_ahead_ms: float
    """Time until the next step can begin and our earlier prompts in it are computed, without requests of others."""
    compute_ms: float
    """Time to compute the prompt tokens that are not cached."""
    cached_tokens: int = 0
    """Prompt tokens expected to need no compute: held there, aligned and capped as its engine does, or pulled."""
    own_tokens: int = 0
    """The part of `cached_tokens` that the pod holds itself."""
    held_tokens: BlocksByTier = (0, 0, 0, 0)
    """`own_tokens` by tier."""
    pull: Transfer | None = None
    """Transfers the part of `cached_tokens` beyond `own_tokens`."""
    handoff: Transfer | None = None
    """Transfers the KV of the prompt from the pod that computes it."""

    @property
    def load(self) -> PodLoad:
        return self.standing.status.load

    @property
    def inflight(self) -> InFlight:
        return self.standing.inflight


# --- inputs that several terms share: one name and one unit for each quantity ---


def tier_reads(links: Links, held_tokens: BlocksByTier) -> Iterator[tuple[str, Link, int]]:
    """Name, link and held tokens of every tier that is read before the prefill. One without a link costs nothing."""
    _, cpu_tokens, disk_tokens, remote_tokens = held_tokens
    tiers = (
        ("cpu tier", links.cpu, cpu_tokens),
        ("disk tier", links.disk, disk_tokens),
        ("remote tier", links.remote, remote_tokens),
    )
    for name, link, tokens in tiers:
        if link and tokens:
            yield name, link, tokens


def read_ms(links: Links, held_tokens: BlocksByTier, kv_bytes_per_token: int) -> float:
    """The time of these reads, one after the other."""
    ms = 0.0
    for _, link, tokens in tier_reads(links, held_tokens):
        ms += link.transfer_ms(tokens * kv_bytes_per_token)
    return ms


def prompt_inputs(at: Placement) -> Iterator[Input]:
    """Length of the prompt, and how much of it needs no compute."""
    yield Input("n", "prompt tokens", at.request.prompt_tokens)
    yield Input("p", "cached tokens", at.cached_tokens)


def compute_inputs(at: Placement) -> Iterator[Input]:
    yield Input("c1", "ms/token", at.pod.speed.c1_ms_per_token)
    yield Input("c2", "ms/token²", at.pod.speed.c2_ms_per_token2)


def decode_inputs(at: Placement) -> Iterator[Input]:
    """Expected output, and what a decode step there takes for each request and context token."""
    yield Input("expected output", "tokens", at.request.output_tokens)
    yield Input("requests decoding", "requests", at.standing.decoding_requests)
    yield Input("d1", "ms/request", at.pod.speed.d1_ms_per_request)
    yield Input("d2", "ms/token", at.pod.speed.d2_ms_per_context_token)


def kv_inputs(at: Placement) -> Iterator[Input]:
    """How full the KV cache is, and which prompts take more of it first."""
    yield Input("KV capacity", "tokens", at.pod.capacity_tokens or 0)
    yield Input("KV in use", "share", at.load.kv_usage)
    yield Input("prompts before it", "tokens", at.inflight.prefill_tokens)


def work_ahead_inputs(at: Placement) -> Iterator[Input]:
    """What `work_ahead_ms` follows from. Half of a step whose begin was not observed counts as over."""
    standing, work = at.standing, at.inflight
    current = current_step(work, standing.step, at.pod.speed)
    began_s, inside_ms = current or (0.0, 0.0)
    if current:
        elapsed_ms = (at.request.now_s - began_s) * 1000 if began_s > -inf else (standing.fixed_ms + inside_ms) / 2
        yield Input("F", "ms", standing.fixed_ms)
        yield Input("W_in", "ms", inside_ms)
        yield Input("time since step began", "ms", elapsed_ms)
    yield Input("W_behind", "ms", work.prefill_ms - inside_ms)


def link_inputs(name: str, link: Link) -> Iterator[Input]:
    yield Input(f"{name} t0", "ms", link.t0_ms)
    yield Input(f"{name} B", "GB/s", link.bytes_per_ms / BYTES_PER_MS_PER_GB_PER_S)


def transfer_inputs(name: str, transfer: Transfer, at: Placement) -> Iterator[Input]:
    yield Input(f"{name} tokens", "tokens", transfer.tokens)
    yield Input("kv_bytes_per_token", "bytes", at.pod.kv_bytes_per_token)
    yield from link_inputs(name, transfer.link)
    yield Input(f"{name} concurrent", "transfers", transfer.concurrent)


# --- the kinds ---


class CostTerm(Configurable, ABC):
    """Prices one aspect of a placement."""

    side: ClassVar[Side]
    delays: ClassVar[bool] = False
    """Whether the cost is time until the first token. Otherwise it is an effect on other requests: it counts for the
    choice but not for the expected time to first token."""

    @abstractmethod
    def costs_ms(self, placements: Sequence[Placement]) -> Sequence[float]:
        """Expected milliseconds of each placement of one request, at least one; never below 0 unless the term's
        docstring states why.

        One call for all placements takes two thirds of the time of one call for each."""

    @abstractmethod
    def inputs(self, at: Placement) -> Iterator[Input]:
        """Every number that the formula reads of this placement, apart from the term's own parameters. An input of the
        same name has the same value in every term."""

    def cost_ms(self, at: Placement) -> float:
        return self.costs_ms((at,))[0]


class Filter(Configurable, ABC):
    """Excludes pods before pricing. It applies only while a pod is left that can serve the request."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    strict: bool = False
    """Refuse the request (503) if no pod would be left, instead of ignoring the filter."""

    @abstractmethod
    def keeps(self, status: PodStatus) -> bool:
        """Whether the pod stays eligible."""


Filters: TypeAlias = Sequence[tuple[str, Filter]]
"""The filters of a policy by name, in the order of the catalog."""

Costs: TypeAlias = Sequence[tuple[str, CostTerm]]
"""The terms of a policy by name."""


_TERM = itemgetter(1)


def prices_ms(placements: Sequence[Placement], costs: Costs) -> Iterable[tuple[float, ...]]:
    """The cost of each term, for each placement. Term by term: half the time of going pod by pod."""
    if not placements:
        return ()
    columns = [*map(methodcaller("costs_ms", placements), map(_TERM, costs))]
    return zip(*columns, strict=True) if columns else repeat((), len(placements))


class Picker(Protocol):
    """Orders candidates, best first."""

    def rank(self, scene: Scene, candidates: Sequence[Candidate]) -> tuple[Sequence[Candidate], str]:
        """All candidates in order of preference, and the reason for the first in one line."""


def tokens_to_encode(pictures: Iterable[ScenePicture], pod: PodId, cached_tokens: int) -> int:
    """Tokens of the pictures that the pod has not seen and whose KV is not among the first `cached_tokens`."""
    return sum(
        picture.token_count
        for picture in pictures
        if pod not in picture.pods and (picture.end_token is None or picture.end_token > cached_tokens)
    )
