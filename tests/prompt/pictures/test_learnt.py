"""What engines put in place of pictures is learnt from their tokens, within limits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.hashing import token_array
from router.prompt.pictures import learnt
from router.prompt.pictures.learnt import (
    EAGER,
    MAX_ASKED,
    MAX_BASE64_CHARACTERS,
    MAX_FAILURES,
    MAX_SEEN,
    LearntPictures,
    Wanted,
    replacement,
)

PLACEHOLDER = 9
OURS = (1, 2, PLACEHOLDER, 3)


def wanted(name: int | str) -> Wanted:
    return Wanted(str(name), "weights", str(name))


def knowing(*names: int | str) -> LearntPictures:
    """Pictures that were learnt."""
    found = LearntPictures()
    for name in names:
        found.learn(wanted(name), OURS, (1, 2, 7, PLACEHOLDER, 8, 3), PLACEHOLDER)
    return found


others = st.lists(st.integers(0, 8), max_size=6)


@given(others, st.lists(st.integers(0, 12), min_size=1, max_size=9), others)
def test_the_replacement_stands_between_equal_tokens(front: list[int], put: list[int], behind: list[int]) -> None:
    """Also where it has the placeholder itself, or tokens of its surroundings."""
    ours, engine = [*front, PLACEHOLDER, *behind], [*front, *put, *behind]
    assert replacement(ours, engine, PLACEHOLDER) == token_array(put)


@pytest.mark.parametrize(
    ("ours", "engine"),
    [
        (OURS, (1, 2, 3)),
        (OURS, (1, 2)),
        (OURS, (1, 5, 7, 3)),
        (OURS, (1, 2, 7, 5)),
        ((1, 2, 3), (1, 2, 3)),
        ((PLACEHOLDER, PLACEHOLDER), (7, 7)),
        ((), ()),
    ],
)
def test_nothing_is_learnt_where_anything_else_differs(ours: tuple[int, ...], engine: tuple[int, ...]) -> None:
    assert replacement(ours, engine, PLACEHOLDER) is None


def test_the_first_pictures_are_wanted_at_once_and_later_ones_when_seen_again() -> None:
    """Once each."""
    pictures = knowing(*range(EAGER - 1))
    assert pictures.tokens(wanted("a")) is None
    assert pictures.next_wanted() == wanted("a")
    assert pictures.next_wanted() is None
    pictures = knowing(*range(EAGER))
    pictures.tokens(wanted("a"))
    assert pictures.next_wanted() is None
    pictures.tokens(wanted("a"))
    assert pictures.next_wanted() == wanted("a")
    pictures.learn(wanted("a"), OURS, (1, 2, 7, 8, 3), PLACEHOLDER)
    assert pictures.tokens(wanted("a")) == token_array((7, 8))
    assert pictures.next_wanted() is None


def test_a_picture_that_was_learnt_while_it_waited_is_not_wanted() -> None:
    pictures = LearntPictures()
    pictures.tokens(wanted("a"))
    pictures.learn(wanted("a"), OURS, (1, 2, 7, 3), PLACEHOLDER)
    assert pictures.next_wanted() is None


@pytest.mark.parametrize("engine", [None, (4, 5, 6)])
def test_a_picture_that_cannot_be_learnt_is_not_wanted_again(engine: tuple[int, ...] | None) -> None:
    pictures = knowing("known")
    pictures.learn(wanted("a"), OURS, engine, PLACEHOLDER)
    pictures.tokens(wanted("a"))
    assert pictures.next_wanted() is None
    pictures.tokens(wanted("b"))
    assert pictures.next_wanted() == wanted("b")


def test_an_engine_without_pictures_is_not_asked_again() -> None:
    pictures = LearntPictures()
    for number in range(MAX_FAILURES):
        assert not pictures.gave_up
        pictures.learn(wanted(number), OURS, None, PLACEHOLDER)
    pictures.tokens(wanted("a"))
    assert pictures.gave_up
    assert pictures.next_wanted() is None


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was learnt, what waits and what was seen are each bounded."""
    monkeypatch.setattr(learnt, "MAX_BYTES", 3 * 3 * 4)
    pictures = knowing(*range(4), 3)
    assert [pictures.tokens(wanted(number)) is None for number in range(4)] == [True, False, False, False]
    pictures = knowing(*range(3))
    for number in range(100, 100 + 2 * MAX_ASKED):
        pictures.tokens(wanted(number))
    pictures.tokens(Wanted("large", "weights", "x" * (MAX_BASE64_CHARACTERS + 1)))
    waiting = [one.identifier for one in iter(pictures.next_wanted, None)]
    assert waiting == [str(number) for number in range(100 + MAX_ASKED, 100 + 2 * MAX_ASKED)]


def test_only_the_last_pictures_count_as_seen() -> None:
    pictures = knowing(*range(EAGER))
    for number in ["a", *range(100, 100 + MAX_SEEN), "a"]:
        pictures.tokens(wanted(number))
        assert pictures.next_wanted() is None
    pictures.tokens(wanted(100 + MAX_SEEN - 1))
    assert pictures.next_wanted() is not None
