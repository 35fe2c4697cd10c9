"""Generates the text of mock responses.

Each word is one token of the real tokenizer, alone and inside the text. So the prompt of the next turn contains exactly
the generated tokens, and their blocks match. Each word depends on a hash of all tokens before it, so equal prompts get
equal text, and a prompt that ends with the beginning of an answer gets the rest of it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from random import Random
from typing import Literal, NamedTuple, TypeAlias

import xxhash

from loadtest.mock_engine.mock_config import TextEncoder

_LIST = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information"
)
WORDS = tuple(_LIST.split())

MIN_STOP_TOKENS, MAX_STOP_TOKENS = 16, 64
"""Length range of an output without `max_tokens`."""
FinishReason: TypeAlias = Literal["stop", "length", "tool_calls", "not_finished", "abort"]


class Piece(NamedTuple):
    """What a client reads of one token: its text, and where that belongs. `name` begins a call. The text is empty for
    markup, and where it is held back."""

    kind: Literal["content", "reasoning", "name", "arguments", "markup"]
    text: str = ""


MARKUP = Piece("markup")
_Word: TypeAlias = tuple[int, Piece]


@dataclass(frozen=True, slots=True)
class GeneratedText:
    """A complete output; `pieces[i]` is the piece of token i."""

    tokens: tuple[int, ...]
    pieces: tuple[Piece, ...]
    finish_reason: FinishReason
    stop_reason: str | None = None
    """The stop string that ended it."""
    counts_content: bool = False
    """Its content is counted as reasoning, too: vLLM does so where reasoning has ended in the prompt."""

    @property
    def call(self) -> str | None:
        """The name of the first tool that it calls."""
        return next((piece.text for piece in self.pieces if piece.kind == "name"), None)

    @property
    def texts(self) -> tuple[str, ...]:
        """The text of each token in APIs whose mock responses have one item: the arguments of its call, or content."""
        kind = "content" if self.call is None else "arguments"
        return tuple(piece.text if piece.kind == kind else "" for piece in self.pieces)

    def reasoning_tokens(self, tokens: int) -> int:
        kinds = ("reasoning", "content") if self.counts_content else ("reasoning",)
        return sum(piece.kind in kinds for piece in self.pieces[:tokens])

    def cut(self, tokens: int, finish_reason: FinishReason) -> GeneratedText:
        return replace(self, tokens=self.tokens[:tokens], pieces=self.pieces[:tokens], finish_reason=finish_reason)

    def stopped_by(self, strings: Sequence[str], least_tokens: int, *, included: bool) -> GeneratedText:
        """The output up to the first stop string. As in vLLM, the last characters that could begin one are held back,
        unless it is to be included in the output."""
        held = 0 if included else max(map(len, strings)) - 1
        said, sent, pieces = "", 0, list(self.pieces)
        for index, (kind, text) in enumerate(self.pieces):
            said += text if kind == "content" else ""
            new = said[max(0, len(said) - len(text) - max(map(len, strings)) + 1) :]
            ends = [(new.index(string) + len(string), string) for string in strings if string in new]
            if ends and kind == "content" and index >= least_tokens:
                end, string = min(ends, key=itemgetter(0))
                end += len(said) - len(new) - (0 if included else len(string))
                pieces[index] = Piece("content", said[sent:end])
                return replace(self.cut(index + 1, "stop"), pieces=tuple(pieces[: index + 1]), stop_reason=string)
            if (is_last := index + 1 == len(pieces)) or kind == "content":
                end = len(said) if is_last else max(sent, len(said) - held)
                pieces[index] = Piece("content", said[sent:end]) if end > sent or kind == "content" else pieces[index]
                sent = end
        return replace(self, pieces=tuple(pieces))


class Vocabulary:
    """The words that this tokenizer encodes as one token each. An output that stops ends with `end_token`."""

    def __init__(self, tokenizer: TextEncoder, end_token: int = 0) -> None:
        self._end = end_token
        encode = partial(tokenizer.encode, add_special_tokens=False)
        # without a leading space, because chat templates may strip it
        opening = next(word.capitalize() for word in WORDS if len(encode(word.capitalize())) == 1)
        self._opening = (encode(opening)[0], Piece("content", opening))
        self._following: list[_Word] = []
        for word in WORDS:
            tokens = encode(f"{opening} {word}")
            if len(tokens) == 2 and tokens[0] == self._opening[0]:
                self._following.append((tokens[1], Piece("content", f" {word}")))
        self._tokens = {token for token, _ in self._following}

    def generate(
        self,
        prompt: array[int],
        tokens: int | None,
        available_tokens: int,
        least_tokens: int = 0,
        draws: Random | None = None,
    ) -> GeneratedText:
        """The output for `prompt`, or the rest of the one that it ends with: exactly `tokens` long where given, else of
        a length that depends on the prompt, but of `least_tokens`; never longer than `available_tokens`. `draws`: of
        a sampled output, whose words do not depend on the prompt."""
        said = self._said(prompt)
        before = xxhash.xxh3_64(prompt[: len(prompt) - said])
        seed = before.intdigest()
        stop_tokens = max(MIN_STOP_TOKENS + seed % (MAX_STOP_TOKENS - MIN_STOP_TOKENS + 1) - said, least_tokens, 1)
        length = min(stop_tokens if tokens is None else tokens, available_tokens)
        is_stopped = tokens is None and length == stop_tokens
        before.update(prompt[len(prompt) - said :])
        words = self._words(before, length - is_stopped, draws, opens=not said)
        words += [(self._end, MARKUP)] * is_stopped
        generated, pieces = zip(*words, strict=True)
        return GeneratedText(generated, pieces, "stop" if is_stopped else "length")

    def _said(self, prompt: array[int]) -> int:
        """How many tokens at the end of a prompt are the beginning of an answer."""
        for said, token in enumerate(reversed(prompt), 1):
            if token == self._opening[0]:
                return said
            if token not in self._tokens:
                break
        return 0

    def _words(self, before: xxhash.xxh3_64, count: int, draws: Random | None, *, opens: bool) -> list[_Word]:
        words = [self._opening] if opens and count else []
        if draws is not None:
            return words + draws.choices(self._following, k=count - len(words))
        before.update(b"".join(token.to_bytes(4, "little") for token, _ in words))
        while len(words) < count:
            words.append(self._following[before.intdigest() % len(self._following)])
            before.update(words[-1][0].to_bytes(4, "little"))
        return words
