"""How many characters of a text can one token stand for?

A text of n characters has at least n divided by this number of tokens: its length alone can show that it fits no pod.
The number is known for byte-level and byte-fallback BPE, which drop no character; not for tokenizers that drop, merge
or replace text.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

NFC_RATIO = 4
"""NFC makes one character of at most four."""
_BYTE_ALPHABET = 256
_KEEPS_TEXT = frozenset({"ByteLevel", "Metaspace", "Digits", "Prepend", "NFC"})
"""Normalizers and pre-tokenizers that drop no character."""


def longest_token(reference: Any, vocabulary: Collection[str]) -> int | None:
    """The most characters that one token of this `tokenizers.Tokenizer` stands for; None where that is unknown."""
    steps = [*_steps(reference.normalizer), *_steps(reference.pre_tokenizer)]
    added = reference.get_added_tokens_decoder().values()
    if (
        type(reference.model).__name__ != "BPE"
        or not all(map(_keeps_text, steps))
        or any(token.lstrip or token.rstrip for token in added)  # they take any number of spaces
        or not _has_every_byte(reference, steps, vocabulary)
    ):
        return None
    ratio = NFC_RATIO if any(step["type"] == "NFC" for step in steps) else 1
    return ratio * max(map(len, vocabulary))


def _steps(part: Any) -> Iterator[Mapping[str, Any]]:
    """The parts of a normalizer or pre-tokenizer, as tokenizer.json writes them."""
    pending = [json.loads(part.__getstate__())] if part is not None else []
    for step in pending:
        parts = step.get("normalizers", step.get("pretokenizers"))
        if parts is None:
            yield step
        else:
            pending += parts


def _keeps_text(step: Mapping[str, Any]) -> bool:
    if step["type"] in ("Split", "Punctuation"):
        return bool(step["behavior"] != "Removed")
    if step["type"] == "Replace":
        pattern, content = step["pattern"].get("String", ""), step["content"]
        return 0 < len(pattern) <= len(content)
    return step["type"] in _KEEPS_TEXT


def _has_every_byte(reference: Any, steps: list[Mapping[str, Any]], vocabulary: Collection[str]) -> bool:
    """Whether any character can be written with tokens, so that none is dropped or becomes part of an unknown one."""
    if any(step["type"] == "ByteLevel" for step in steps):
        return sum(len(word) == 1 for word in vocabulary) >= _BYTE_ALPHABET
    return bool(reference.model.byte_fallback) and all(
        f"<0x{byte:02X}>" in vocabulary for byte in range(_BYTE_ALPHABET)
    )
