"""The base class of P/D dialects: how KV is handed over between two pods, or pulled from a peer.

A dialect is pure: it edits bodies and reads responses, and never sends anything. For an invalid response it returns
None and never raises. Source: docs/handoff.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

from router.engines.handoff.bodies import edited, read_prefill
from router.types import Endpoint, Pod


class Order(StrEnum):
    """When the decode request is sent."""

    PREFILL_FIRST = "prefill_first"
    TOGETHER = "together"
    """With the prefill request: either alone would wait, so the failure of one aborts the other."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One handoff between two pods. `id` is random, 63 bits, never used twice; `facts` are from `facts_url`."""

    prefill: Pod
    decode: Pod
    id: int
    facts: Mapping[str, Any] = field(default_factory=dict)
    source: Pair | None = None
    """The pull of the prefill pod from a peer, if it has one."""


@dataclass(frozen=True, slots=True)
class Handoff:
    """What the decode request receives. It is used once, and is invalid once its prefill pod has restarted.

    With `prompt_token_ids` the decode pod skips template and tokenizer. `cached_tokens` were in the prefill pod's own
    cache: the number that the client receives, or None where the pod does not report it."""

    params: Mapping[str, Any] = field(default_factory=dict)
    prompt_token_ids: msgspec.Raw | None = None
    cached_tokens: int | None = None
    response: bytes | None = None
    """The client's whole unstreamed response, where the prefill request already completed it."""


class Dialect:
    """One handoff protocol. The defaults suit pods that share a store: the bodies name no KV."""

    order: Order = Order.PREFILL_FIRST
    hold_s: float = 3600.0
    """How long after the prefill response the decode request may be sent: well under the engine's own lease."""

    answers_setting: str = (
        "a store or tier that holds answers, such as MooncakeStoreConnector with save_decode_cache: true"
    )
    """What lets the next turn's prefill pod find the answer of a decode pod: docs/disaggregation.md."""

    serves_alone: bool = True
    """Whether a prefill-only or decode-only pod serves a request that is not split."""

    def facts_url(self, prefill: Pod) -> str | None:
        """The URL of facts that a handoff from this pod needs, fetched for each epoch; None where it needs none."""
        return None

    def parse_facts(self, response: bytes, prefill: Pod) -> Mapping[str, Any] | None:
        """`Pair.facts` from the response of that URL."""
        return None

    def prefill_body(self, endpoint: Endpoint, body: bytes, pair: Pair) -> bytes:
        """The client's body for the prefill pod: one token, not streamed where the order is PREFILL_FIRST."""
        raise NotImplementedError

    def read_handoff(self, response: bytes) -> Handoff | None:
        """The handoff in the prefill response of PREFILL_FIRST; None where there is none, and the decode pod gets the
        client's own body."""
        prefilled = read_prefill(response)
        return Handoff(cached_tokens=prefilled.cached_tokens) if prefilled else None

    def decode_body(self, endpoint: Endpoint, body: bytes, pair: Pair, handoff: Handoff) -> bytes:
        """The client's body for the decode pod. With TOGETHER, `handoff` is empty."""
        return edited(body)

    def return_body(self, model: str, params: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The body of a completion on a peer, after which the pod that `params` name no longer holds their KV; None
        where the engine knows no such request, and its lease must end."""
        return None

    def pull_body(self, body: bytes, pair: Pair) -> bytes | None:
        """The client's body for `pair.decode`, with the request to fetch blocks from `pair.prefill`; None where the
        dialect cannot pull."""
        return None


_NULL = msgspec.Raw(b"null")
_MAX_VALUE_BYTES = 64
"""Maximum size of a number or a flag, as in every body that the router reads."""


class _SplitFields(msgspec.Struct):
    """Decoded after the body, so that a repeated field is decoded once."""

    n: msgspec.Raw = _NULL
    best_of: msgspec.Raw = _NULL
    use_beam_search: msgspec.Raw = _NULL
    echo: msgspec.Raw = _NULL
    prompt_logprobs: msgspec.Raw = _NULL


_SPLIT_FIELDS = msgspec.json.Decoder(_SplitFields)
# As lenient as the engines.
_COUNT = msgspec.json.Decoder(int | None, strict=False)
_FLAG = msgspec.json.Decoder(bool | None, strict=False)


def split_refusal(endpoint: Endpoint, body: bytes, prompts: int = 1) -> str:
    """Why a request with this number of prompts cannot be split between two pods, as a sentence; empty where it can. KV
    that is handed over belongs to one prompt and is read once. `Dialect` is never given a refused request."""
    if endpoint not in (Endpoint.CHAT, Endpoint.COMPLETIONS):
        return "Only chats and completions decode tokens."
    try:
        fields = _SPLIT_FIELDS.decode(body)
        choices = [_small(_COUNT, fields.n), _small(_COUNT, fields.best_of)]
        beam, echo = _small(_FLAG, fields.use_beam_search), _small(_FLAG, fields.echo)
        logprobs = _small(_COUNT, fields.prompt_logprobs)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "The body cannot be read."
    if max(count or 1 for count in choices) > 1 or beam:
        return "Several choices would each need the KV, which can be read only once."
    if prompts > 1:
        return "Several prompts in one request would each need a handoff."
    if echo or logprobs is not None:
        return "Logprobs and echoes of the prompt exist only where it was computed."
    return ""


def _small(decoder: msgspec.json.Decoder[Any], value: msgspec.Raw) -> Any:
    """The value. Raises `DecodeError` if it is long: that would take milliseconds."""
    if len(memoryview(value)) > _MAX_VALUE_BYTES:
        raise msgspec.DecodeError("the value is too long")
    return decoder.decode(value)
