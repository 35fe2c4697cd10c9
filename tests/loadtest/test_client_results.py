"""Result files of established clients are converted to rows."""

from __future__ import annotations

import json
from typing import Any

from loadtest.fleets.clients import (
    CLIENTS,
    aiperf_rows,
    guidellm_rows,
    vllm_rows,
)


def aiperf_line(credit_ms: int, start_ms: int, end_ms: int, error: Any = None, **metrics: float) -> bytes:
    when = {"credit_issued_ns": credit_ms, "request_start_ns": start_ms, "request_end_ns": end_ms}
    record: dict[str, Any] = {
        "metadata": {name: 10**15 + at_ms * 10**6 for name, at_ms in when.items()},
        "metrics": {name: {"value": value, "unit": "x"} for name, value in metrics.items()},
    }
    return json.dumps(record | ({"error": error} if error else {})).encode()


def test_aiperf_requests_are_due_when_their_credit_is_issued() -> None:
    """Its TTFT counts from the send, so the lateness is added. Rows are ordered by due time."""
    metrics = {
        "time_to_first_token": 90.0,
        "usage_prompt_tokens": 600,
        "usage_prompt_cache_read_tokens": 512,
        "usage_completion_tokens": 3,
    }
    lines = [aiperf_line(2000, 2010, 2300, **metrics), aiperf_line(1000, 1000, 1200, **metrics)]
    first, second = aiperf_rows(b"\n".join(lines))
    assert (first.due_s, first.late_ms, first.ttft_ms, first.e2e_ms) == (0.0, 0.0, 90.0, 200.0)
    assert (second.due_s, second.late_ms, second.ttft_ms, second.e2e_ms) == (1.0, 10.0, 100.0, 300.0)
    assert (first.prompt_tokens, first.cached_tokens, first.output_tokens, first.error) == (600, 512, 3, "")


def test_a_failed_aiperf_request_has_its_error_and_no_metrics() -> None:
    (row,) = aiperf_rows(aiperf_line(0, 0, 5, error={"code": 503, "message": "busy"}))
    assert row.ttft_ms is None
    assert "busy" in row.error
    assert row.prompt_tokens == 0


def test_vllm_columns_become_rows_ordered_by_start() -> None:
    """Seconds become milliseconds; a failed request has no first token."""
    saved = {
        "start_times": [101.0, 100.0],
        "ttfts": [0.05, 0.0],
        "latencies": [0.3, 0.1],
        "input_lens": [579, 578],
        "output_lens": [16, 0],
        "errors": ["", "Service Unavailable"],
    }
    first, second = vllm_rows(json.dumps(saved).encode())
    assert (first.due_s, first.ttft_ms, first.error) == (0.0, None, "Service Unavailable")
    assert (second.due_s, second.ttft_ms, second.e2e_ms, second.output_tokens) == (1.0, 50.0, 300.0, 16)
    assert not CLIENTS["vllm"].reports_cached


def guidellm_request(start_s: float, delay_s: float) -> dict[str, Any]:
    return {
        "request_start_time": start_s,
        "request_dispatch_delay": delay_s,
        "request_latency": 0.2,
        "time_to_first_token_ms": 25.0,
        "prompt_tokens": 203,
        "cached_tokens": None,
        "output_tokens": 12,
    }


def test_the_guidellm_dispatch_delay_is_its_lateness() -> None:
    """A request was due this long before it started."""
    found = {
        "successful": [guidellm_request(1000.5, 0.5)],
        "errored": [guidellm_request(1001.0, 0.0)],
        "incomplete": [],
    }
    first, second = guidellm_rows(json.dumps({"benchmarks": [{"requests": found}]}).encode())
    assert (first.due_s, first.late_ms, first.ttft_ms, first.e2e_ms) == (0.0, 500.0, 525.0, 700.0)
    assert (second.due_s, second.cached_tokens) == (1.0, 0)
    assert "errored" in second.error
