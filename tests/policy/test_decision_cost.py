"""What a decision costs, in function calls, which can be counted exactly. Times: `tests/bench/policy_bench.py`."""

from __future__ import annotations

import sys
from types import FrameType

import pytest

from router.policy.decide import decide
from router.policy.spec import Policy
from tests.bench.policy_bench import fleet, scenes
from tests.kit.scenes import POLICIES

PODS = 100
MAX_CALLS_PER_POD = 60
"""The dearest of the peers' formulas makes 39, cost_aware 9."""


def calls_per_decision(policy: Policy, decisions: int = 12) -> float:
    """Calls of Python and C functions, after the first decision, which fills caches."""
    first, *others = scenes(fleet(PODS, policy), decisions)
    decide(first, policy)
    calls = 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    for seen in others:
        sys.setprofile(count)
        try:
            decide(seen, policy)
        finally:
            sys.setprofile(None)
    return calls / len(others)


@pytest.mark.parametrize("name", POLICIES)
def test_a_decision_makes_a_few_calls_for_each_pod(name: str) -> None:
    """Also with a new snapshot of the fleet, and with pods in another order of prices than the time before."""
    assert 0 < calls_per_decision(POLICIES[name]) < MAX_CALLS_PER_POD * PODS
