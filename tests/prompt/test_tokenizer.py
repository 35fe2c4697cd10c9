"""Encoding, and when the fast backend is used."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.prompt.samples import samples
from router.prompt.tokenizer import Tokenizer
from router.wiring.tokenizer_files import TokenizerSource, load_tokenizer


@pytest.fixture
def place(zoo: dict[str, Path], tmp_path: Path) -> Path:
    """A tokenizer's directory that a test may change."""
    return Path(shutil.copytree(zoo["byte level, NFC"], tmp_path / "model"))


@given(text=st.text(max_size=60))
@settings(max_examples=60, deadline=None)
def test_the_backend_in_use_agrees_with_the_reference(tokenizer: Tokenizer, text: str) -> None:
    """On any text, for every tokenizer."""
    assert tokenizer.verify(text)


def test_a_real_tokenizer_earns_the_fast_backend(deepseek: Tokenizer) -> None:
    """And says on how many samples."""
    assert deepseek.backend == "fastokens"
    count = len(samples([token.content for token in deepseek.added_tokens]))
    assert deepseek.reason == f"fastokens equal on {count} samples"
    assert deepseek.vocabulary_size == 129_280


def test_the_reference_encodes_where_the_fast_backend_is_refused_or_not_wanted(zoo: dict[str, Path]) -> None:
    """Both are visible in `reason`."""
    refused = load_tokenizer(TokenizerSource(str(zoo["byte level, NFKC"])))
    unwanted = load_tokenizer(TokenizerSource(str(zoo["byte level, NFC"])), fast=False)
    assert (refused.backend, unwanted.backend) == ("transformers", "transformers")
    assert refused.reason.startswith("fastokens refused")
    assert unwanted.reason == "fast_tokenizer is off"


def test_a_difference_is_seen_and_distrust_is_for_good(zoo: dict[str, Path], deepseek: Tokenizer) -> None:
    """A fast backend of another model stands in for one that has a bug."""
    tokenizer = load_tokenizer(TokenizerSource(str(zoo["byte level, NFC"])))
    right = tokenizer.encode("Hello, world!")
    tokenizer._fast = deepseek._fast
    assert not tokenizer.verify("Hello, world!")
    tokenizer.distrust("differs on live traffic")
    assert tokenizer.verify("Hello, world!")
    assert tokenizer.encode("Hello, world!") == right
    assert (tokenizer.backend, tokenizer.reason) == ("transformers", "differs on live traffic")


def test_a_fast_backend_that_fails_costs_no_request(zoo: dict[str, Path]) -> None:
    """The reference takes over at once, and stays."""

    class Failing:
        def encode_batch_flat(self, texts: list[str], add_special_tokens: bool) -> tuple[bytes, bytes]:
            raise ValueError("match limit exceeded")

    tokenizer = load_tokenizer(TokenizerSource(str(zoo["byte level, NFC"])))
    right = tokenizer.encode("a text")
    tokenizer._fast = Failing()
    assert tokenizer.encode("a text") == right
    assert tokenizer.reason == "fastokens failed: match limit exceeded"


def test_a_text_that_cannot_be_encoded_does_not_end_the_trust(deepseek: Tokenizer) -> None:
    """Half a surrogate pair is the text's fault."""
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
