"""How do two pods agree on a handoff of KV, and how is a pod told to fetch KV from a peer?

The class that each dialect's file derives from. A dialect is pure: it edits bodies and reads answers; it never sends
anything, and what it reads may be garbage: it returns None, never raises. Source: reference/protocols.md 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from router.engines.handoff.body import edited
from router.engines.handoff.prefill_answer import read
from router.engines.handoff.splittable import why_not
from router.types import Endpoint, Pod


class Order(StrEnum):
    """When the decode leg is sent."""

    PREFILL_FIRST = "prefill_first"
    """Once the prefill leg has answered."""
    TOGETHER = "together"
    """At the same time: either leg alone would wait, so that the failure of one aborts the other."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One handoff between two pods. `id` is random, 63 bits, never used twice; `facts` are from `facts_url`."""

    prefill: Pod
    decode: Pod
    id: int
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Handoff:
    """What the decode leg must be told: single use, and worthless once its prefill pod has restarted.

    `prompt_token_ids` spare the decode pod template and tokenizer; `cached_tokens` is what the prefill pod itself did
    not have to compute: the only cached tokens that a client should hear of. None where the pod did not say."""

    params: Mapping[str, Any] = field(default_factory=dict)
    prompt_token_ids: list[int] | None = None
    cached_tokens: int | None = None
    answer: bytes | None = None
    """Set where the prefill leg has said everything already: the client's whole unstreamed answer."""


class Dialect:
    """One way of handing over. What stands here suits pools that share a store: nothing goes over the wire."""

    order: Order = Order.PREFILL_FIRST
    hold_s: float = 3600.0
    """How long after the prefill leg's answer the decode leg may still be sent: well under the engine's own lease."""

    serves_alone: bool = True
    """Does a pod that only prefills or only decodes serve a request that is not split?"""

    def facts_url(self, prefill: Pod) -> str | None:
        """A URL whose JSON answer the dialect must have read before it can pair this pod; None where it needs none.
        Asked again after every new epoch."""
        return None

    def parse_facts(self, answer: bytes, prefill: Pod) -> Mapping[str, Any] | None:
        """`Pair.facts` out of that URL's answer."""
        return None

    def refuses(self, endpoint: Endpoint, body: bytes) -> str:
        """Why this request cannot be split (several choices, several prompts, ...); empty where it can. What is
        refused may not be given to the methods below."""
        return why_not(endpoint, body)

    def prefill_body(self, endpoint: Endpoint, body: bytes, pair: Pair) -> bytes:
        """The client's body as the prefill pod gets it: one token, not streamed where the order is PREFILL_FIRST."""
        raise NotImplementedError

    def read_handoff(self, endpoint: Endpoint, answer: bytes, pair: Pair) -> Handoff | None:
        """From the prefill leg's answer; None where it offers none: decode gets the original body. With TOGETHER it
        comes too late for the decode leg, and tells only `cached_tokens`."""
        told = read(answer)
        return Handoff(cached_tokens=told.cached_tokens) if told else None

    def decode_body(self, endpoint: Endpoint, body: bytes, pair: Pair, handoff: Handoff) -> bytes:
        """The client's body as the decode pod gets it. With TOGETHER, `handoff` is empty."""
        return edited(body)

    def pull_body(self, body: bytes, pair: Pair) -> bytes | None:
        """The client's body for `pair.decode`, which is told to fetch what `pair.prefill` has; None where the dialect
        cannot say that."""
        return None
