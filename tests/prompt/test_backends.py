"""Proof that the fast library encodes like the reference, or a refusal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Reference

from router.prompt.backends import encode_fast, encode_reference, fast_equal_to
from router.prompt.samples import TEXTS


def reference(place: Path) -> Reference:
    return Reference.from_file(str(place / "tokenizer.json"))


def test_an_equal_fast_tokenizer_is_given_back(zoo: dict[str, Path]) -> None:
    """And its tokens are those of the reference, text by text."""
    slow = reference(zoo["byte level, NFC"])
    fast, reason = fast_equal_to(slow, TEXTS)
    assert reason == f"fastokens equal on {len(TEXTS)} samples"
    assert encode_fast(fast, TEXTS, False) == encode_reference(slow, TEXTS, False)


def test_a_tokenizer_that_fastokens_cannot_read_is_refused(zoo: dict[str, Path]) -> None:
    """With the reason that it gives."""
    fast, reason = fast_equal_to(reference(zoo["byte level, NFKC"]), TEXTS)
    assert fast is None
    assert reason.startswith("fastokens refused: ") and "NFKC" in reason


class Shifted:
    """Says that it is the tokenizer it wraps, and gives one text other tokens, with special tokens or without."""

    def __init__(self, honest: Reference, special: bool) -> None:
        self.to_str = honest.to_str
        self._honest = honest
        self._special = special

    def encode_batch_fast(self, texts: Sequence[str], add_special_tokens: bool) -> list[object]:
        encodings = self._honest.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        shifted = {"Hello, world!"} if add_special_tokens is self._special else set()
        return [Ids([i + (text in shifted) for i in e.ids]) for text, e in zip(texts, encodings, strict=True)]


class Ids:
    """What an encoding is asked for."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids


@pytest.mark.parametrize("special", [False, True])
def test_one_different_token_is_enough_to_refuse(zoo: dict[str, Path], special: bool) -> None:
    """And the text that showed it is named."""
    fast, reason = fast_equal_to(Shifted(reference(zoo["byte level, NFC"]), special), TEXTS)
    assert (fast, reason) == (None, "fastokens differs on 'Hello, world!'")


def test_without_the_library_the_reference_encodes(zoo: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an optional dependency: there are no wheels for every platform."""
    monkeypatch.setitem(sys.modules, "fastokens", None)
    assert fast_equal_to(reference(zoo["byte level, NFC"]), TEXTS) == (None, "fastokens is not installed")


def test_both_encoders_keep_texts_apart(zoo: dict[str, Path]) -> None:
    """An empty text among others has no tokens, and no text is none."""
    slow = reference(zoo["byte level, NFC"])
    fast, _ = fast_equal_to(slow, TEXTS)
    for tokens in (encode_fast(fast, ["a", "", "a"], False), encode_reference(slow, ["a", "", "a"], False)):
        assert list(map(len, tokens)) == [1, 0, 1]
        assert tokens[0].typecode == "I"
    assert encode_fast(fast, [], False) == encode_reference(slow, [], False) == []
