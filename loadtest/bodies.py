"""What is asked when only the router's own cost matters?

Chat bodies of a given length, as the C generator of `hotpath.py` reads them: `[u32 length][JSON]`, and a marker in each
that the generator replaces by a number never used before. Real text, because tokenizers are faster on repetitions: the
standard library's sources. This file never sends anything.
"""

from __future__ import annotations

import random
import struct
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from router.prompt.tokenizer import Tokenizer

MARKER = "U" * 16
MODEL = "mock-model"
PREFIXES = 32
"""System prompts, and conversations, that requests share."""
TAIL_TOKENS = 200
_SEED = 7
_CORPUS_CHARACTERS = 6_000_000
_SAMPLE_CHARACTERS = 200_000

Chat: TypeAlias = list[dict[str, Any]]


class Prose:
    """Pieces of real text, the same in every run of one Python version."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*.py"))
        self._text = "\n".join(path.read_text("utf-8", "replace") for path in files)[:_CORPUS_CHARACTERS]
        sample = self._text[:_SAMPLE_CHARACTERS]
        self._characters_per_token = len(sample) / len(tokenizer.encode(sample))
        self._random = random.Random(_SEED)

    def piece(self, tokens: int) -> str:
        """About so many tokens."""
        characters = int(tokens * self._characters_per_token)
        start = self._random.randrange(len(self._text) - characters)
        return self._text[start : start + characters]


def fresh_chats(prose: Prose, tokens: int, count: int) -> Iterator[Chat]:
    """Prompts that share nothing: the marker stands first."""
    for _ in range(count):
        yield [
            {"role": "system", "content": f"{MARKER} {prose.piece(tokens - TAIL_TOKENS)}"},
            {"role": "user", "content": prose.piece(TAIL_TOKENS)},
        ]


def warm_chats(prose: Prose, tokens: int, count: int) -> Iterator[Chat]:
    """The next turn of conversations whose earlier turns were seen: only the last message is new."""
    earlier = [_conversation(prose, tokens - TAIL_TOKENS) for _ in range(PREFIXES)]
    for number in range(count):
        tail = {"role": "user", "content": f"[{MARKER}] {prose.piece(TAIL_TOKENS)}"}
        yield [*earlier[number * 7 % PREFIXES], tail]


def packed(chats: Iterable[Chat], *, stream: bool) -> bytes:
    """The generator's file."""
    return b"".join(struct.pack("<I", len(body)) + body for body in chat_bodies(chats, stream=stream))


def chat_bodies(chats: Iterable[Chat], *, stream: bool) -> list[bytes]:
    """The JSON of each request."""
    return [_body(chat, stream) for chat in chats]


def _conversation(prose: Prose, tokens: int) -> Chat:
    """A system prompt of half the length, a question and its answer."""
    roles = {"system": tokens // 2, "user": tokens // 4, "assistant": tokens // 4}
    return [{"role": role, "content": prose.piece(length)} for role, length in roles.items()]


def _body(chat: Chat, stream: bool) -> bytes:
    return msgspec.json.encode(
        {"model": MODEL, "messages": chat, "max_tokens": 128, "temperature": 0.7, "stream": stream}
    )
