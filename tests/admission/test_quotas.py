"""A tenant uses what its quotas allow: no more, and what requests really cost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.admission.meter import Dimension
from router.admission.quotas import Hold, Quota, Quotas, Short

NOW_S = 1000.25


def begun(quotas: Quotas, limits: tuple[Quota, ...], now_s: float = NOW_S, model: str = "m", adapter: str = "") -> Hold:
    found = quotas.begin("tenant", limits, model, adapter, now_s)
    assert isinstance(found, Hold), found
    return found


def refused(quotas: Quotas, limits: tuple[Quota, ...], now_s: float = NOW_S, model: str = "m") -> Short:
    found = quotas.begin("tenant", limits, model, "", now_s)
    assert isinstance(found, Short), found
    return found


def test_requests_are_refused_above_the_limit_until_a_minute_has_passed() -> None:
    quotas, limits = Quotas(), (Quota(requests_per_minute=2),)
    for _ in range(2):
        quotas.end(begun(quotas, limits), None, None, NOW_S)
    short = refused(quotas, limits)
    assert (short.dimension, short.limit, short.remaining, short.may_fit) == (Dimension.REQUESTS, 2, 0, False)
    assert short.retry_after_s == 60.75
    assert isinstance(quotas.begin("tenant", limits, "m", "", NOW_S + 60.7), Short)
    begun(quotas, limits, NOW_S + short.retry_after_s)


def test_tenants_do_not_share_a_quota() -> None:
    quotas, limits = Quotas(), (Quota(requests_per_minute=1),)
    begun(quotas, limits)
    refused(quotas, limits)
    assert isinstance(quotas.begin("other", limits, "m", "", NOW_S), Hold)


def test_a_request_that_has_ended_makes_place_for_another() -> None:
    quotas, limits = Quotas(), (Quota(concurrent_requests=1),)
    hold = begun(quotas, limits)
    assert refused(quotas, limits).dimension is Dimension.CONCURRENT
    quotas.end(hold, None, None, NOW_S)
    quotas.end(hold, None, None, NOW_S)
    begun(quotas, limits)
    refused(quotas, limits)


def test_a_request_is_concurrent_from_its_first_byte() -> None:
    """Before its model is known."""
    quotas, limits = Quotas(), (Quota(concurrent_requests=1),)
    hold = quotas.receive("tenant", limits, NOW_S)
    assert isinstance(hold, Hold)
    assert isinstance(quotas.receive("tenant", limits, NOW_S), Short)
    quotas.end(hold, 0, 0, NOW_S)
    assert isinstance(quotas.receive("tenant", limits, NOW_S), Hold)


def test_of_several_limits_for_the_same_the_lowest_counts() -> None:
    """Each request counts once."""
    for limits in (Quota(requests_per_minute=2), Quota(requests_per_minute=9)), (Quota(requests_per_minute=2),) * 2:
        quotas = Quotas()
        begun(quotas, limits)
        begun(quotas, limits)
        assert refused(quotas, limits).limit == 2


def test_a_model_has_its_own_quota_besides_that_for_all_together() -> None:
    """An adapter may be named, too."""
    quotas = Quotas()
    limits = (Quota(requests_per_minute=3), Quota(model="m", requests_per_minute=1), Quota(model="a"))
    begun(quotas, limits)
    assert refused(quotas, limits).limit == 1
    begun(quotas, limits, model="n")
    begun(quotas, limits, model="n", adapter="a")
    assert refused(quotas, limits, model="n").limit == 3


def test_a_quota_for_all_models_is_spent_before_a_request_is_read() -> None:
    """Not by that of one model or by tokens: which model a request needs, and what is cached, is in its body."""
    all_models, one_model = Quota(requests_per_minute=2), Quota(model="m", requests_per_minute=1)
    limits, quotas = (all_models, one_model, Quota(output_tokens_per_minute=1)), Quotas()
    for model in ("m", "n"):
        assert isinstance(quotas.receive("tenant", limits, NOW_S), Hold)
        hold = begun(quotas, limits, model=model)
        quotas.charge(hold, 0, 1, NOW_S)
    spent = quotas.receive("tenant", limits, NOW_S)
    assert isinstance(spent, Short) and (spent.limit, spent.is_tokens) == (2, False)
    assert isinstance(quotas.receive("tenant", limits, NOW_S + 61), Hold)


def test_tokens_are_charged_when_their_number_is_known() -> None:
    quotas, limits = Quotas(), (Quota(uncached_prompt_tokens_per_minute=100),)
    assert quotas.charge(begun(quotas, limits), 60, 0, NOW_S) is None
    hold = begun(quotas, limits)
    short = quotas.charge(hold, 41, 0, NOW_S + 1)
    assert short is not None and (short.remaining, short.amount) == (40, 41)
    assert quotas.charge(hold, 40, 0, NOW_S + 1) is None


def test_while_a_limit_of_tokens_is_reached_prompts_are_not_read() -> None:
    """After the first request that did not fit."""
    quotas, limits = Quotas(), (Quota(uncached_prompt_tokens_per_minute=100),)
    assert quotas.charge(begun(quotas, limits), 100, 0, NOW_S) is None
    assert quotas.charge(begun(quotas, limits), 1, 0, NOW_S) is not None
    assert refused(quotas, limits).dimension is Dimension.PROMPT
    assert quotas.charge(begun(quotas, limits, NOW_S + 61), 1, 0, NOW_S + 61) is None
    begun(quotas, limits, NOW_S + 61)


def test_a_request_whose_tokens_do_not_fit_costs_no_tokens() -> None:
    limits = (Quota(concurrent_requests=1, uncached_prompt_tokens_per_minute=10),)
    quotas = Quotas()
    hold = begun(quotas, limits)
    assert quotas.charge(hold, 11, 5, NOW_S) is not None
    for _ in range(2):
        quotas.end(hold, 0, 0, NOW_S)
    assert quotas.charge(begun(quotas, limits), 10, 5, NOW_S) is None


def test_a_prompt_above_the_limit_never_fits() -> None:
    quotas, limits = Quotas(), (Quota(uncached_prompt_tokens_per_minute=100),)
    short = quotas.charge(begun(quotas, limits), 101, 0, NOW_S)
    assert short is not None and short.retry_after_s is None


def test_the_real_cost_replaces_the_expected_one() -> None:
    """Less is taken back where it was counted; more counts when the request ends."""
    limits = (Quota(uncached_prompt_tokens_per_minute=100, output_tokens_per_minute=1000),)
    for prompt, output, used in ((20, 300, [20, 300]), (90, 800, [90, 800]), (None, None, [60, 256])):
        quotas = Quotas()
        hold = begun(quotas, limits)
        quotas.charge(hold, 60, 256, NOW_S)
        quotas.end(hold, prompt, output, NOW_S + 30)
        assert [meter.used(int(NOW_S) + 30) for meter in hold.applied.tokens] == used


def test_an_answer_expected_to_exceed_a_limit_is_not_refused_for_ever() -> None:
    """Its length is known at its end. It takes the whole limit until then."""
    quotas, limits = Quotas(), (Quota(model="m", output_tokens_per_minute=100), Quota(output_tokens_per_minute=500))
    hold = begun(quotas, limits)
    assert quotas.charge(hold, 0, 4000, NOW_S) is None
    assert quotas.charge(begun(quotas, limits), 0, 4000, NOW_S) is not None
    quotas.end(hold, 0, 30, NOW_S)
    assert [meter.used(int(NOW_S)) for meter in hold.applied.output] == [30, 30]


def test_new_limits_keep_what_was_counted() -> None:
    quotas = Quotas()
    for _ in range(3):
        begun(quotas, limits := (Quota(requests_per_minute=3),))
    refused(quotas, limits)
    begun(quotas, (Quota(requests_per_minute=4),))
    refused(quotas, (Quota(requests_per_minute=2),))


@given(
    st.lists(st.tuples(st.floats(0, 20), st.integers(0, 60), st.integers(0, 60), st.floats(0, 90)), max_size=40),
    st.integers(1, 100),
)
def test_expected_costs_never_exceed_the_limit_in_any_minute(
    requests: list[tuple[float, int, int, float]], limit: int
) -> None:
    """Where requests cost no more than expected."""
    quotas, limits, now_s = Quotas(), (Quota(uncached_prompt_tokens_per_minute=limit),), NOW_S
    charged: list[tuple[float, int]] = []
    for wait_s, expected, saved, lasts_s in requests:
        now_s += wait_s
        hold = quotas.begin("tenant", limits, "m", "", now_s)
        if isinstance(hold, Short):
            continue
        if quotas.charge(hold, expected, 0, now_s) is not None:
            quotas.end(hold, 0, 0, now_s)
            continue
        quotas.end(hold, max(0, expected - saved), 0, now_s + lasts_s)
        charged.append((now_s, max(0, expected - saved)))
    for begin_s, _ in charged:
        assert sum(amount for at_s, amount in charged if begin_s <= at_s < begin_s + 60) <= limit
