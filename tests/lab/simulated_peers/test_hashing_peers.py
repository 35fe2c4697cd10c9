"""The peers that choose by a hash of the prefix."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.simulated_peers.peer_pickers import DualMap, KubeaiChwbl
from router.types import InFlight, Scene
from tests.kit.scenes import prompt, works
from tests.lab.simulated_peers.fleets import BLOCKS, IDLE, TOKENS, busy, chosen, decided, fleet

# --- KubeAI ---


KUBEAI, DUALMAP = "kubeai_chwbl", "dualmap"
EIGHT = "abcdefgh"
loads = st.lists(st.integers(0, 60), min_size=1, max_size=8)


def with_requests(requests: list[int], salt: int = 0) -> Scene:
    return fleet(busy(**dict(zip(EIGHT, requests, strict=False))), prompt=prompt(TOKENS, salt * 10_000))


@given(requests=loads, salt=st.integers(0, 20))
def test_the_bound_holds_if_any_pod_is_within_it(requests: list[int], salt: int) -> None:
    """1.25 times the mean, this request included; the first such pod on the ring of an idle fleet takes it."""
    bound = 1.25 * (sum(requests) + 1) / len(requests)
    ring = [each.pod.id for each in decided(with_requests([0] * len(requests), salt), KUBEAI).candidates]
    within = [name for name in ring if requests[EIGHT.index(name)] + 1 <= bound]
    order = [each.pod.id for each in decided(with_requests(requests, salt), KUBEAI).candidates]
    assert order == [*within, *(name for name in ring if name not in within)]


@pytest.mark.parametrize(("others", "stays"), [((1, 3, 3), True), ((1, 3, 2), False)])
def test_the_request_counts_in_its_own_bound(others: tuple[int, ...], stays: bool) -> None:
    """2 + 1 requests on four pods: within 1.25 * (9 + 1) / 4 = 3.125, above 1.25 * (8 + 1) / 4 = 2.81."""
    ring = EIGHT.index(chosen(with_requests([0] * 4), KUBEAI))
    there = [*others[:ring], 2, *others[ring:]]
    assert (chosen(with_requests(there), KUBEAI) == EIGHT[ring]) is stays


def test_at_low_load_no_pod_is_within_the_bound() -> None:
    """One request on eight pods: 1.25 * 2 / 8 is less than one, so even the busy pod keeps its keys."""
    ring = chosen(with_requests([0] * 8), KUBEAI)
    alone = [int(name == ring) for name in EIGHT]
    assert chosen(with_requests(alone), KUBEAI) == ring
    assert chosen(with_requests([each + 6 * alone[at] for at, each in enumerate(alone)]), KUBEAI) != ring


@given(salt=st.integers(0, 200), pods=st.integers(1, 7))
def test_a_new_pod_takes_keys_only_for_itself(salt: int, pods: int) -> None:
    """No other key moves."""
    before, after = (
        chosen(with_requests([0] * pods, salt), KUBEAI),
        chosen(with_requests([0] * (pods + 1), salt), KUBEAI),
    )
    assert after in (before, EIGHT[pods])


def test_cached_blocks_do_not_count() -> None:
    """Only the key does."""
    idle = busy(a=0, b=0, c=0)
    assert {chosen(fleet(idle, {name: BLOCKS}), KUBEAI) for name in "abc"} == {chosen(fleet(idle), KUBEAI)}


def test_a_larger_factor_spills_later() -> None:
    """At twice the mean the crowded pod keeps its key."""
    ring = chosen(with_requests([0] * 4), KUBEAI)
    crowded = with_requests([5 if name == ring else 3 for name in "abcd"])
    assert chosen(crowded, KUBEAI) != ring
    assert chosen(crowded, KUBEAI, KubeaiChwbl(mean_load_factor=2.0)) == ring


# --- DualMap ---


SIX = "abcdef"


def two_of(salt: int) -> set[str]:
    """The pods that a prompt maps to: the first two of the order, under any load."""
    seen = fleet(dict.fromkeys(SIX, IDLE), prompt=prompt(TOKENS, salt * 10_000))
    return {each.pod.id for each in decided(seen, DUALMAP).candidates[:2]}


def with_work(salt: int, inflight: dict[str, InFlight], held: dict[str, int]) -> Scene:
    return fleet(dict.fromkeys(SIX, IDLE) | inflight, held, prompt=prompt(TOKENS, salt * 10_000))


@given(
    salt=st.integers(0, 30),
    work=st.lists(works, min_size=6, max_size=6),
    held=st.lists(st.integers(0, 100), min_size=6),
)
def test_a_prompt_never_leaves_its_two_pods(salt: int, work: list[InFlight], held: list[int]) -> None:
    """The less loaded of the two wins, unless the other holds more and meets the SLO."""
    there, matches = dict(zip(SIX, work, strict=True)), dict(zip(SIX, held, strict=False))
    decision = decided(with_work(salt, there, matches), DUALMAP)
    winner, loser = decision.candidates[:2]
    assert {winner.pod.id, loser.pod.id} == two_of(salt)

    def load(name: str) -> tuple[float, int]:
        return there[name].prefill_ms, there[name].requests

    in_time = matches[winner.pod.id] > matches[loser.pod.id] and winner.cost.total_ms <= 5_000
    assert in_time or load(winner.pod.id) <= load(loser.pod.id)


def test_prompts_spread_over_all_pods() -> None:
    """Each pod belongs to about as many pairs."""
    mapped = Counter(name for salt in range(300) for name in two_of(salt))
    assert set(mapped) == set(SIX)
    assert max(mapped.values()) < 140


@pytest.mark.parametrize(("queue_ms", "sticks"), [(4_900.0, True), (5_000.0, False)])
def test_the_longer_match_wins_until_the_slo_is_at_risk(queue_ms: float, sticks: bool) -> None:
    """Queue and prefill exceed 5 s; then the idle one of the two takes it."""
    warm, cold = sorted(two_of(3))
    seen = with_work(3, {warm: InFlight(9, 9, prefill_ms=queue_ms)}, {warm: BLOCKS})
    assert chosen(seen, DUALMAP) == (warm if sticks else cold)
    assert chosen(seen, DUALMAP, DualMap(slo_ms=60_000.0)) == warm


@pytest.mark.parametrize("busier", [0, 1])
def test_pods_with_equal_queues_compare_by_requests(busier: int) -> None:
    """A decoding request is work, too."""
    two = sorted(two_of(5))
    seen = with_work(5, {two[busier]: InFlight(2, prefill_ms=3.0), two[1 - busier]: InFlight(1, prefill_ms=3.0)}, {})
    assert chosen(seen, DUALMAP) == two[1 - busier]


def test_a_fleet_of_one_pod_uses_it() -> None:
    """At any load."""
    assert chosen(fleet({"only": InFlight(9, 9, prefill_ms=9e9)}), DUALMAP) == "only"
