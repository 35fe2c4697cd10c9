"""Would the simulator have foreseen what a measured fleet did?

`simulate` sends the requests of a record at the same times through the simulator, with pods of the measured speed.
`expected_times` and `cached_tokens` compare what the router expected with what happened. Pure: no engine, no network.

Pods that share one GPU slow each other down, which the simulator does not model: only one pod per GPU is comparable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from loadtest.gpu.fleet_record import MeasuredFleet, MeasuredRequest
from loadtest.simulator.outcome import RequestOutcome, cached_share
from loadtest.simulator.scenario import Conditions, SimulatedFleet, SimulatedPod
from loadtest.simulator.traffic import Session, Traffic, TrafficRequest
from loadtest.simulator.virtual_pod import VirtualPodConfig
from loadtest.simulator.world import World
from loadtest.traffic.figures import percentile
from router.config.load import shipped
from router.config.policy_files import load_policies
from router.phases import PHASES
from router.types import Pod, PodSpeed, PrefixTrust

WINDOWS = ((0, 50), (50, 200), (200, None))
"""Requests by number, in the order in which they were sent: the router learns meanwhile."""
BEFORE_ATTEMPT = PHASES[: PHASES.index("attempt")]
MODEL = "measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPod:
    """A pod as it was measured alone.

    `route_ms` is the way through the router; `overhead_ms` is what the pod needs for HTTP, tokens and scheduling before
    a first token.
    """

    speed: PodSpeed
    kv_tokens: int
    step_budget_tokens: int = 8192
    max_num_seqs: int = 256
    route_ms: float = 1.5
    overhead_ms: float = 0.0
    event_delay_ms: float = 10.0
    scrape_ms: float = 250.0


@dataclass(frozen=True, slots=True)
class Figures:
    """Times to first token and hit share of the same requests, measured or simulated."""

    requests: int
    ttft_mean_ms: float
    ttft_p50_ms: float
    ttft_p90_ms: float
    ttft_p99_ms: float
    e2e_mean_ms: float
    hit_share: float


@dataclass(frozen=True, slots=True)
class ExpectedTimes:
    """Expected against actual times to first token of some requests, both as the router saw them.

    `error_per_request` is the mean of each request's error relative to its own time; `error_of_the_mean` is positive
    where the router expected too much.
    """

    first: int
    last: int
    expected_mean_ms: float
    actual_mean_ms: float
    mean_absolute_error_ms: float
    error_per_request: float
    error_of_the_mean: float


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """Tokens that the router expected in the cache, and that the engine found there."""

    requests: int
    exact_share: float
    """Share of requests with equal numbers."""
    prompt_tokens: int
    predicted_tokens: int
    reported_tokens: int


def simulate(fleet: MeasuredFleet, pod: MeasuredPod) -> Sequence[RequestOutcome]:
    """The outcome of each request of the record, in the same order. The router starts with the same prior."""
    pods = tuple(_simulated_pod(number, fleet, pod) for number in range(fleet.pods))
    conditions = Conditions(
        route_ms=pod.route_ms,
        overhead_ms=pod.overhead_ms,
        event_delay_ms=pod.event_delay_ms,
        scrape_ms=pod.scrape_ms,
    )
    policy = load_policies(shipped("policies"))[fleet.plan["policy"]]
    world = World(SimulatedFleet(pods), policy, conditions, block_size_tokens=fleet.block_size_tokens)
    requests = [Session(one.sent_s, (_traffic(one, fleet.block_size_tokens),), one.kind) for one in fleet.requests]
    return world.run(Traffic(fleet.block_size_tokens, requests, len(requests))).outcomes


def figures(served: Sequence[MeasuredRequest] | Sequence[RequestOutcome]) -> Figures:
    """The figures of all requests."""
    ttft_ms = [one.ttft_ms for one in served]
    p50_ms, p90_ms, p99_ms = (percentile(ttft_ms, share) for share in (0.5, 0.9, 0.99))
    return Figures(
        len(served), fmean(ttft_ms), p50_ms, p90_ms, p99_ms, fmean(one.e2e_ms for one in served), cached_share(served)
    )


def route_ms(requests: Sequence[MeasuredRequest]) -> float:
    """The median way through the router before and after the pod's part: its phases until the attempt, and what the
    client measured more than the router."""
    return median(
        one.ttft_ms - one.router_ttft_ms + sum(one.router_phases_ms.get(phase, 0.0) for phase in BEFORE_ATTEMPT)
        for one in requests
        if one.router_ttft_ms
    )


def expected_times(requests: Sequence[MeasuredRequest]) -> list[ExpectedTimes]:
    """A row for each of `WINDOWS` that has requests: the first ones are expected by the prior, the last by what the
    router has learnt."""
    known = [
        (one.expected_ttft_ms, one.router_ttft_ms)
        for one in requests
        if one.expected_ttft_ms is not None and one.router_ttft_ms
    ]
    rows = []
    for first, end in WINDOWS:
        if times := known[first:end]:
            expected_ms, actual_ms = (fmean(column) for column in zip(*times, strict=True))
            rows.append(
                ExpectedTimes(
                    first + 1,
                    first + len(times),
                    expected_ms,
                    actual_ms,
                    fmean(abs(expected - actual) for expected, actual in times),
                    fmean(abs(expected - actual) / actual for expected, actual in times),
                    expected_ms / actual_ms - 1,
                )
            )
    return rows


def cached_tokens(requests: Sequence[MeasuredRequest]) -> CachedTokens:
    """Over all requests whose prompt the router could match."""
    known = [one for one in requests if one.predicted_cached_tokens is not None]
    return CachedTokens(
        len(known),
        fmean(one.predicted_cached_tokens == one.cached_tokens for one in known) if known else 0.0,
        sum(one.prompt_tokens for one in known),
        sum(one.predicted_cached_tokens or 0 for one in known),
        sum(one.cached_tokens for one in known),
    )


def _simulated_pod(number: int, fleet: MeasuredFleet, pod: MeasuredPod) -> SimulatedPod:
    """As the router knew the pod, and as it was."""
    known = Pod(
        id=f"pod-{number}",
        url=f"http://pod-{number}",
        engine="vllm",
        speed=fleet.prior,
        models=(MODEL,),
        block_size_tokens=fleet.block_size_tokens,
        trust=PrefixTrust.TRUSTED,
    )
    true = VirtualPodConfig(
        speed=pod.speed,
        kv_tokens=pod.kv_tokens,
        engine_block_tokens=fleet.block_size_tokens,
        step_budget_tokens=pod.step_budget_tokens,
        max_num_seqs=pod.max_num_seqs,
    )
    return SimulatedPod(known, true)


def _traffic(one: MeasuredRequest, block_size_tokens: int) -> TrafficRequest:
    """As in an engine, whole blocks are reusable, without the prompt's last token."""
    return TrafficRequest(
        one.prompt_tokens, one.output_tokens, one.blocks, max(one.prompt_tokens - 1, 0) // block_size_tokens
    )
