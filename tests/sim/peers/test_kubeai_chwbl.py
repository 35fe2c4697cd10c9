"""Bounded loads on KubeAI's ring."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.sim.peers.peer_pickers import KubeaiChwbl
from router.types import Scene
from tests.policy.scenes import prompt
from tests.sim.peers.fleets import BLOCKS, TOKENS, busy, chosen, decided, fleet

NAME = "kubeai_chwbl"
NAMES = "abcdefgh"
loads = st.lists(st.integers(0, 60), min_size=1, max_size=8)


def asking(requests: list[int], salt: int = 0) -> Scene:
    return fleet(busy(**dict(zip(NAMES, requests, strict=False))), prompt=prompt(TOKENS, salt * 10_000))


@settings(max_examples=80)
@given(requests=loads, salt=st.integers(0, 20))
def test_the_bound_holds_if_any_pod_is_within_it(requests: list[int], salt: int) -> None:
    """1.25 times the mean, this request included; the first such pod on the ring of an idle fleet takes it."""
    bound = 1.25 * (sum(requests) + 1) / len(requests)
    ring = [each.pod.id for each in decided(asking([0] * len(requests), salt), NAME).candidates]
    within = [name for name in ring if requests[NAMES.index(name)] + 1 <= bound]
    order = [each.pod.id for each in decided(asking(requests, salt), NAME).candidates]
    assert order == [*within, *(name for name in ring if name not in within)]


@pytest.mark.parametrize(("others", "stays"), [((1, 3, 3), True), ((1, 3, 2), False)])
def test_the_request_counts_in_its_own_bound(others: tuple[int, ...], stays: bool) -> None:
    """2 + 1 requests on four pods: within 1.25 * (9 + 1) / 4 = 3.125, above 1.25 * (8 + 1) / 4 = 2.81."""
    ring = NAMES.index(chosen(asking([0] * 4), NAME))
    there = [*others[:ring], 2, *others[ring:]]
    assert (chosen(asking(there), NAME) == NAMES[ring]) is stays


def test_at_low_load_no_pod_is_within_the_bound() -> None:
    """One request on eight pods: 1.25 * 2 / 8 is less than one, so even the busy pod keeps its keys."""
    ring = chosen(asking([0] * 8), NAME)
    alone = [int(name == ring) for name in NAMES]
    assert chosen(asking(alone), NAME) == ring
    assert chosen(asking([each + 6 * alone[at] for at, each in enumerate(alone)]), NAME) != ring


@settings(max_examples=40)
@given(salt=st.integers(0, 200), pods=st.integers(1, 7))
def test_a_new_pod_takes_keys_only_for_itself(salt: int, pods: int) -> None:
    """No other key moves."""
    before, after = chosen(asking([0] * pods, salt), NAME), chosen(asking([0] * (pods + 1), salt), NAME)
    assert after in (before, NAMES[pods])


def test_cached_blocks_do_not_count() -> None:
    """Only the key does."""
    idle = busy(a=0, b=0, c=0)
    assert {chosen(fleet(idle, {name: BLOCKS}), NAME) for name in "abc"} == {chosen(fleet(idle), NAME)}


def test_a_larger_factor_spills_later() -> None:
    """At twice the mean the crowded pod keeps its key."""
    ring = chosen(asking([0] * 4), NAME)
    crowded = asking([5 if name == ring else 3 for name in "abcd"])
    assert chosen(crowded, NAME) != ring
    assert chosen(crowded, NAME, KubeaiChwbl(mean_load_factor=2.0)) == ring
