"""Reads prefill responses: the fields that vLLM, SGLang and TensorRT-LLM add to the one token.

Transfer parameters stay raw bytes: they are opaque and change with every release.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from router.engines.adapter import decode
from router.engines.handoff.body import edited
from router.engines.handoff.usage import Usage

Opaque = dict[str, msgspec.Raw]

_FOR_DECODE = ("kv_transfer_params", "prompt_token_ids", "token_ids")
"""Fields that the router requested, not the client."""


class _PrefillChoice(msgspec.Struct):
    finish_reason: str | None = None
    text: str = ""
    prompt_token_ids: msgspec.Raw = msgspec.Raw(b"null")
    disaggregated_params: Opaque | None = None


class PrefillResponse(msgspec.Struct):
    """One unstreamed response; made by `read`."""

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

    def token_ids(self) -> list[int] | None:
        """The prompt's tokens. Their place differs by endpoint; TensorRT-LLM has one list per prompt."""
        for place in (bytes(self.prompt_token_ids), bytes(self.choice.prompt_token_ids)):
            one = decode(place, list[int]) or next(iter(decode(place, list[list[int]]) or ()), None)
            if one:
                return one
        return None


class _RawChoices(msgspec.Struct):
    choices: list[msgspec.Raw]


def read(response: bytes) -> PrefillResponse | None:
    """None for anything else than a prefill response in UTF-8. The whole text is checked, because `whole_response`
    returns parts that are not parsed here."""
    try:
        response.decode()
    except UnicodeDecodeError:
        return None
    return decode(response, PrefillResponse)


def whole_response(response: bytes) -> bytes:
    """The response for the client when no decode request follows. `response` was accepted by `read`."""
    choices = msgspec.json.decode(response, type=_RawChoices).choices
    cleaned = [msgspec.Raw(edited(bytes(choice), drop=_FOR_DECODE)) for choice in choices]
    return edited(response, {"choices": cleaned}, drop=_FOR_DECODE)
