"""What does a mock engine say?

Plain words, chosen by a hash of the prompt: equal prompts get equal answers. Each word is one token of the real
tokenizer, in its place in the text, so that the next turn's prompt contains exactly the tokens that were generated and
finds their blocks. This file never looks at what the prompt means.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import xxhash

from router.errors import ConfigError
from router.sim.mock.mock_config import TextEncoder

_LIST = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information"
)
WORDS = tuple(_LIST.split())

SHORTEST_NATURAL_TOKENS, LONGEST_NATURAL_TOKENS = 16, 64

_GARBLED = 0x6A756E6B
_U64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class GeneratedText:
    """A whole answer, known before its first token is due: `texts[i]` is what token i adds."""

    tokens: tuple[int, ...]
    texts: tuple[str, ...]
    finish_reason: Literal["stop", "length", "not_finished"]

    def first(self, finish_reason: Literal["length", "not_finished"]) -> GeneratedText:
        """Its first token alone."""
        return GeneratedText(self.tokens[:1], self.texts[:1], finish_reason)


class Vocabulary:
    """The words that this tokenizer turns into one token each. `ConfigError` where there is none."""

    def __init__(self, tokenizer: TextEncoder) -> None:
        self._opening = _opening_word(tokenizer)
        self._following: list[tuple[int, str]] = []
        opening_token, opening_text = self._opening
        for word in WORDS:
            tokens = tokenizer.encode(f"{opening_text} {word}", add_special_tokens=False)
            if len(tokens) == 2 and tokens[0] == opening_token:
                self._following.append((tokens[1], f" {word}"))
        if not self._following:
            raise ConfigError("mock engine: this tokenizer has none of the answer words as one token")

    def answer(self, prompt: array[int], max_tokens: int | None, room_tokens: int) -> GeneratedText:
        """The answer to `prompt`: exactly `max_tokens` long where given, else of a length that the prompt decides, cut
        where the context has no more room."""
        seed = xxhash.xxh3_64_intdigest(prompt.tobytes())
        natural = SHORTEST_NATURAL_TOKENS + seed % (LONGEST_NATURAL_TOKENS - SHORTEST_NATURAL_TOKENS + 1)
        length = min(natural if max_tokens is None else max_tokens, room_tokens)
        chosen = [self._opening, *self._choose(seed, length - 1)]
        stopped = max_tokens is None and length == natural
        tokens, texts = zip(*chosen, strict=True)
        return GeneratedText(tokens, texts, "stop" if stopped else "length")

    def garbled(self, answer: GeneratedText) -> GeneratedText:
        """What comes out instead where the KV is of something else: as long, and wrong from its first token."""
        seed = xxhash.xxh3_64_intdigest("".join(answer.texts).encode(), _GARBLED)
        tokens, texts = zip(*self._choose(seed, len(answer.tokens)), strict=True)
        return GeneratedText(tokens, texts, answer.finish_reason)

    def _choose(self, state: int, count: int) -> Iterator[tuple[int, str]]:
        for _ in range(count):
            state = (state * 6364136223846793005 + 1442695040888963407) & _U64  # Knuth's MMIX generator
            yield self._following[(state >> 33) % len(self._following)]


def _opening_word(tokenizer: TextEncoder) -> tuple[int, str]:
    """An answer opens without a space, which chat templates may strip."""
    for word in WORDS:
        tokens = tokenizer.encode(word.capitalize(), add_special_tokens=False)
        if len(tokens) == 1:
            return tokens[0], word.capitalize()
    raise ConfigError("mock engine: this tokenizer has none of the answer words as one token")
