"""Chat bodies of a given length for the C load generator.

The format is `[u32 length][JSON]`. The generator replaces a marker in each body by a unique number. The text is real
(the standard library's sources), because tokenizers are faster on repeated text.
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
"""Number of shared system prompts and conversations."""
TAIL_TOKENS = 200
_SEED = 7
_CORPUS_CHARACTERS = 6_000_000
_SAMPLE_CHARACTERS = 200_000

Chat: TypeAlias = list[dict[str, Any]]


class SourceText:
    """Pieces of real text, identical in every run of one Python version."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*.py"))
        self._text = "\n".join(path.read_text("utf-8", "replace") for path in files)[:_CORPUS_CHARACTERS]
        sample = self._text[:_SAMPLE_CHARACTERS]
        self._characters_per_token = len(sample) / len(tokenizer.encode(sample))
        self._random = random.Random(_SEED)

    def piece(self, tokens: int) -> str:
        """A piece of about `tokens` tokens."""
        characters = int(tokens * self._characters_per_token)
        start = self._random.randrange(len(self._text) - characters)
        return self._text[start : start + characters]


def fresh_chats(prose: SourceText, tokens: int, count: int) -> Iterator[Chat]:
    """Prompts that share nothing: the marker is first."""
    for _ in range(count):
        yield [
            {"role": "system", "content": f"{MARKER} {prose.piece(tokens - TAIL_TOKENS)}"},
            {"role": "user", "content": prose.piece(TAIL_TOKENS)},
        ]


def warm_chats(prose: SourceText, tokens: int, count: int) -> Iterator[Chat]:
    """Next turns of known conversations: only the last message is new."""
    earlier = [_conversation(prose, tokens - TAIL_TOKENS) for _ in range(PREFIXES)]
    for number in range(count):
        tail = {"role": "user", "content": f"[{MARKER}] {prose.piece(TAIL_TOKENS)}"}
        yield [*earlier[number * 7 % PREFIXES], tail]


def parts_chats(prose: SourceText, tokens: int, count: int) -> Iterator[Chat]:
    """The same with the last message in two parts, as agents send them: each front end of vLLM reads it otherwise."""
    for *earlier, tail in warm_chats(prose, tokens, count):
        texts = ("<context>", tail["content"])
        yield [*earlier, {**tail, "content": [{"type": "text", "text": text} for text in texts]}]


def pack(chats: Iterable[Chat], *, stream: bool) -> bytes:
    """The generator's input file."""
    return b"".join(struct.pack("<I", len(body)) + body for body in chat_bodies(chats, stream=stream))


def chat_bodies(chats: Iterable[Chat], *, stream: bool) -> list[bytes]:
    """The JSON body of each chat."""
    return [_body(chat, stream) for chat in chats]


def _conversation(prose: SourceText, tokens: int) -> Chat:
    """A system prompt of half the length, a question and its answer."""
    roles = {"system": tokens // 2, "user": tokens // 4, "assistant": tokens // 4}
    return [{"role": role, "content": prose.piece(length)} for role, length in roles.items()]


def _body(chat: Chat, stream: bool) -> bytes:
    return msgspec.json.encode(
        {"model": MODEL, "messages": chat, "max_tokens": 128, "temperature": 0.7, "stream": stream}
    )
