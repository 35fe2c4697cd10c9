"""A measured fleet against the simulator: records that were not measured."""

from __future__ import annotations

import json
from itertools import count
from typing import Any

import pytest

from loadtest.commands.mock_engine_command import mock_tokenizer
from loadtest.gpu.fleet import answer_options
from loadtest.gpu.fleet_record import MeasuredFleet, MeasuredRequest, read_fleet
from loadtest.gpu.simulated import MeasuredPod, cached_tokens, expected_times, figures, route_ms, simulate
from router.types import PodSpeed

BLOCK_TOKENS = 16
PROMPT_TOKENS = 1000
OUTPUT_TOKENS = 10
SPEED = PodSpeed(5.0, 0.05, 0.0, 5.0)
POD = MeasuredPod(speed=SPEED, kv_tokens=100_000, route_ms=2.0, overhead_ms=3.0)


def request(number: int, blocks: list[int], **known: Any) -> dict[str, Any]:
    """Sent long after the one before it. Its prefill is expected to take twice the time."""
    return {
        "kind": "chat",
        "sent_s": 10.0 * number,
        "late_ms": 0.0,
        "pod": "pod-0",
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
        "cached_tokens": 0,
        "predicted_cached_tokens": 0,
        "ttft_ms": 60.0,
        "e2e_ms": 105.0,
        "expected_ttft_ms": 100.0,
        "router_ttft_ms": 50.0,
        "router_phases_ms": {"decide": 0.2},
        "tokens_agree": True,
        "blocks": blocks,
        **known,
    }


def fleet_of(requests: list[dict[str, Any]], pods: int = 1) -> MeasuredFleet:
    """A record that was written and read again."""
    record = {
        "pods": pods,
        "plan": {"policy": "cost_aware"},
        "prior": {"c0_ms": 0.0, "c1_ms_per_token": 0.02, "c2_ms_per_token2": 0.0},
        "block_size_tokens": BLOCK_TOKENS,
        "caches_cleared": True,
        "planned_requests": len(requests),
        "unfinished_sessions": 0,
        "error": "",
        "request_errors": {},
        "calibration": {},
        "requests": requests,
    }
    return read_fleet(json.loads(json.dumps(record)))


def new_blocks(numbers: count[int]) -> list[int]:
    """Those of a prompt and its answer."""
    return [next(numbers) for _ in range((PROMPT_TOKENS + OUTPUT_TOKENS - 1) // BLOCK_TOKENS)]


@pytest.mark.parametrize("pods", [1, 2])
def test_requests_that_share_nothing_take_their_prefill_alone(pods: int) -> None:
    numbers = count()
    fleet = fleet_of([request(number, new_blocks(numbers)) for number in range(5)], pods)
    found = figures(simulate(fleet, POD))
    expected_ms = POD.route_ms + SPEED.prefill_ms(PROMPT_TOKENS) + POD.overhead_ms
    assert found.requests == 5
    assert found.ttft_mean_ms == pytest.approx(expected_ms)
    assert found.ttft_p99_ms == pytest.approx(expected_ms)
    assert found.e2e_mean_ms == pytest.approx(expected_ms + (OUTPUT_TOKENS - 1) * SPEED.d0_ms)
    assert found.hit_share == 0.0


def test_a_repeated_prompt_is_cached_up_to_its_last_token() -> None:
    blocks = new_blocks(count())
    outcomes = simulate(fleet_of([request(0, blocks), request(1, blocks)]), POD)
    assert [one.cached_tokens for one in outcomes] == [0, 992]


def test_outcomes_are_in_the_order_of_the_requests() -> None:
    numbers = count()
    requests = [request(number, new_blocks(numbers), output_tokens=number + 2) for number in range(20)]
    outcomes = simulate(fleet_of([one | {"sent_s": at / 100} for at, one in enumerate(requests)]), POD)
    assert [one.output_tokens for one in outcomes] == [one["output_tokens"] for one in requests]


def test_expected_times_are_compared_in_windows() -> None:
    requests = fleet_of([request(number, []) for number in range(210)]).requests
    first, middle, last = expected_times(requests)
    assert [(row.first, row.last) for row in (first, middle, last)] == [(1, 50), (51, 200), (201, 210)]
    assert (first.expected_mean_ms, first.actual_mean_ms, first.mean_absolute_error_ms) == (100.0, 50.0, 50.0)
    assert (first.error_per_request, first.error_of_the_mean) == (1.0, 1.0)


def test_errors_of_single_requests_may_cancel_out_in_the_mean() -> None:
    requests = fleet_of([request(0, [], expected_ttft_ms=25.0), request(1, [], expected_ttft_ms=75.0)]).requests
    (row,) = expected_times(requests)
    assert (row.mean_absolute_error_ms, row.error_of_the_mean) == (25.0, 0.0)


def test_requests_without_a_receipt_are_left_out() -> None:
    assert expected_times(fleet_of([request(0, [], expected_ttft_ms=None)]).requests) == []


def test_cached_tokens_are_compared_one_by_one() -> None:
    requests: list[MeasuredRequest] = fleet_of(
        [
            request(0, [], predicted_cached_tokens=160, cached_tokens=160),
            request(1, [], predicted_cached_tokens=160, cached_tokens=144),
            request(2, [], predicted_cached_tokens=None, cached_tokens=144),
        ]
    ).requests
    found = cached_tokens(requests)
    assert (found.requests, found.exact_share) == (2, 0.5)
    assert (found.predicted_tokens, found.reported_tokens) == (320, 304)


def test_the_way_through_the_router_is_what_the_pod_does_not_take() -> None:
    phases_ms = {"admit": 0.5, "fingerprint": 1.0, "match": 0.25, "decide": 0.25, "attempt": 9.0, "relay": 40.0}
    assert route_ms(fleet_of([request(0, [], router_phases_ms=phases_ms)]).requests) == 12.0


def test_answers_have_the_same_tokens_when_they_are_read_again() -> None:
    tokenizer = mock_tokenizer()
    (token,) = answer_options(tokenizer)["allowed_token_ids"]
    assert list(tokenizer.encode("<｜Assistant｜>" + " the" * 20)[1:]) == [token] * 20
