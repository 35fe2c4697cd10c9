"""Two fixed pods for each prefix."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.sim.peers.peer_pickers import DualMap
from router.types import InFlight, Scene
from tests.policy.scenes import prompt, works
from tests.sim.peers.fleets import BLOCKS, IDLE, TOKENS, chosen, decided, fleet

NAME = "dualmap"
NAMES = "abcdef"


def two_of(salt: int) -> set[str]:
    """The pods that a prompt maps to: the first two of the order, under any load."""
    seen = fleet(dict.fromkeys(NAMES, IDLE), prompt=prompt(TOKENS, salt * 10_000))
    return {each.pod.id for each in decided(seen, NAME).candidates[:2]}


def asking(salt: int, inflight: dict[str, InFlight], held: dict[str, int]) -> Scene:
    return fleet(dict.fromkeys(NAMES, IDLE) | inflight, held, prompt=prompt(TOKENS, salt * 10_000))


@settings(max_examples=60)
@given(
    salt=st.integers(0, 30),
    work=st.lists(works, min_size=6, max_size=6),
    held=st.lists(st.integers(0, 100), min_size=6),
)
def test_a_prompt_never_leaves_its_two_pods(salt: int, work: list[InFlight], held: list[int]) -> None:
    """The less loaded of the two wins, unless the other holds more and meets the SLO."""
    there, matches = dict(zip(NAMES, work, strict=True)), dict(zip(NAMES, held, strict=False))
    decision = decided(asking(salt, there, matches), NAME)
    winner, loser = decision.candidates[:2]
    assert {winner.pod.id, loser.pod.id} == two_of(salt)

    def load(name: str) -> tuple[float, int]:
        return there[name].prefill_ms, there[name].requests

    in_time = matches[winner.pod.id] > matches[loser.pod.id] and winner.cost.total_ms <= 5_000
    assert in_time or load(winner.pod.id) <= load(loser.pod.id)


def test_prompts_spread_over_all_pods() -> None:
    """Each pod belongs to about as many pairs."""
    mapped = Counter(name for salt in range(300) for name in two_of(salt))
    assert set(mapped) == set(NAMES)
    assert max(mapped.values()) < 140


@pytest.mark.parametrize(("queue_ms", "sticks"), [(4_900.0, True), (5_000.0, False)])
def test_the_longer_match_wins_until_the_slo_is_at_risk(queue_ms: float, sticks: bool) -> None:
    """Queue and prefill exceed 5 s; then the idle one of the two takes it."""
    warm, cold = sorted(two_of(3))
    seen = asking(3, {warm: InFlight(9, 9, prefill_ms=queue_ms)}, {warm: BLOCKS})
    assert chosen(seen, NAME) == (warm if sticks else cold)
    assert chosen(seen, NAME, DualMap(slo_ms=60_000.0)) == warm


@pytest.mark.parametrize("busier", [0, 1])
def test_pods_with_equal_queues_compare_by_requests(busier: int) -> None:
    """A decoding request is work, too."""
    two = sorted(two_of(5))
    seen = asking(5, {two[busier]: InFlight(2, prefill_ms=3.0), two[1 - busier]: InFlight(1, prefill_ms=3.0)}, {})
    assert chosen(seen, NAME) == two[1 - busier]


def test_a_fleet_of_one_pod_uses_it() -> None:
    """At any load."""
    assert chosen(fleet({"only": InFlight(9, 9, prefill_ms=9e9)}), NAME) == "only"
