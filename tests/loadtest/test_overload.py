"""What is counted in an overload, and the traffic of two tenants."""

from __future__ import annotations

from loadtest.simulator.generate import TrafficMix
from loadtest.simulator.outcome import PodUse, RequestOutcome, Run
from loadtest.studies.overload import NOISY, QUIET, mix_at, overload_of, two_tenants
from router.config.load import load, shipped


def outcome(ttft_ms: float = 0.0, refused: str = "", waited_ms: float = 0.0) -> RequestOutcome:
    return RequestOutcome("any", 500.0, 100, 1, ttft_ms=ttft_ms, e2e_ms=ttft_ms, refused=refused, waited_ms=waited_ms)


def test_requests_within_the_slo_and_late_refusals_are_counted() -> None:
    """Accepted and refused requests are counted apart."""
    outcomes = [outcome(100.0), outcome(9000.0), outcome(refused="fleet"), outcome(refused="fleet", waited_ms=60.0)]
    found = overload_of(Run(outcomes, {"a": PodUse(0, 0, 0.0, 0)}, 1000.0, 0, last_start_ms=1000.0))
    assert (found.accepted, found.accepted_in_slo, found.refused_late) == (0.5, 0.5, 0.5)
    assert round(found.goodput_per_s, 3) == 1.333  # one request in the last three quarters of a second


def test_the_quiet_tenant_sends_the_same_with_any_other_traffic() -> None:
    """In the same seed."""

    def quiet(noisy_per_s: float) -> list[tuple[float, int]]:
        sessions = [one for one in two_tenants(2.0, noisy_per_s, 3).sessions if one.kind == QUIET]
        return [(one.start_s, one.requests[0].prompt_tokens) for one in sessions]

    assert quiet(0.0) == quiet(30.0)
    starts = [(one.start_s, one.kind) for one in two_tenants(2.0, 30.0, 3).sessions]
    assert starts == sorted(starts) and {kind for _, kind in starts} == {QUIET, NOISY}


def test_a_mix_keeps_its_duration_at_any_load() -> None:
    """So that a session may end in it."""
    mix = load(shipped("config") / "traffic" / "mixed.yaml", TrafficMix)
    few, many = (list(mix_at(mix, 300.0, load_factor, 0).sessions) for load_factor in (0.1, 0.4))
    assert 2 < len(many) / len(few) < 8
    assert abs(many[-1].start_s - few[-1].start_s) < 30
