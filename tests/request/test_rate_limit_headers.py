"""Limits in the headers of OpenAI's and Anthropic's APIs."""

from __future__ import annotations

from router.admission.quotas import Hold, Quota, Quotas
from router.endpoints import Endpoint
from router.request.quota_charges import limit_headers

NOW_S, UNIX_S = 1000.5, 1_800_000_000.25
LIMITS = (
    Quota(requests_per_minute=10, uncached_prompt_tokens_per_minute=1000, output_tokens_per_minute=100),
    Quota(model="m", requests_per_minute=5),
)


def headers_of(endpoint: Endpoint, limits: tuple[Quota, ...] = LIMITS) -> dict[bytes, bytes]:
    """After one request with 200 uncached prompt tokens and 50 output tokens."""
    quotas = Quotas()
    hold = quotas.begin("t", limits, "m", "", NOW_S)
    assert isinstance(hold, Hold) and quotas.charge(hold, 200, 50, NOW_S) is None
    return dict(limit_headers(endpoint, hold.applied, NOW_S, UNIX_S))


def test_openai_has_requests_and_the_tightest_limit_of_tokens() -> None:
    assert headers_of(Endpoint.CHAT) == {
        b"x-ratelimit-limit-requests": b"5",
        b"x-ratelimit-remaining-requests": b"4",
        b"x-ratelimit-reset-requests": b"1m1s",
        b"x-ratelimit-limit-tokens": b"100",
        b"x-ratelimit-remaining-tokens": b"50",
        b"x-ratelimit-reset-tokens": b"1m1s",
    }


def test_anthropic_has_input_and_output_tokens_and_times_of_day() -> None:
    found = headers_of(Endpoint.MESSAGES)
    assert found[b"anthropic-ratelimit-input-tokens-limit"] == b"1000"
    assert found[b"anthropic-ratelimit-input-tokens-remaining"] == b"800"
    assert found[b"anthropic-ratelimit-output-tokens-remaining"] == b"50"
    assert found[b"anthropic-ratelimit-requests-reset"] == b"2027-01-15T08:01:02Z"
    assert len(found) == 9


def test_a_limit_that_is_not_set_has_no_headers() -> None:
    assert not headers_of(Endpoint.CHAT, (Quota(concurrent_requests=5),))
    assert len(headers_of(Endpoint.CHAT, (Quota(requests_per_minute=5),))) == 3


def test_a_refused_request_sees_when_the_limits_are_whole_again() -> None:
    quotas = Quotas()
    hold = quotas.begin("t", LIMITS, "m", "", NOW_S)
    assert isinstance(hold, Hold)
    for now_s, shown in ((NOW_S, b"1m0.5s"), (NOW_S + 10.25, b"50.25s"), (NOW_S + 100, b"0s")):
        found = dict(limit_headers(Endpoint.CHAT, hold.applied, now_s, UNIX_S, is_refused=True))
        assert found[b"x-ratelimit-reset-requests"] == shown
    found = dict(limit_headers(Endpoint.MESSAGES, hold.applied, NOW_S + 100, UNIX_S, is_refused=True))
    assert found[b"anthropic-ratelimit-requests-reset"] == b"2027-01-15T08:00:01Z"
