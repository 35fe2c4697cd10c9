"""Results of small simulated runs, with given times to first token."""

from __future__ import annotations

from dataclasses import replace

from loadtest.simulator.compare import Result, Setting, summarize
from loadtest.simulator.outcome import PodUse, RequestOutcome, Run
from router.admission.tenant import Slo

SLO = Slo(ttft_ms=100.0, tpot_ms=50.0)
EASY = Setting("", 1.0, 2)


def ran(policy: str, *ttft_ms: float, cached_tokens: int = 50, regret_ms: float = 5.0, at: Setting = EASY) -> Result:
    """A run with these times to first token."""
    outcomes = [
        RequestOutcome("chat", 0.0, 100, 1, cached_tokens=cached_tokens, ttft_ms=ms, e2e_ms=ms, regret_ms=regret_ms)
        for ms in ttft_ms
    ]
    pods = {"a": PodUse(1, 30, 1.0, 0), "b": PodUse(1, 10, 1.0, 0)}
    return summarize(replace(at, policy=policy), Run(outcomes, pods, 1000.0, 100 * len(outcomes)), SLO, {})


def refused(policy: str) -> Result:
    """A run with one refused request."""
    run = Run([RequestOutcome("chat", 0.0, 100, 1, refused="too long to wait")], {"a": PodUse(0, 0, 0.0, 0)}, 0.0, 0)
    return summarize(replace(EASY, policy=policy), run, SLO, {})


def over_seeds(policy: str, *ttft_ms: float) -> list[Result]:
    """A run of each time, with a seed of its own."""
    return [ran(policy, ms, at=replace(EASY, seed=seed)) for seed, ms in enumerate(ttft_ms)]
