"""What a name becomes, and how few conversations a change of weights moves."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.admission.names import ModelName, NameChoice, NameRule, Names, chosen_target, review

RANDOM = random.Random(7)
KEYS = [RANDOM.getrandbits(64) for _ in range(20_000)]


def shares(weights: dict[str, float]) -> dict[str, float]:
    found = [chosen_target(weights, key) for key in KEYS]
    return {target: found.count(target) / len(KEYS) for target in weights}


@pytest.mark.parametrize("weights", [{"a": 95, "b": 5}, {"a": 1, "b": 1}, {"a": 7, "b": 2, "c": 1}, {"a": 1, "b": 0}])
def test_each_target_gets_its_share(weights: dict[str, float]) -> None:
    total = sum(weights.values())
    assert shares(weights) == pytest.approx({one: weight / total for one, weight in weights.items()}, abs=0.01)


def test_from_5_to_10_percent_5_percent_of_the_conversations_move() -> None:
    """All of them to the target that gained."""
    before, after = {"a": 95.0, "b": 5.0}, {"a": 90.0, "b": 10.0}
    moves = [(chosen_target(before, key), chosen_target(after, key)) for key in KEYS]
    moved = [move for move in moves if move[0] != move[1]]
    assert set(moved) == {("a", "b")}
    assert len(moved) / len(KEYS) == pytest.approx(0.05, abs=0.005)


@given(st.integers(0, 2**64 - 1), st.floats(0, 1e9))
def test_a_third_target_takes_conversations_and_moves_no_other(key: int, weight: float) -> None:
    """With any weight, also for the smallest and largest key."""
    two = {"a": 3.0, "b": 2.0}
    assert chosen_target({**two, "c": weight}, key) in {chosen_target(two, key), "c"}


def test_no_weight_is_no_target() -> None:
    assert chosen_target({}, 1) == ""


# --- finding ---

ALIAS, CLAUDE, HAIKU = ModelName("gpt", {"m": 1}), ModelName("claude-*", {"m": 1}), ModelName("claude-haiku*", {"n": 1})
NAMES = Names({"gpt": ALIAS}, (("claude-haiku", HAIKU), ("claude-", CLAUDE)), frozenset({"m", "n"}))


@pytest.mark.parametrize(
    ("asked", "entry"),
    [("gpt", ALIAS), ("claude-opus", CLAUDE), ("claude-haiku-4", HAIKU), ("gpt-4", None), ("m", None)],
)
def test_the_longest_beginning_counts(asked: str, entry: ModelName | None) -> None:
    assert NAMES.find(asked, is_model=False) is entry


def test_a_beginning_is_not_for_models_and_an_exact_name_is() -> None:
    """So that `*` for all other names takes no model away, and a canary can have the model's own name."""
    catch_all = Names({"m": ALIAS}, (("", CLAUDE),), frozenset({"n"}))
    assert catch_all.find("served", is_model=True) is None is catch_all.find("n", is_model=False)
    assert catch_all.find("typo", is_model=False) is CLAUDE
    assert catch_all.find("m", is_model=True) is ALIAS


def test_the_first_rule_that_applies_counts() -> None:
    rules = (
        NameRule({"beta": 1}, frozenset({"acme"}), ((b"x-beta", b"1"),)),
        NameRule({"acme": 1}, frozenset({"acme"})),
        NameRule({"header": 1}, headers=((b"x-beta", b"1"),)),
    )
    entry = ModelName("gpt", {"m": 1}, rules)
    beta = {b"x-beta": b"1"}
    found = [entry.weights_for(*who) for who in (("acme", beta), ("acme", {}), ("zeta", beta), ("zeta", {}))]
    assert found == [{"beta": 1}, {"acme": 1}, {"header": 1}, {"m": 1}]


# --- the review ---


def test_a_review_says_how_many_requests_become_another_model() -> None:
    """Also those of a model that had no name; not those that a header may decide."""
    beta = ModelName("beta", {"m": 1}, (NameRule({"n": 1}, headers=((b"x-beta", b"1"),)),))
    names = Names({"m": ModelName("m", {"m": 1, "n": 1}), "beta": beta}, (), frozenset({"m", "n"}))
    recent = [NameChoice("m", "", "m", "", key) for key in KEYS[:100]]
    found = review(names, [*recent, NameChoice("other", "", "other", "", 1), NameChoice("beta", "beta", "n", "", 1)])
    moved = sum(chosen_target({"m": 1, "n": 1}, key) == "n" for key in KEYS[:100])
    assert found == f"{moved} of 101 requests would become another model; m -> n: {moved}"
