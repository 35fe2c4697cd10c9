"""Encoding, and when the fast backend is used."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Reference

from router.config.tokenizer_files import TokenizerSource, load_tokenizer
from router.prompt.samples import TEXTS, samples
from router.prompt.tokenizer import Tokenizer, encode_fast, encode_reference, fast_equal_to


@pytest.fixture
def place(zoo: dict[str, Path], tmp_path: Path) -> Path:
    """A tokenizer's directory that a test may change."""
    return Path(shutil.copytree(zoo["byte level, NFC"], tmp_path / "model"))


@given(text=st.text(max_size=60))
def test_the_backend_in_use_agrees_with_the_reference(tokenizer: Tokenizer, text: str) -> None:
    """On any text, for every tokenizer."""
    assert tokenizer.encode(text) == tokenizer.encode_slowly(text)


def test_a_real_tokenizer_earns_the_fast_backend(deepseek: Tokenizer) -> None:
    """The reason has the number of samples."""
    assert deepseek.backend == "fastokens"
    count = len(samples([token.content for token in deepseek.added_tokens]))
    assert deepseek.reason == f"fastokens equal on {count} samples"
    assert deepseek.vocabulary_size == 129_280


def test_the_reference_encodes_where_the_fast_backend_is_refused_or_off(zoo: dict[str, Path]) -> None:
    """The reason shows which."""
    refused = load_tokenizer(TokenizerSource(str(zoo["byte level, NFKC"])))
    unwanted = load_tokenizer(TokenizerSource(str(zoo["byte level, NFC"])), fast=False)
    assert (refused.backend, unwanted.backend) == ("transformers", "transformers")
    assert refused.reason.startswith("fastokens refused")
    assert unwanted.reason == "fast_tokenizer is off"


def test_a_difference_is_detected_and_distrust_is_permanent(zoo: dict[str, Path], deepseek: Tokenizer) -> None:
    """The fast backend of another model plays one with a bug."""
    tokenizer = load_tokenizer(TokenizerSource(str(zoo["byte level, NFC"])))
    right = tokenizer.encode("Hello, world!")
    tokenizer._fast = deepseek._fast
    assert tokenizer.encode("Hello, world!") != tokenizer.encode_slowly("Hello, world!")
    tokenizer.distrust("differs on live traffic")
    assert tokenizer.encode("Hello, world!") == tokenizer.encode_slowly("Hello, world!")
    assert tokenizer.encode("Hello, world!") == right
    assert (tokenizer.backend, tokenizer.reason) == ("transformers", "differs on live traffic")


def test_the_reference_takes_over_when_the_fast_backend_fails(zoo: dict[str, Path]) -> None:
    """At once, and for good."""

    class Failing:
        def encode_batch_flat(self, texts: list[str], add_special_tokens: bool) -> tuple[bytes, bytes]:
            raise ValueError("match limit exceeded")

    tokenizer = load_tokenizer(TokenizerSource(str(zoo["byte level, NFC"])))
    right = tokenizer.encode("a text")
    tokenizer._fast = Failing()
    assert tokenizer.encode("a text") == right
    assert tokenizer.reason == "fastokens failed: match limit exceeded"


def test_a_text_that_cannot_be_encoded_does_not_disable_the_fast_backend(deepseek: Tokenizer) -> None:
    """Half a surrogate pair is an error of the text."""
    with pytest.raises(UnicodeError):
        deepseek.encode("\ud800")
    assert deepseek.backend == "fastokens"


def test_special_tokens_go_around_a_text_on_request(zoo: dict[str, Path]) -> None:
    """As the tokenizer's own post-processor says."""
    tokenizer = load_tokenizer(TokenizerSource(str(zoo["word piece"])))
    bare = tokenizer.encode("hello").tolist()
    assert tokenizer.encode("hello", add_special_tokens=True).tolist() == [1, *bare, 2]


def test_truncation_and_padding_in_the_file_do_not_apply(place: Path) -> None:
    """Engines switch them off too."""
    file = place / "tokenizer.json"
    settings_ = {"truncation": {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}}
    file.write_text(json.dumps(json.loads(file.read_text()) | settings_))
    assert len(load_tokenizer(TokenizerSource(str(place))).encode("one two three four five")) > 2


def reference(place: Path) -> Reference:
    return Reference.from_file(str(place / "tokenizer.json"))


def test_an_equal_fast_tokenizer_is_returned(zoo: dict[str, Path]) -> None:
    slow = reference(zoo["byte level, NFC"])
    fast, reason = fast_equal_to(slow, TEXTS)
    assert reason == f"fastokens equal on {len(TEXTS)} samples"
    assert encode_fast(fast, TEXTS, False) == encode_reference(slow, TEXTS, False)


def test_a_tokenizer_that_fastokens_cannot_read_is_refused(zoo: dict[str, Path]) -> None:
    fast, reason = fast_equal_to(reference(zoo["byte level, NFKC"]), TEXTS)
    assert fast is None
    assert reason.startswith("fastokens refused: ") and "NFKC" in reason


class Shifted:
    """A wrapped tokenizer with other tokens for one text, with or without special tokens."""

    def __init__(self, wrapped: Reference, special: bool) -> None:
        self.to_str = wrapped.to_str
        self._wrapped = wrapped
        self._special = special

    def encode_batch_fast(self, texts: Sequence[str], add_special_tokens: bool) -> list[object]:
        encodings = self._wrapped.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        shifted = {"Hello, world!"} if add_special_tokens is self._special else set()
        return [Ids([i + (text in shifted) for i in e.ids]) for text, e in zip(texts, encodings, strict=True)]


class Ids:
    """The used part of an encoding."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids


@pytest.mark.parametrize("special", [False, True])
def test_one_different_token_is_enough_to_refuse(zoo: dict[str, Path], special: bool) -> None:
    """The reason names the text."""
    fast, reason = fast_equal_to(Shifted(reference(zoo["byte level, NFC"]), special), TEXTS)
    assert (fast, reason) == (None, "fastokens differs on 'Hello, world!'")


def test_without_the_library_the_reference_encodes(zoo: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an optional dependency: not every platform has a wheel."""
    monkeypatch.setitem(sys.modules, "fastokens", None)
    assert fast_equal_to(reference(zoo["byte level, NFC"]), TEXTS) == (None, "fastokens is not installed")


def test_both_encoders_keep_texts_apart(zoo: dict[str, Path]) -> None:
    """An empty text has no tokens, and no texts give no arrays."""
    slow = reference(zoo["byte level, NFC"])
    fast, _ = fast_equal_to(slow, TEXTS)
    for tokens in (encode_fast(fast, ["a", "", "a"], False), encode_reference(slow, ["a", "", "a"], False)):
        assert list(map(len, tokens)) == [1, 0, 1]
        assert tokens[0].typecode == "I"
    assert encode_fast(fast, [], False) == encode_reference(slow, [], False) == []


@given(st.text(max_size=60).filter(lambda text: text.isprintable()))
def test_text_of_tokens_is_the_text(deepseek: Tokenizer, text: str) -> None:
    assert deepseek.text_of(deepseek.encode(text), True) == text


def test_tokens_are_found_by_their_name(deepseek: Tokenizer) -> None:
    token = deepseek.added_tokens[0].content
    number = deepseek.id_of(token)
    assert number is not None
    assert (deepseek.text_of([number], True), deepseek.text_of([number], False)) == (token, "")
    assert deepseek.id_of("<no such token>") is None
