"""The texts of the bodies that the parity self-test sends to a pod."""

from __future__ import annotations

PROBE_BLOCKS = 4
"""Minimum length of the probe in engine blocks. Several, so that the hashes of parent blocks are tested as well."""
ASSUMED_BLOCK_TOKENS = 64
"""Block size of an engine that does not report it."""
WORDS = "naïve café 東京 Привет 🚀 ﬁne\tprint(1) don't  İstanbul 12345 … 한국어 ṩ end."
"""Each word is at least one token."""


def long_text(block_tokens: int | None) -> str:
    words = WORDS.split(" ")
    length = PROBE_BLOCKS * (block_tokens or ASSUMED_BLOCK_TOKENS)
    return " ".join(words[i % len(words)] for i in range(length))


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
