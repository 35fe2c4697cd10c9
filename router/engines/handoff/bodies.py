"""Edits request bodies of handoffs and reads prefill responses.

An edit changes top-level fields of a JSON body; every other value stays byte for byte and in its place: long integers,
odd floats and inner whitespace. Of a duplicate key the last value counts, as for every engine. Transfer parameters stay
raw bytes: they are opaque and change with every release.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any

import msgspec

from router.engines.adapter import Usage, decode
from router.engines.steering import HANDOFF_FIELDS
from router.errors import DECODE_ERRORS, not_json
from router.guards import Bound

Opaque = dict[str, msgspec.Raw]

_FOR_DECODE = ("kv_transfer_params", "prompt_token_ids", "token_ids")
"""Fields that the router requested, not the client."""

_NUMBERS = tuple(b"[%d" % digit for digit in range(10))
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_EMPTY: Mapping[str, Any] = {}


def edited(
    body: bytes,
    put: Mapping[str, Any] = _EMPTY,
    drop: Collection[str] = (),
    amend: Mapping[str, Any] = _EMPTY,
) -> bytes:
    """`body` without `HANDOFF_FIELDS` and `drop`, with every field of `put`, and with those fields of `amend` that it
    already has. A field keeps its place; new ones go to the end. The same bytes where nothing changes.

    Raises `MalformedRequest` where the body is not a JSON object.
    """
    try:
        fields = _OBJECT.decode(body)
    except DECODE_ERRORS as error:
        raise not_json(error, body) from error
    kept = {name: value for name, value in fields.items() if name not in HANDOFF_FIELDS and name not in drop}
    changes = {**put, **{name: value for name, value in amend.items() if name in kept}}
    if not changes and len(kept) == len(fields):
        return body
    return msgspec.json.encode({**kept, **changes})


# --- prefill responses ---


PREFILL = Bound("prefill response", 16 * 1024 * 1024, 8192, b"{:")
"""One token and transfer parameters; lists of tokens and blocks are not decoded."""


class _PrefillChoice(msgspec.Struct):
    finish_reason: str | None = None
    text: str = ""
    prompt_token_ids: msgspec.Raw = msgspec.Raw(b"null")
    disaggregated_params: Opaque | None = None


class _First(msgspec.Struct, array_like=True):
    """The first of several lists. The others are skipped."""

    tokens: msgspec.Raw


class PrefillResponse(msgspec.Struct):
    """One unstreamed response, with the fields that vLLM, SGLang and TensorRT-LLM add to the one token; made by
    `read_prefill`."""

    choices: Annotated[list[_PrefillChoice], msgspec.Meta(min_length=1)]
    prompt_token_ids: msgspec.Raw = msgspec.Raw(b"null")
    kv_transfer_params: Opaque | None = None
    usage: Usage | None = None

    @property
    def choice(self) -> _PrefillChoice:
        return self.choices[0]

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that were in the prefill pod's own cache."""
        return self.usage.cached_tokens if self.usage else None

    def token_ids(self) -> msgspec.Raw | None:
        """The prompt's tokens, undecoded: there may be a million. Their place differs by endpoint; TensorRT-LLM has one
        list per prompt."""
        for place in (self.prompt_token_ids, self.choice.prompt_token_ids):
            first = decode(bytes(place), _First, PREFILL) if _begins(place, b"[[") else _First(place)
            if first and _begins(first.tokens, _NUMBERS):
                return first.tokens
        return None


def _begins(value: msgspec.Raw, first: bytes | tuple[bytes, ...]) -> bool:
    return b"".join(bytes(memoryview(value)[:64]).split()).startswith(first)


class _RawChoices(msgspec.Struct):
    choices: list[msgspec.Raw]


def read_prefill(response: bytes) -> PrefillResponse | None:
    """None for anything else than a prefill response in UTF-8. The whole text is checked, because `whole_response`
    returns parts that are not parsed here."""
    try:
        response.decode()
    except UnicodeDecodeError:
        return None
    return decode(response, PrefillResponse, PREFILL)


def whole_response(response: bytes) -> bytes:
    """The response for the client when no decode request follows. `response` was accepted by `read_prefill`."""
    choices = msgspec.json.decode(response, type=_RawChoices).choices
    cleaned = [msgspec.Raw(edited(bytes(choice), drop=_FOR_DECODE)) for choice in choices]
    return edited(response, {"choices": cleaned}, drop=_FOR_DECODE)
