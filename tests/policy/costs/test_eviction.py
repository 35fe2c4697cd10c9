"""KV that has to go."""

from __future__ import annotations

import pytest

from router.policy.costs.effects import EvictionTerm
from router.policy.term import Transfer
from router.types import Link
from tests.kit.scenes import pod
from tests.policy.costs.placements import at


def test_what_the_pod_does_not_hold_pushes_out_as_much() -> None:
    """reuse * c1 * (n - own), by hand: half of 600 tokens of 0.02 ms."""
    assert EvictionTerm(reuse=0.5).cost_ms(at(prompt_tokens=1000, cached_tokens=400)) == pytest.approx(6.0)


def test_a_pulled_copy_needs_space_as_well() -> None:
    """Only what the pod holds itself is there already."""
    pulling = at(cached_tokens=900, own_tokens=400, pull=Transfer(pod("holder"), Link(1.0, 1e6), 500, 0, 5.0))
    assert EvictionTerm(reuse=0.5).cost_ms(pulling) == EvictionTerm(reuse=0.5).cost_ms(at(cached_tokens=400))


def test_a_prefix_of_all_traffic_costs_no_pod() -> None:
    """Every pod needs space for it once; a pod that holds more of the prompt has no advantage from it."""
    term = EvictionTerm(reuse=1.0)
    assert term.cost_ms(at(shared_tokens=800)) == term.cost_ms(at(shared_tokens=800, cached_tokens=800))
    assert term.cost_ms(at(shared_tokens=800, cached_tokens=900)) == term.cost_ms(at(cached_tokens=900))


@pytest.mark.parametrize("reuse", [-0.1, float("nan"), float("inf")])
def test_reuse_is_not_negative(reuse: float) -> None:
    """And nobody for ever."""
    with pytest.raises(ValueError, match="reuse"):
        EvictionTerm(reuse=reuse)
