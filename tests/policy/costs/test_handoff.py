"""KV on its way to where the answer is decoded."""

from __future__ import annotations

import pytest

from router.policy.costs.until_first_token import HandoffTerm
from router.policy.term import Transfer
from router.types import Link
from tests.kit.scenes import pod
from tests.policy.costs.placements import at


def exposed_ms(layers: int, prefill_ms: float, transfer_ms: float = 42.0) -> float:
    """The cost with a link that needs 2 ms to begin."""
    return HandoffTerm(layers=layers).cost_ms(
        at(handoff=Transfer(pod("p"), Link(2.0, 1e6), 1000, 0, transfer_ms, prefill_ms))
    )


def test_at_once_the_client_waits_for_all_of_it() -> None:
    """One layer of KV is all layers."""
    assert exposed_ms(1, prefill_ms=1000.0) == 42.0


@pytest.mark.parametrize(
    ("prefill_ms", "expected_ms"), [(1000.0, 2.0 + 40.0 / 10), (10.0, 2.0 + 40.0 - 10.0 * 9 / 10), (0.0, 42.0)]
)
def test_layers_sent_during_the_prefill_are_hidden(prefill_ms: float, expected_ms: float) -> None:
    """t0 + T_x / L + max(0, T_x - T) (L - 1) / L, with 40 ms on the way in 10 layers."""
    assert exposed_ms(10, prefill_ms) == pytest.approx(expected_ms)


def test_more_layers_never_cost_more_and_the_start_and_a_layer_are_always_paid() -> None:
    """However many there are."""
    costs_ms = [exposed_ms(layers, prefill_ms=60.0) for layers in (1, 2, 8, 80)]
    assert costs_ms == sorted(costs_ms, reverse=True)
    assert costs_ms[-1] > 2.0


def test_a_request_that_is_served_whole_hands_nothing_over() -> None:
    """Zero."""
    assert HandoffTerm().cost_ms(at()) == 0.0
