"""Generates the text of mock responses.

Each word is one token of the real tokenizer, alone and inside the text. So the prompt of the next turn contains exactly
the generated tokens, and their blocks match. The words depend on a hash of the prompt: equal prompts get equal text.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from typing import Literal, TypeAlias

import xxhash

from router.errors import ConfigError
from router.sim.mock.mock_config import TextEncoder
from router.sim.mock.tool_calls import ToolCall

_LIST = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information"
)
WORDS = tuple(_LIST.split())

MIN_STOP_TOKENS, MAX_STOP_TOKENS = 16, 64
"""Length range of an output without `max_tokens`."""
FinishReason: TypeAlias = Literal["stop", "length", "tool_calls", "not_finished"]


@dataclass(frozen=True, slots=True)
class GeneratedText:
    """A complete output; `texts[i]` is the text of token i, of a call its part of the arguments."""

    tokens: tuple[int, ...]
    texts: tuple[str, ...]
    finish_reason: FinishReason
    call: ToolCall | None = None

    def first_token(self, finish_reason: Literal["length", "not_finished"]) -> GeneratedText:
        return replace(self, tokens=self.tokens[:1], texts=self.texts[:1], finish_reason=finish_reason)


def generated_call(call: ToolCall, tokens: array[int], max_tokens: int) -> GeneratedText:
    """The output that is a call, encoded as `tokens`, or the first `max_tokens` of them."""
    ends = [len(call.arguments) * count // len(tokens) for count in range(len(tokens) + 1)]
    texts = tuple(call.arguments[start:end] for start, end in pairwise(ends))
    reason: FinishReason = "tool_calls" if len(tokens) <= max_tokens else "length"
    return GeneratedText(tuple(tokens[:max_tokens]), texts[:max_tokens], reason, call)


class Vocabulary:
    """The words that this tokenizer encodes as one token each. Raises `ConfigError` where there is none."""

    def __init__(self, tokenizer: TextEncoder) -> None:
        self._opening = opening_token, opening_text = _opening_word(tokenizer)
        self._following: list[tuple[int, str]] = []
        for word in WORDS:
            tokens = tokenizer.encode(f"{opening_text} {word}", add_special_tokens=False)
            if len(tokens) == 2 and tokens[0] == opening_token:
                self._following.append((tokens[1], f" {word}"))
        if not self._following:
            raise ConfigError("mock engine: this tokenizer has none of the answer words as one token")

    def generate(
        self, prompt: array[int], tokens: int | None, available_tokens: int, least_tokens: int = 0
    ) -> GeneratedText:
        """The output for `prompt`: exactly `tokens` long where given, else of a length that depends on the prompt, but
        of `least_tokens`; never longer than `available_tokens`."""
        seed = xxhash.xxh3_64_intdigest(prompt.tobytes())
        stop_tokens = max(MIN_STOP_TOKENS + seed % (MAX_STOP_TOKENS - MIN_STOP_TOKENS + 1), least_tokens)
        length = min(stop_tokens if tokens is None else tokens, available_tokens)
        words = Random(seed).choices(self._following, k=length - 1)
        generated, texts = zip(self._opening, *words, strict=True)
        stopped = tokens is None and length == stop_tokens
        return GeneratedText(generated, texts, "stop" if stopped else "length")

    def garbled(self, output: GeneratedText) -> GeneratedText:
        """The output that wrong KV produces: of the same length, and wrong from its first token."""
        words = Random("".join(output.texts)).choices(self._following, k=len(output.tokens))
        tokens, texts = zip(*words, strict=True)
        return replace(output, tokens=tokens, texts=texts)


def _opening_word(tokenizer: TextEncoder) -> tuple[int, str]:
    """The first word has no leading space, because chat templates may strip it."""
    for word in WORDS:
        tokens = tokenizer.encode(word.capitalize(), add_special_tokens=False)
        if len(tokens) == 1:
            return tokens[0], word.capitalize()
    raise ConfigError("mock engine: this tokenizer has none of the answer words as one token")
