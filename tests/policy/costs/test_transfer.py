"""KV that comes from a peer."""

from __future__ import annotations

import pytest

from router.policy.costs.until_first_token import TransferTerm
from router.policy.term import Placement, Transfer
from router.types import InFlight, Link
from tests.kit.scenes import pod
from tests.policy.costs.placements import at


def pulling(transfer_ms: float, **facts: object) -> Placement:
    return at(pull=Transfer(pod("holder"), Link(5.0, 1e6), 1000, 0, transfer_ms), **facts)


def test_an_idle_pod_waits_for_all_of_it() -> None:
    """It has nothing to do meanwhile."""
    assert TransferTerm().cost_ms(pulling(40.0)) == 40.0


@pytest.mark.parametrize(("queue_ms", "expected_ms"), [(15.0, 25.0), (40.0, 0.0), (500.0, 0.0)])
def test_what_travels_while_the_pod_works_on_others_is_not_waited_for(queue_ms: float, expected_ms: float) -> None:
    """max(0, T_x - queue)."""
    busy = InFlight(1, 1, prefill_ms=queue_ms)
    assert TransferTerm().cost_ms(pulling(40.0, inflight=busy)) == pytest.approx(expected_ms)


def test_only_what_is_left_of_the_queue_hides_it() -> None:
    """1 ms for the step and 30 of prefill, of which 20 are done."""
    busy = InFlight(1, 1, prefill_ms=30.0, head_ms=30.0, head_since_s=7.0)
    assert TransferTerm().cost_ms(pulling(40.0, inflight=busy, now_s=7.02)) == pytest.approx(29.0)


def test_without_a_pull_there_is_nothing_to_wait_for() -> None:
    """Zero."""
    assert TransferTerm().cost_ms(at()) == 0.0
