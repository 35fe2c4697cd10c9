"""What the router would have expected of a recorded fleet: records that were not measured."""

from __future__ import annotations

import pytest

from loadtest.gpu.replayed import Replay
from tests.loadtest.test_gpu_simulated import PROMPT_TOKENS, fleet_of, request

PRIOR_MS = 0.02 * PROMPT_TOKENS
"""By the prior of `fleet_of`."""


def test_a_first_token_is_expected_by_the_prior_and_then_as_learnt() -> None:
    """Each request meets an idle pod that takes three times as long."""
    actual_ms = 3 * PRIOR_MS
    times = Replay(fleet_of([request(number, [], router_ttft_ms=0.2 + actual_ms) for number in range(60)])).run()
    assert times[0] == pytest.approx((PRIOR_MS, actual_ms))
    assert times[-1] == pytest.approx((actual_ms, actual_ms), rel=0.1)


def test_cached_tokens_are_not_expected_to_be_computed() -> None:
    [(expected_ms, _)] = Replay(fleet_of([request(0, [], cached_tokens=800)])).run()
    assert expected_ms == pytest.approx(0.02 * 200)
