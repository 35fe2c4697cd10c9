"""What would the router of this checkout have expected of a measured fleet's first tokens?

    python -m loadtest.gpu.replayed RUN.json...

Sends the requests of a record, at the times at which they were sent, got their first token and ended, through the
router's own ledger, prefill clock, calibration and prices: it judges a change of these without a GPU. Steps of decoding
responses were not recorded and count as equally long. Fleets of one pod only; the prior is that of the record.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).parents[2]))

from loadtest.gpu.fleet_record import MeasuredFleet, MeasuredRequest, read_fleet
from loadtest.gpu.simulated import BEFORE_ATTEMPT, MODEL, WINDOWS
from router.config.load import shipped
from router.config.policy_files import load_policies
from router.decision import Lease
from router.feeds.calibration_feed import APPLY_S
from router.fleet.ledger import Ledger
from router.policy.calibration import Calibration
from router.policy.calibrator import MIN_INTERVAL_S
from router.policy.decide import decide, expected_ttft_ms
from router.policy.prefill_clock import ConcurrentDecode, PrefillClock
from router.policy.spec import Policy
from router.types import (
    Endpoint,
    FleetSnapshot,
    Generation,
    InferenceRequest,
    Pod,
    PodSpeed,
    PodState,
    PodStatus,
    PrefixMatch,
    PrefixTrust,
    PromptPrefix,
    Scene,
    StepBegan,
)

POD = "pod-0"
STEP_S = 0.0075
"""Time of a decode step, where it is not seen."""


@dataclass(slots=True)
class Replay:
    """One pod behind one router, and the expected and actual time to first token of each request."""

    fleet: MeasuredFleet
    speed: PodSpeed = field(init=False)
    policy: Policy = field(default_factory=lambda: load_policies(shipped("policies"))["cost_aware"])
    calibration: Calibration = field(default_factory=Calibration)
    ledger: Ledger = field(default_factory=Ledger)
    clock: PrefillClock = field(default_factory=PrefillClock)
    times_ms: dict[int, tuple[float, float]] = field(default_factory=dict)
    _leases: dict[int, tuple[Lease, float, float]] = field(default_factory=dict)
    _applied_s: float = 0.0
    _observed_s: float = 0.0
    _step_s: float = 0.0

    def __post_init__(self) -> None:
        self.speed = self.fleet.prior

    def run(self) -> list[tuple[float, float]]:
        for at_s, _, number, event in sorted(_events(self.fleet), key=lambda one: one[:3]):
            self._steps_until(at_s)
            if at_s - self._applied_s >= APPLY_S:
                self.speed, self._applied_s = self.calibration.speed(MODEL, POD, self.fleet.prior), at_s
            event(self, number, at_s)
        return [self.times_ms[number] for number in sorted(self.times_ms)]

    def sent(self, number: int, now_s: float) -> None:
        request = self.fleet.requests[number]
        scene = self._scene(request, now_s)
        best = decide(scene, self.policy).candidates[0]
        lease = self.ledger.book(best.plan.pod, request.prompt_tokens, best.cached_tokens, now_s)
        began_s = scene.steps.get(POD, StepBegan()).at_s
        self.clock.sent(lease.id, request.prompt_tokens, best.cached_tokens, now_s, self._decoding(), began_s)
        self._leases[number] = lease, now_s, expected_ttft_ms(best.cost)

    def first_token(self, number: int, now_s: float) -> None:
        lease, sent_s, expected_ms = self._leases[number]
        seen = self.clock.first_token(lease.id, now_s, self._decoding())
        self.ledger.first_token(lease, now_s)
        self.ledger.stepped(POD, now_s)
        self._step_s = now_s
        if seen and now_s - self._observed_s >= MIN_INTERVAL_S:
            self._observed_s = now_s
            self.calibration.observe_prefill(MODEL, POD, self.fleet.prior, seen)
        self.times_ms[number] = expected_ms, (now_s - sent_s) * 1000

    def ended(self, number: int, now_s: float) -> None:
        self.ledger.release(self._leases[number][0], now_s)

    def _steps_until(self, now_s: float) -> None:
        steps = int((now_s - self._step_s) / STEP_S)
        if self._decoding().requests and steps:
            self.ledger.stepped(POD, self._step_s + steps * STEP_S)

    def _decoding(self) -> ConcurrentDecode:
        work = self.ledger.on(POD)
        return ConcurrentDecode(work.requests - work.prefill_requests, work.decode_tokens)

    def _scene(self, asked: MeasuredRequest, now_s: float) -> Scene:
        block, n = self.fleet.block_size_tokens, asked.prompt_tokens
        pod = Pod(
            id=POD, url=f"http://{POD}", engine="vllm", models=(MODEL,), trust=PrefixTrust.TRUSTED, speed=self.speed
        )
        generation = Generation(model=MODEL, block_size_tokens=block)
        return Scene(
            fleet=FleetSnapshot(1, (PodStatus(pod, PodState.READY),)),
            request=InferenceRequest(id="", endpoint=Endpoint.CHAT, model=MODEL, body=b""),
            prompt=PromptPrefix(generation, range(n), range(n // block)),
            match=PrefixMatch({POD: (asked.cached_tokens // block, 0, 0, 0)}),
            inflight=self.ledger.inflight(),
            steps=self.ledger.steps(),
            now_s=now_s,
        )


def _events(fleet: MeasuredFleet) -> Iterator[tuple[float, int, int, Callable[[Replay, int, float], None]]]:
    """When, order at one time, which request, what."""
    for number, one in enumerate(fleet.requests):
        if one.router_ttft_ms is not None:
            before_ms = sum(one.router_phases_ms.get(phase, 0.0) for phase in BEFORE_ATTEMPT)
            yield one.sent_s + one.router_ttft_ms / 1000, 0, number, Replay.first_token
            yield one.sent_s + one.e2e_ms / 1000, 1, number, Replay.ended
            yield one.sent_s + before_ms / 1000, 2, number, Replay.sent


def main(runs: Annotated[list[Path], typer.Argument(exists=True)]) -> None:
    """Print a table in Markdown for each fleet of one pod."""
    for run in runs:
        for found in json.loads(run.read_text())["fleets"]:
            fleet = read_fleet(found)
            if fleet.pods == 1 and fleet.requests:
                print("\n".join(_table(Replay(fleet).run())), end="\n\n")


def _table(times_ms: list[tuple[float, float]]) -> Iterator[str]:
    yield "| requests | expected TTFT ms | actual | median of actual / expected | error of each |"
    yield "|---|---|---|---|---|"
    for first, end in WINDOWS:
        part = times_ms[first:end]
        means = f"{fmean(one for one, _ in part):.1f} | {fmean(other for _, other in part):.1f}"
        ratio = median(actual / expected for expected, actual in part)
        error = fmean(abs(expected / actual - 1) for expected, actual in part)
        yield f"| {first + 1} to {first + len(part)} | {means} | {ratio:.2f} | {error:.0%} |"


if __name__ == "__main__":
    typer.run(main)
