"""What does the answer of a prefill leg tell?

Fields that vLLM, SGLang and TensorRT-LLM may return beside the one token. What a dialect passes on stays as raw bytes:
it is opaque, and grows with every release. This file never changes what it reads.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from router.engines.handoff.body import edited
from router.engines.handoff.usage import Usage
from router.engines.openai import decode

Opaque = dict[str, msgspec.Raw]

_FOR_DECODE = ("kv_transfer_params", "prompt_token_ids", "token_ids")
"""What we asked for and the client did not."""


class _PrefillChoice(msgspec.Struct):
    finish_reason: str | None = None
    text: str = ""
    prompt_token_ids: msgspec.Raw = msgspec.Raw(b"null")
    disaggregated_params: Opaque | None = None


class PrefillAnswer(msgspec.Struct):
    """One unstreamed answer; `read` is how to get it."""

    choices: Annotated[list[_PrefillChoice], msgspec.Meta(min_length=1)]
    prompt_token_ids: msgspec.Raw = msgspec.Raw(b"null")
    kv_transfer_params: Opaque | None = None
    usage: Usage | None = None

    @property
    def choice(self) -> _PrefillChoice:
        return self.choices[0]

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that the prefill pod found in its own cache."""
        return self.usage.cached_tokens if self.usage else None

    def token_ids(self) -> list[int] | None:
        """The prompt's, from where chats or completions have them; TensorRT-LLM lists them per prompt."""
        for place in (bytes(self.prompt_token_ids), bytes(self.choice.prompt_token_ids)):
            one = decode(place, list[int]) or next(iter(decode(place, list[list[int]]) or ()), None)
            if one:
                return one
        return None


def read(answer: bytes) -> PrefillAnswer | None:
    """None where it is no answer of one, or no text: `whole_answer` reads what is skipped here."""
    try:
        answer.decode()
    except UnicodeDecodeError:
        return None
    return decode(answer, PrefillAnswer)


def whole_answer(answer: bytes) -> bytes:
    """An answer that `read` has read, as the client gets it when no decode leg follows."""
    choices = msgspec.json.decode(answer, type=_Choices).choices
    told = [msgspec.Raw(edited(bytes(choice), drop=_FOR_DECODE)) for choice in choices]
    return edited(answer, {"choices": told}, drop=_FOR_DECODE)


class _Choices(msgspec.Struct):
    choices: list[msgspec.Raw]
