"""Cuts in a text, and the tokens of its pieces."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.config.tokenizer_files import TokenizerSource, load_tokenizer
from router.prompt.samples import TEXTS
from router.prompt.segments import GROWTH, HEADS_TRIED, SEARCHED, SHORTEST_PIECE, Cuts, find_cuts
from router.prompt.tokenizer import Tokenizer

SHARED = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def texts_with(added: list[str]) -> st.SearchStrategy[str]:
    """Ordinary text with whole and broken added tokens."""
    whole = st.sampled_from(added)
    broken = st.builds(lambda token, at: token[at % len(token) :], whole, st.integers(0, 9))
    plain = st.sampled_from(TEXTS) | st.text(max_size=8) | st.sampled_from([" ", "\n\n", "word", "<", "|>"])
    return st.lists(whole | broken | plain, max_size=12).map("".join)


@given(data=st.data())
@SHARED
def test_pieces_encode_to_the_tokens_of_the_whole(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """For every tokenizer, any text and any length of pieces."""
    added = [token.content for token in tokenizer.added_tokens][:400]
    text = data.draw(texts_with(added))
    pieces = find_cuts_once(tokenizer).pieces(text, data.draw(st.sampled_from([1, 20, SHORTEST_PIECE])))
    assert "".join(pieces) == text
    encoded = tokenizer.encode_batch(pieces)
    assert list(chain.from_iterable(encoded)) == tokenizer.encode(text).tolist()


@given(data=st.data())
@SHARED
def test_a_text_and_its_continuation_share_all_pieces_but_the_last(deepseek: Tokenizer, data: st.DataObject) -> None:
    some = texts_with([token.content for token in deepseek.added_tokens][:400])
    text, more = data.draw(some), data.draw(some)
    cuts = find_cuts_once(deepseek)
    pieces = cuts.pieces(text)
    assert cuts.pieces(text + more)[: max(0, len(pieces) - 1)] == pieces[:-1]


def test_a_text_of_special_tokens_has_few_pieces(deepseek: Tokenizer) -> None:
    """Each piece costs time in the event loop. Later pieces are longer."""
    cuts, text = find_cuts_once(deepseek), "<｜User｜>" * 200_000
    pieces = cuts.pieces(text)
    assert len(pieces) < 1_000
    assert max(map(len, pieces)) <= len(text) // GROWTH + cuts.longest


@pytest.mark.parametrize("around", range(-12, 13))
def test_a_token_is_found_wherever_it_begins(deepseek: Tokenizer, around: int) -> None:
    """Long text is searched in windows, because one search cannot be interrupted. The false matches of the common start
    make the pattern take over."""
    before = "<｜x" * HEADS_TRIED + "<｜" * SEARCHED
    before = before[: 3 * HEADS_TRIED + SEARCHED + around]
    assert find_cuts_once(deepseek).pieces(before + "<｜Assistant｜>b", 1)[-1] == "<｜Assistant｜>b"


def test_real_tokenizers_are_cut_at_their_turns(deepseek: Tokenizer) -> None:
    """Also at tokens that are matched after normalization: this tokenizer has none."""
    assert find_cuts_once(deepseek).pieces("<｜User｜>a<｜Assistant｜>b", 1) == [
        "<｜User｜>a",
        "<｜Assistant｜>b",
    ]


def test_tokens_that_affect_their_neighbours_are_not_cut_at(zoo: dict[str, object]) -> None:
    """Stripping, whole-word, normalized, overlapping and nested tokens stay inside pieces."""
    cuts = find_cuts(load_tokenizer(TokenizerSource(str(zoo["awkward added tokens"]))))
    text = "x<strip>x word x<LOUD>x<a>x<a><b>x|><|x\n\nx<|start|>x[INST]y"
    assert cuts.pieces(text, 1) == [text.removesuffix("[INST]y"), "[INST]y"]


def test_a_tokenizer_that_cutting_would_change_is_not_cut(zoo: dict[str, object]) -> None:
    """The check on samples finds it: here the flags of a token are wrong."""
    tokenizer = load_tokenizer(TokenizerSource(str(zoo["awkward added tokens"])))
    lying = [Honest(token) for token in tokenizer.added_tokens]
    tokenizer.added_tokens = tuple(lying)
    cuts = find_cuts(tokenizer)
    assert cuts.pattern is None


class Honest:
    """An added token whose flags say that it leaves its neighbours unchanged."""

    lstrip = rstrip = single_word = normalized = False

    def __init__(self, token: object) -> None:
        self.content: str = token.content  # type: ignore[attr-defined]


def test_a_text_full_of_special_tokens_has_few_pieces(deepseek: Tokenizer) -> None:
    """A hostile prompt costs at most one segment per shortest piece."""
    pieces = find_cuts_once(deepseek).pieces("<｜User｜>" * 4000)
    assert len(pieces) <= 4000 * 8 / SHORTEST_PIECE + 1
    assert all(len(piece) >= SHORTEST_PIECE for piece in pieces[:-1])


def test_without_a_pattern_the_whole_text_is_one_piece() -> None:
    """An empty text has no piece."""
    assert Cuts(None).pieces("abc<s>" * 100) == ["abc<s>" * 100]
    assert Cuts(None).pieces("") == []


_FOUND: dict[str, Cuts] = {}


def find_cuts_once(tokenizer: Tokenizer) -> Cuts:
    """Cached, because finding them takes time."""
    if tokenizer.fingerprint not in _FOUND:
        _FOUND[tokenizer.fingerprint] = find_cuts(tokenizer)
    return _FOUND[tokenizer.fingerprint]


@pytest.mark.parametrize("name", ["byte level with prefix space", "unigram, metaspace first", "word piece"])
def test_trained_tokenizers_are_cut_too(zoo: dict[str, object], name: str) -> None:
    """Rules for the start of a text have no effect, because pieces keep their token in front."""
    assert find_cuts(load_tokenizer(TokenizerSource(str(zoo[name])))).pattern is not None
