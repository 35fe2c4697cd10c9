"""The cache of text segments: exact tokens, no encoding of known text, limited size."""

from __future__ import annotations

import gc
import tracemalloc
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.config.tokenizer_files import TokenizerSource, load_tokenizer
from router.errors import MalformedRequest
from router.hashing import token_array
from router.prompt.samples import TEXTS
from router.prompt.segments import SHORTEST_PIECE, Segment, SegmentCache
from router.prompt.tokenizer import Tokenizer

PLENTY = 1 << 24


def tokens_of(cache: SegmentCache, text: str, framed: bool = False) -> list[int]:
    """All tokens of a text, by way of the cache."""
    lookup = cache.look_up(text, framed=framed)
    segments = cache.complete(lookup)
    cache.keep(lookup, segments)
    return [*lookup.head, *tokens_in(segments), *lookup.tail]


def tokens_in(segments: Iterable[Segment]) -> list[int]:
    """The tokens of all segments."""
    tokens = token_array()
    for segment in segments:
        tokens.frombytes(segment.tokens)
    return tokens.tolist()


def turn(number: int, length: int = 300) -> str:
    """One turn of a conversation with DeepSeek's markers."""
    return f"<｜User｜>question {number} " + "and so on " * (length // 10)


_CACHES: dict[str, SegmentCache] = {}


@given(data=st.data())
def test_tokens_are_those_of_the_whole_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """For every tokenizer, with a filled cache, framed or not."""
    if tokenizer.fingerprint not in _CACHES:
        _CACHES[tokenizer.fingerprint] = SegmentCache(tokenizer, 40_000)
    cache = _CACHES[tokenizer.fingerprint]
    added = [token.content for token in tokenizer.added_tokens][:100]
    piece = st.sampled_from(added) | st.sampled_from(TEXTS) | st.text(max_size=5)
    text = "".join(data.draw(st.lists(piece, max_size=10)))
    framed = data.draw(st.booleans())
    assert tokens_of(cache, text, framed) == tokenizer.encode(text, add_special_tokens=framed).tolist()
    grown = text + data.draw(piece)
    assert tokens_of(cache, grown, framed) == tokenizer.encode(grown, add_special_tokens=framed).tolist()


def test_a_growing_conversation_encodes_only_its_tail(deepseek: Tokenizer) -> None:
    """For any length; the same text again encodes nothing."""
    cache = SegmentCache(deepseek, PLENTY)
    text = ""
    for number in range(30):
        text += turn(number)
        cold = sum(map(len, cache.look_up(text).cold))
        assert cold <= len(turn(number)) + SHORTEST_PIECE
        tokens_of(cache, text)
        assert sum(map(len, cache.look_up(text).cold)) == 0


def test_conversations_share_their_common_start_only(deepseek: Tokenizer) -> None:
    """The same segment after another start is another entry."""
    cache = SegmentCache(deepseek, PLENTY)
    tokens_of(cache, turn(0) + turn(1) + turn(2))
    assert cache.look_up(turn(0) + turn(9) + turn(2)).cold == (turn(9), turn(2))
    assert cache.look_up(turn(1)).cold == (turn(1),)


@pytest.mark.parametrize("text", [turn(0) + turn(1), "short"])
def test_a_text_that_only_another_salt_knows_is_encoded(deepseek: Tokenizer, text: str) -> None:
    """Also a short piece, which is cached on its own: the time of a request does not show what others have sent."""
    encoded: list[str] = []

    class Counting:
        """Records what is encoded."""

        def __getattr__(self, name: str) -> Any:
            return getattr(deepseek, name)

        def encode_batch(self, pieces: Sequence[str], **options: Any) -> Any:
            encoded.extend(pieces)
            return deepseek.encode_batch(pieces, **options)

    cache = SegmentCache(cast(Tokenizer, Counting()), PLENTY)
    for salt, is_encoded in (("one", True), ("one", False), ("other", True), ("", True), ("other", False)):
        lookup = cache.look_up(text, salt=salt)
        cache.keep(lookup, cache.complete(lookup))
        assert bool(encoded) is is_encoded, salt
        encoded.clear()


def test_bytes_stay_under_the_limit_and_the_least_recently_used_go_first(deepseek: Tokenizer) -> None:
    """The shared start of all conversations stays."""
    cache = SegmentCache(deepseek, 20_000)
    system = turn(-1)
    for number in range(200):
        tokens_of(cache, system + turn(number))
        cache.look_up(system)
        assert cache.bytes <= 20_000
    assert cache.look_up(system).cold == ()
    assert cache.look_up(system + turn(199)).cold == ()
    assert cache.look_up(system + turn(0)).cold == (turn(0),)


def test_a_conversation_loses_its_end_before_its_start(deepseek: Tokenizer) -> None:
    """The rest is still a prefix."""
    cache = SegmentCache(deepseek, 9_000)
    text = "".join(turn(number) for number in range(10))
    tokens_of(cache, text)
    cache.look_up(text)
    for number in range(10, 15):
        tokens_of(cache, turn(number))
    assert 0 < len(cache.look_up(text).known) < 10


def test_a_text_larger_than_the_cache_is_not_kept(deepseek: Tokenizer) -> None:
    """Its bytes are free again."""
    cache = SegmentCache(deepseek, 10_000)
    tokens_of(cache, "long " * 10_000)
    cache.look_up("")
    assert (cache.bytes, len(cache)) == (0, 0)


def test_the_bytes_are_a_good_estimate(deepseek: Tokenizer) -> None:
    """Compared with the memory that the interpreter holds."""
    cache = SegmentCache(deepseek, PLENTY)
    tokens_of(cache, turn(0))
    gc.collect()
    tracemalloc.start()
    for number in range(1500):
        tokens_of(cache, turn(number % 50, 120) + turn(number, 120))
    cache.look_up("")
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.8 < cache.bytes / held < 1.25


def test_segments_encoded_by_two_requests_at_once_are_stored_once(deepseek: Tokenizer) -> None:
    """The second one's children are inserted under the first one's segment."""
    cache = SegmentCache(deepseek, PLENTY)
    short, long = cache.look_up(turn(0)), cache.look_up(turn(0) + turn(1))
    for lookup in (short, long):
        cache.keep(lookup, cache.complete(lookup))
    assert cache.look_up(turn(0) + turn(1)).cold == ()
    assert len(cache) == 2


def test_a_parent_may_be_evicted_meanwhile(deepseek: Tokenizer) -> None:
    """The segments behind it are right, and found again after the parent is."""
    cache = SegmentCache(deepseek, 20_000)
    tokens_of(cache, turn(0))
    lookup = cache.look_up(turn(0) + turn(1))
    for number in range(2, 60):
        tokens_of(cache, turn(number))
    assert cache.look_up(turn(0)).cold
    segments = cache.complete(lookup)
    cache.keep(lookup, segments)
    assert tokens_in(segments) == deepseek.encode(turn(0) + turn(1)).tolist()
    assert tokens_of(cache, turn(0) + turn(1)) == deepseek.encode(turn(0) + turn(1)).tolist()


def test_nothing_of_a_distrusted_backend_is_used_again(zoo: dict[str, Path]) -> None:
    """Its segments cannot be reached and age out."""
    tokenizer = load_tokenizer(TokenizerSource(str(zoo["byte level, NFC"])))
    cache = SegmentCache(tokenizer, PLENTY)
    right = tokens_of(cache, "one text")
    cache.look_up("")
    next(iter(cache._segments.values())).tokens = token_array([1, 2, 3]).tobytes()
    assert tokens_of(cache, "one text") == [1, 2, 3]
    tokenizer.distrust("it differs")
    assert tokens_of(cache, "one text") == right


def test_special_tokens_around_a_text_are_not_part_of_its_segments(zoo: dict[str, Path]) -> None:
    """They are added around known and new segments alike."""
    tokenizer = load_tokenizer(TokenizerSource(str(zoo["word piece"])))
    cache = SegmentCache(tokenizer, PLENTY)
    bare = tokens_of(cache, "hello")
    assert tokens_of(cache, "hello", framed=True) == [1, *bare, 2]
    assert tokens_of(cache, "hello", framed=True) == [1, *bare, 2]
    assert tokens_of(cache, "", framed=True) == [1, 2]


def test_a_frame_that_depends_on_the_text_is_left_to_the_tokenizer(zoo: dict[str, Path]) -> None:
    """Then a framed text is one piece."""

    class Moody(Tokenizer):
        """Puts a token in front of texts of even length only."""

        def encode_batch(self, texts: object, *, add_special_tokens: bool = False) -> list[array[int]]:
            tokens = super().encode_batch(list(texts))  # type: ignore[call-overload]
            return [
                token_array([7]) + ids if add_special_tokens and len(text) % 2 == 0 else ids
                for text, ids in zip(texts, tokens, strict=True)  # type: ignore[call-overload]
            ]

    tokenizer = load_tokenizer(TokenizerSource(str(zoo["byte level, NFC"])))
    tokenizer.__class__ = Moody
    cache = SegmentCache(tokenizer, PLENTY)
    for text in ("ab", "abc", "ab<|start|>" * 50, ""):
        for _ in range(2):
            expected = tokenizer.encode(text, add_special_tokens=True).tolist()
            assert tokens_of(cache, text, framed=True) == expected


def test_a_lone_surrogate_is_refused(deepseek: Tokenizer) -> None:
    """JSON can contain one, UTF-8 and tokenizers cannot."""
    cache = SegmentCache(deepseek, PLENTY)
    with pytest.raises(MalformedRequest, match="surrogate"):
        cache.look_up(turn(0) + "\ud83d")
    tokens_of(cache, turn(0) + "é")
