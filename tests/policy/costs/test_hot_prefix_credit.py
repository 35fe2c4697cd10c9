"""Credit for a prefix that all share."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policy.costs.effects import HotPrefixCreditTerm
from router.policy.costs.until_first_token import PrefillTerm
from tests.kit.scenes import speeds
from tests.policy.costs.placements import at


@given(data=st.data(), credit=st.floats(0, 1), speed=speeds, prompt_tokens=st.integers(1, 100_000))
def test_it_never_gives_back_more_than_prefill_took(
    data: st.DataObject, credit: float, speed: object, prompt_tokens: int
) -> None:
    """What the pod lacks of the shared prefix, and no more."""
    shared, cached = (data.draw(st.integers(0, prompt_tokens - 1)) for _ in range(2))
    placement = at(speed=speed, prompt_tokens=prompt_tokens, cached_tokens=cached, shared_tokens=shared)
    given_back = -HotPrefixCreditTerm(credit=credit).cost_ms(placement)
    assert 0 <= given_back <= PrefillTerm().cost_ms(placement)
    if cached >= shared:
        assert given_back == 0


def test_full_credit_makes_a_pod_without_the_shared_prefix_as_good_as_one_with_it() -> None:
    """So that an idle fleet does not send everything to one pod."""
    costs = [
        PrefillTerm().cost_ms(placement) + HotPrefixCreditTerm().cost_ms(placement)
        for placement in (at(shared_tokens=800), at(shared_tokens=800, cached_tokens=800))
    ]
    assert costs[0] == pytest.approx(costs[1])


@pytest.mark.parametrize("credit", [-0.1, 1.1, float("nan")])
def test_a_credit_is_a_share(credit: float) -> None:
    """More than all of it would pay for being cold."""
    with pytest.raises(ValueError, match="credit"):
        HotPrefixCreditTerm(credit=credit)
