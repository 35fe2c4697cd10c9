"""The most characters that one token of a tokenizer stands for."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.prompt.samples import TEXTS
from router.prompt.tokenizer import Tokenizer
from router.wiring.tokenizer_files import TokenizerSource, load_tokenizer
from tests.examples import examples

DROPPING = ("byte level, NFKC", "unigram, metaspace first", "word piece", "awkward added tokens")
"""Tokenizers that may drop or merge characters."""


@given(text=st.text(max_size=40).map(lambda text: text * 5) | st.sampled_from([*TEXTS, " " * 2000, "e\u0301" * 99]))
@examples(60)
def test_a_text_never_has_fewer_tokens_than_its_length_allows(tokenizer: Tokenizer, text: str) -> None:
    if tokenizer.longest_token is not None:
        assert len(tokenizer.encode(text)) * tokenizer.longest_token >= len(text)


@pytest.mark.parametrize("name", DROPPING)
def test_it_is_unknown_where_characters_may_vanish(zoo: dict[str, Path], name: str) -> None:
    assert load_tokenizer(TokenizerSource(str(zoo[name])), fast=False).longest_token is None


def test_it_is_known_for_byte_level_tokenizers(zoo: dict[str, Path], deepseek: Tokenizer) -> None:
    """Four times as many where the text is normalized to NFC."""
    assert deepseek.longest_token == 128
    trained = load_tokenizer(TokenizerSource(str(zoo["byte level, NFC"])), fast=False)
    assert trained.longest_token == 4 * max(map(len, trained._reference.get_vocab()))
