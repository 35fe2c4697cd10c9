"""The base class of P/D dialects: how KV is handed over between two pods, or pulled from a peer.

A dialect is pure: it edits bodies and reads answers, and never sends anything. An answer may be garbage: a dialect
returns None and never raises. Source: reference/protocols.md 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

import msgspec

from router.engines.handoff.body import edited
from router.engines.handoff.prefill_answer import read
from router.types import Endpoint, Pod


class Order(StrEnum):
    """When the decode leg is sent."""

    PREFILL_FIRST = "prefill_first"
    """After the prefill leg's answer."""
    TOGETHER = "together"
    """At the same time: either leg alone would wait, so the failure of one aborts the other."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One handoff between two pods. `id` is random, 63 bits, never used twice; `facts` are from `facts_url`."""

    prefill: Pod
    decode: Pod
    id: int
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Handoff:
    """What the decode leg receives: single use, and worthless once its prefill pod has restarted.

    With `prompt_token_ids` the decode pod skips template and tokenizer. `cached_tokens` is what the prefill pod found
    in its own cache, the only cached tokens reported to the client. None where the pod does not report it."""

    params: Mapping[str, Any] = field(default_factory=dict)
    prompt_token_ids: list[int] | None = None
    cached_tokens: int | None = None
    answer: bytes | None = None
    """The client's whole unstreamed answer, where the prefill leg already completed it."""


class Dialect:
    """One way of handing over. The defaults suit pods that share a store: nothing goes over the wire."""

    order: Order = Order.PREFILL_FIRST
    hold_s: float = 3600.0
    """How long after the prefill leg's answer the decode leg may be sent: well under the engine's own lease."""

    serves_alone: bool = True
    """Whether a prefill-only or decode-only pod serves a request that is not split."""

    def facts_url(self, prefill: Pod) -> str | None:
        """A URL whose JSON answer is needed before this pod can be paired; None where none is needed. Fetched again
        after every new epoch."""
        return None

    def parse_facts(self, answer: bytes, prefill: Pod) -> Mapping[str, Any] | None:
        """`Pair.facts` from that URL's answer."""
        return None

    def split_refusal(self, endpoint: Endpoint, body: bytes) -> str:
        """Why this request cannot be split; empty where it can. The methods below take no refused request."""
        return split_refusal(endpoint, body)

    def prefill_body(self, endpoint: Endpoint, body: bytes, pair: Pair) -> bytes:
        """The client's body for the prefill pod: one token, not streamed where the order is PREFILL_FIRST."""
        raise NotImplementedError

    def read_handoff(self, endpoint: Endpoint, answer: bytes, pair: Pair) -> Handoff | None:
        """The handoff in the prefill leg's answer; None where there is none, and decode gets the original body. With
        TOGETHER it is too late for the decode leg and gives only `cached_tokens`."""
        prefilled = read(answer)
        return Handoff(cached_tokens=prefilled.cached_tokens) if prefilled else None

    def decode_body(self, endpoint: Endpoint, body: bytes, pair: Pair, handoff: Handoff) -> bytes:
        """The client's body for the decode pod. With TOGETHER, `handoff` is empty."""
        return edited(body)

    def pull_body(self, body: bytes, pair: Pair) -> bytes | None:
        """The client's body for `pair.decode`, with the request to fetch blocks from `pair.prefill`; None where the
        dialect has no such request."""
        return None


def host(pod: Pod) -> str:
    """The host of a pod's URL, where its other ports answer too; an IPv6 address without brackets."""
    return urlsplit(pod.url).hostname or ""


def host_before_port(pod: Pod) -> str:
    """The same for use in front of a port: an IPv6 address in brackets."""
    name = host(pod)
    return f"[{name}]" if ":" in name else name


class _SplitFields(msgspec.Struct):
    """Read as leniently as the engines read them."""

    n: int | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    echo: bool | None = None
    prompt_logprobs: int | None = None
    prompt: Any = None


_SPLIT_FIELDS = msgspec.json.Decoder(_SplitFields, strict=False)


def split_refusal(endpoint: Endpoint, body: bytes) -> str:
    """Why a request cannot be computed on one pod and answered by another, as a sentence; empty where it can. KV that
    is handed over belongs to one prompt and is read once."""
    if endpoint not in (Endpoint.CHAT, Endpoint.COMPLETIONS):
        return "Only chats and completions decode tokens."
    try:
        fields = _SPLIT_FIELDS.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "The body cannot be read."
    if max(fields.n or 1, fields.best_of or 1) > 1 or fields.use_beam_search:
        return "Several choices would each need the KV, which can be read only once."
    prompt = fields.prompt
    if isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int):
        return "Several prompts in one request would each need a handoff."
    if fields.echo or fields.prompt_logprobs is not None:
        return "Logprobs and echoes of the prompt exist only where it was computed."
    return ""
