"""What two tenants send over HTTP, and how their runs are compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.commands.child_processes import FleetPlan
from loadtest.fleets.tenant_fairness import KEYS, NOISY, QUIET, compare, config_of, sessions_of
from loadtest.traffic.load_driver import RequestResult
from router.admission.tenant import Slo
from router.config.schema import RouterConfig
from router.config.tenant_file import TenantFile


def request(kind: str = QUIET, ttft_s: float = 1.0, status: int = 200, cached_tokens: int = 50) -> RequestResult:
    error = "" if status == 200 else f"status {status}"
    tokens = (100, cached_tokens) if status == 200 else (0, 0)
    return RequestResult(
        kind, {}, 0.0, status=status, ttft_s=ttft_s, error=error, prompt_tokens=tokens[0], cached_tokens=tokens[1]
    )


def test_a_tenant_is_compared_with_itself_alone_and_with_the_other_at_its_share() -> None:
    """As ratios of its times and hits; refused requests have neither."""
    alone = [request(), request()]
    at_share = [request(ttft_s=1.2), request(ttft_s=1.2), request(NOISY)]
    flooded = [request(ttft_s=1.5, cached_tokens=40), request(status=429), request(NOISY), request(NOISY, status=503)]
    rows = compare(1, [alone, at_share, flooded], 8.0, [0.5, 1.0, 2.0]).splitlines()
    assert rows == [
        "| 1 | 0 times its share | 2 | 1.00 | 1.00 | 0.83 | 1.000 | 0.0% |  | 0.3 | 0.000 | 0.00 | 0.5 |",
        "| 1 | 1 times its share | 2 | 1.20 | 1.20 | 1.00 | 1.000 | 0.0% | 0.0% | 0.5 | 0.000 | 0.00 | 1.0 |",
        "| 1 | 20 times its share | 2 | 1.50 | 1.50 | 1.25 | 0.800 | 50.0% | 50.0% | 0.3 | 0.000 | 0.00 | 2.0 |",
    ]


def test_a_request_that_fails_for_another_reason_ends_the_comparison() -> None:
    """It is not a refusal."""
    with pytest.raises(RuntimeError, match="1 requests failed, such as: status 500"):
        compare(1, [[request()], [request()], [request(), request(status=500)]], 8.0, [0.0] * 3)


def test_a_tenant_sends_the_same_in_the_same_round() -> None:
    """And prompts that the other one does not send."""
    first, again, other = (sessions_of(name, 2.0, 5.0, 1) for name in (QUIET, QUIET, NOISY))
    assert first == again and 3 < len(first) < 25
    assert not {one.system for one in first} & {one.system for one in other}


def test_the_router_knows_both_keys(tmp_path: Path) -> None:
    """And has a queue, at the time scale of the engines."""
    plan = FleetPlan(pods=1, num_blocks=100, time_scale=3.0)
    path = tmp_path / "tenants.yaml"
    config = RouterConfig.model_validate(config_of(plan, ["http://127.0.0.1:1"], path))
    assert config.admission is not None and config.models[0].slo == Slo(6000.0, 300.0, 3.0)
    found = [TenantFile(path).read().find(key.encode(), 0.0) for key in KEYS.values()]
    assert [one and one.name for one in found] == list(KEYS)
