"""Limits of the router are shared: nobody takes all of one while others need it, and alone everybody may."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from router.admission.fair_bound import KEPT_PART, FairBound
from router.errors import Saturated, ShareExceeded

OWNERS = ("", "a", "b", "c", "d")


def bound_of(limit: int) -> FairBound:
    return FairBound(limit, "things are held", "limits.things")


def taken(bound: FairBound, owner: str, most: int = 10_000, weight: float = 1.0) -> int:
    """How many an owner takes of the `most` that it wants."""
    count = 0
    while count < most and bound.take(owner, weight, 1):
        count += 1
    return count


class SharedBound(RuleBasedStateMachine):
    """Owners take and give back in any order."""

    @initialize(limit=st.integers(1, 200), weights=st.tuples(*[st.floats(0.1, 10)] * len(OWNERS)))
    def begin(self, limit: int, weights: tuple[float, ...]) -> None:
        self.bound, self.weights = bound_of(limit), dict(zip(OWNERS, weights, strict=True))
        self.held = dict.fromkeys(OWNERS, 0)

    def most(self, owner: str) -> float:
        """The owner's share among those that hold something."""
        active = sum(self.weights[one] for one in OWNERS[1:] if self.held[one] or one == owner)
        return self.bound.limit * self.weights[owner] / active

    @rule(owner=st.sampled_from(OWNERS), amount=st.integers(1, 60))
    def take(self, owner: str, amount: int) -> None:
        free = self.bound.limit - self.bound.used
        could = self.bound.has_room(owner, self.weights[owner], amount)
        assert could == self.bound.take(owner, self.weights[owner], amount)
        alone = sum(self.held.values()) == self.held[owner]
        if amount <= free and (alone or not owner or self.held[owner] + amount <= self.most(owner)):
            assert could, "there was room, and it was the owner's"
        if could:
            self.held[owner] += amount

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from([one for one in OWNERS if self.held[one]]))
        amount = data.draw(st.integers(1, self.held[owner]))
        self.bound.give_back(owner, amount)
        self.held[owner] -= amount

    @invariant()
    def the_amounts_add_up(self) -> None:
        if hasattr(self, "bound"):
            assert self.bound.used == sum(self.held.values()) <= self.bound.limit + -(-self.bound.limit // KEPT_PART)
            for owner in OWNERS[1:]:
                assert self.bound.part(owner) == pytest.approx(self.held[owner] / self.weights[owner])

    def teardown(self) -> None:
        if hasattr(self, "bound"):
            for owner, amount in self.held.items():
                if amount:
                    self.bound.give_back(owner, amount)
            assert self.bound.used == 0 and not self.bound._holdings and self.bound._weight == 0.0


TestSharedBound = SharedBound.TestCase
TestSharedBound.settings = settings(stateful_step_count=40)


@given(
    limit=st.integers(16, 100),
    weights=st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=2, max_size=5),
    order=st.randoms(use_true_random=False),
)
def test_whoever_wants_its_share_gets_it_when_the_others_end_what_they_have(
    limit: int, weights: list[float], order: object
) -> None:
    """One owner has taken all. All want everything, and hold long; after each end, they ask in any order."""
    bound, names = bound_of(limit), [f"tenant {at}" for at in range(len(weights))]
    held = dict.fromkeys(names, 0)
    held[names[0]] = taken(bound, names[0], weight=weights[0])
    assert held[names[0]] == limit
    for _ in range(20 * limit):
        asked = list(zip(names, weights, strict=True))
        order.shuffle(asked)  # type: ignore[attr-defined]
        for name, weight in asked:
            held[name] += taken(bound, name, 2, weight)
        leaving = order.choice([name for name in names if held[name]])  # type: ignore[attr-defined]
        bound.give_back(leaving, 1)
        held[leaving] -= 1
        if all(held[name] >= 0.8 * limit * weight / sum(weights) - 2 for name, weight in asked):
            return
    raise AssertionError(f"{held} of {limit} by {weights}")


def test_one_owner_alone_may_take_everything() -> None:
    bound = bound_of(100)
    assert taken(bound, "a") == 100
    assert isinstance(bound.refusal("a", 1.0), Saturated)


@pytest.mark.parametrize("limit", [1, 2, 8, 8192])
def test_a_second_owner_gets_some_of_a_limit_that_the_first_holds(limit: int) -> None:
    """Which gets no more until it holds no more than its share. Several in a row get some."""
    bound = bound_of(limit)
    taken(bound, "a")
    assert bound.take("b", 1.0, 1)
    assert not bound.take("a", 1.0, 1)
    bound.give_back("a", 1)
    if limit < 16:
        return  # now it holds no more than its share
    assert isinstance(bound.refusal("a", 1.0), ShareExceeded)
    assert not bound.take("a", 1.0, 1)
    if limit == 8192:
        for other in "cdefgh":
            assert taken(bound, other) > 1


def test_weights_divide_a_limit() -> None:
    bound = bound_of(800)
    taken(bound, "heavy", 700, 3.0)
    assert taken(bound, "light", weight=1.0) == 100
    while bound.used > 0 and bound.part("heavy") > 200:
        bound.give_back("heavy", 1)
        taken(bound, "heavy", 1, 3.0)
        taken(bound, "light", 1, 1.0)
    assert bound.part("heavy") == 200 and bound.part("light") == 200


def test_while_there_is_room_nobody_is_refused() -> None:
    """However much one holds."""
    bound = bound_of(100)
    taken(bound, "a", 80)
    assert taken(bound, "b", 3) == 3
    assert bound.take("a", 1.0, 1)


def test_clients_behind_a_proxy_that_hides_them_have_no_share_together() -> None:
    """They come first, served first; a known client has its share."""
    bound = bound_of(80)
    assert taken(bound, "") == 80
    assert taken(bound, "known", 3) == 3
    bound.give_back("", 20)
    assert bound.take("", 1.0, 1)


def test_whoever_has_more_for_its_weight_yields_at_once() -> None:
    """Others yield what is slow, unless they have less. Unknown ones, who have no share, get only what is slow."""
    bound = bound_of(64)
    for owner, weight, amount in (("a", 1.0, 10), ("b", 4.0, 36), ("c", 1.0, 2), ("", 1.0, 5)):
        assert taken(bound, owner, amount, weight) == amount

    def yields(owner: str, weight: float, *, is_slow: bool) -> set[str]:
        return {one for one in ("a", "b", "c", "") if bound.must_yield(one, owner, weight, 1, is_slow=is_slow)}

    for owner, weight, at_once, slow in (
        ("c", 1.0, {"a", "b"}, {"a", "b", "c"}),
        ("b", 4.0, {"a"}, {"a", "b"}),
        ("a", 1.0, set(), {"a"}),
        ("", 1.0, set(), {"a", "b", "c", ""}),
        ("new", 1.0, {"a", "b", "c"}, {"a", "b", "c", ""}),
    ):
        assert yields(owner, weight, is_slow=False) == at_once
        assert yields(owner, weight, is_slow=True) == slow
