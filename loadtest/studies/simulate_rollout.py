"""What does a rolling update cost whose pods hand their streams over, and one whose pods wait for them?

    python -m loadtest.studies.simulate_rollout [--per-s 100] [--tokens 2000] [--pods 32]

In virtual time. Each pod is drained, ends once it is idle, and is replaced by one with an empty cache that has started
already. Handed over, a stream leaves by the rules of the router (`continuation/later_pods.py`), for the pod that its
decision code names: that one computes the prompt and the answer so far. `loadtest/faults/rolling_update.py` moves bytes
over sockets instead.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import numpy as np
import typer

from loadtest.commands.simulate import map_in_processes
from loadtest.commands.simulate_setup import DEFAULT_FLEET, shipped_prior
from loadtest.simulator.generate import Kind, TrafficMix
from loadtest.simulator.layered_pod import new_pod
from loadtest.simulator.outcome import Run
from loadtest.simulator.scenario import FleetSpec
from loadtest.simulator.session_turn import SessionTurn
from loadtest.simulator.traffic import TrafficRequest
from loadtest.simulator.virtual_job import Job
from loadtest.simulator.world import World
from router.config.load import load, shipped
from router.config.policy_files import policy_spec
from router.errors import RouterError, UpstreamBroken
from router.fleet.fleet import PodEvent
from router.request.continuation.later_pods import CHECK_S, MovePace, move_ms
from router.types import PodId, PrefixTrust

DRAINED = "rolling update"
MODEL, HARDWARE = "llama-3.1-8b", "h100x1"
BEGIN_S = 300.0
"""The load is steady by then: streams take longer as pods fill, so more of them run at once."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """From second `at_s` on. A pod takes `start_s` to start, and waits at most `drain_timeout_s` for its streams."""

    at_s: float = BEGIN_S
    start_s: float = 0.0
    drain_timeout_s: float = 600.0
    continues: bool = False


@dataclass(frozen=True, slots=True)
class Figures:
    """`failed` requests had no token, `cut` ones had some. `gap_ms`: without a token while a stream moved, and
    `ttft_ms` of the requests meanwhile: median, 99th percentile and maximum. `again_tokens` of prompts and answers were
    computed for moves. `preempted`: how often a pod without KV space let a stream wait and computed it again."""

    continues: bool
    minutes: float
    answers: int
    failed: int
    cut: int
    moved: int
    gap_ms: list[float]
    ttft_before_ms: list[float]
    ttft_ms: list[float]
    again_tokens: int
    computed_tokens: int
    preempted: int


class RollingWorld(World):
    """Replaces its pods one after the other. Each is another one afterwards, under the same id."""

    def __init__(self, *values: Any, rollout: Rollout, **settings: Any) -> None:
        super().__init__(*values, **settings)
        self._rollout, self._pace = rollout, MovePace()
        self._left: Iterator[PodId] = iter(list(self._pods))
        self._absent: PodId = ""
        self._moved_ms: dict[SessionTurn, float] = {}
        """When the streams left their pods that have no token of another one yet."""
        self._gaps_ms: list[float] = []
        self._again_tokens = 0
        self._replaced_ms = 0.0
        self._clock.call_at(rollout.at_s * 1000, self._drain_next)

    def figures(self, run: Run) -> Figures:
        begin_ms, broken = self._rollout.at_s * 1000, [one for one in run.outcomes if one.refused]
        has_token = [one.ttft_ms >= 0 for one in broken]
        served = [one for one in run.outcomes if not one.refused]
        return Figures(
            continues=self._rollout.continues,
            minutes=round((self._replaced_ms - begin_ms) / 60_000, 2),
            answers=len(run.outcomes),
            failed=has_token.count(False),
            cut=has_token.count(True),
            moved=len(self._gaps_ms),
            gap_ms=quantiles(self._gaps_ms),
            ttft_before_ms=quantiles([one.ttft_ms for one in served if one.arrived_ms < begin_ms]),
            ttft_ms=quantiles([one.ttft_ms for one in served if begin_ms <= one.arrived_ms <= self._replaced_ms]),
            again_tokens=self._again_tokens,
            computed_tokens=sum(pod.computed_tokens for pod in run.pods.values()),
            preempted=sum(pod.preemptions for pod in run.pods.values()),
        )

    # --- pods ---

    def _drain_next(self) -> None:
        self._replaced_ms = self._clock.now_ms
        pod_id = next(self._left, None)
        if pod_id is None:
            self._sessions = iter(())  # what comes later shows nothing
        else:
            for view in self.views:
                view.core.state.fleet.event(pod_id, PodEvent.DRAIN, reason=DRAINED)
            self._empty(pod_id, self._clock.now_ms + self._rollout.drain_timeout_s * 1000)

    def _empty(self, pod_id: PodId, until_ms: float) -> None:
        """Move what is worth it; end the pod once it is idle, or its time is over."""
        pod, now_ms = self._pods[pod_id], self._clock.now_ms
        answered = list(pod.answered(now_ms))
        if not answered or now_ms >= until_ms:
            self._end_pod(pod_id, answered)
            return
        if self._rollout.continues:
            for job in self._pace.due(self._moves(answered)):
                pod.end_early(job, now_ms)
            self._schedule_wake(pod_id)
        self._clock.call_in(CHECK_S * 1000, self._empty, pod_id, until_ms)

    def _moves(self, answered: list[tuple[Job, int]]) -> Iterator[tuple[float, Job]]:
        for job, tokens in answered:
            turn: SessionTurn = job.tag
            begun_s = self._clock.now_s - turn.context.phases.began_s
            cost_ms = move_ms(turn.core.state, turn.context, tokens, begun_s) if tokens else None
            if cost_ms is not None:
                yield cost_ms, job

    def _end_pod(self, pod_id: PodId, answered: list[tuple[Job, int]]) -> None:
        old, new = self._pods[pod_id], new_pod(self._fleet[pod_id].true, self._generation.block_size_tokens)
        new.computed_tokens, new.busy_ms, new.preemptions = old.computed_tokens, old.busy_ms, old.preemptions
        self._pods[pod_id], self._absent = new, pod_id
        self._versions[pod_id] += 1
        for job, tokens in answered:
            self._leave(job.tag, pod_id, tokens)
        self._clock.call_in(self._rollout.start_s * 1000, self._start_pod, pod_id)

    def _start_pod(self, pod_id: PodId) -> None:
        self._absent = ""
        for view in self.views:
            fleet = view.core.state.fleet
            view.store.forget(pod_id)
            fleet.restarted(pod_id)
            fleet.trust(pod_id, PrefixTrust.TRUSTED, "")
            fleet.event(pod_id, PodEvent.UNDRAIN)
            fleet.event(pod_id, PodEvent.PROBE_OK)
        self._drain_next()

    # --- streams ---

    def _leave(self, turn: SessionTurn, pod_id: PodId, tokens: int) -> None:
        """Send the rest of a stream to another pod. Without continuation, one of which tokens were sent ends."""
        has_begun, error = turn.context.first_token_s is not None, UpstreamBroken("its pod is replaced", pod=pod_id)
        if has_begun and not self._rollout.continues:
            turn.refuse(error)
            return
        rest = after(turn.request, tokens, self._generation.block_size_tokens) if has_begun else turn.request
        try:
            candidate = turn.moved(pod_id, rest)
        except RouterError as refusal:
            turn.refuse(refusal.with_traceback(None))
            return
        if candidate is None:
            turn.refuse(error)
            return
        if has_begun:
            self._moved_ms.setdefault(turn, self._clock.now_ms)
        self._send_in(turn, candidate)

    def _submit(self, turn: SessionTurn, pod_id: PodId, arrived_tokens: int) -> None:
        if pod_id == self._absent:
            self._leave(turn, pod_id, 0)
        else:
            super()._submit(turn, pod_id, arrived_tokens)

    def _on_first_token(self, job: Job, pod_id: PodId) -> None:
        if job.tag not in self._moved_ms:
            super()._on_first_token(job, pod_id)
            return
        self._again_tokens += job.request.prompt_tokens - (job.cached_tokens or 0)
        self._after_overhead(self._stream, job.tag, pod_id)

    def _stream(self, turn: SessionTurn, pod_id: PodId) -> None:
        if pod_id != turn.outcome.pod:
            return  # the request has left it meanwhile
        moved_ms = self._moved_ms.pop(turn, None)
        if moved_ms is None:
            super()._stream(turn, pod_id)
            return
        self._gaps_ms.append(self._clock.now_ms - moved_ms)
        turn.first_token(pod_id)

    def _on_finish(self, job: Job, pod_id: PodId) -> None:
        if job.request.output_tokens < job.tag.request.output_tokens:
            self._leave(job.tag, pod_id, job.emitted)
        else:
            super()._on_finish(job, pod_id)


def after(request: TrafficRequest, tokens: int, block_size_tokens: int) -> TrafficRequest:
    """The rest of the answer, for a pod that gets the first `tokens` of it with the prompt."""
    known = request.prompt_tokens + tokens
    blocks = max(request.prompt_blocks, min(known // block_size_tokens, len(request.blocks)))
    return TrafficRequest(known, request.output_tokens - tokens, request.blocks, blocks)


def quantiles(values: list[float]) -> list[float]:
    """Median, 99th percentile and maximum; empty without values."""
    return [round(float(one), 1) for one in np.percentile(values, (50, 99, 100))] if values else []


@dataclass(frozen=True, slots=True)
class Play:
    """One of the two, with this load."""

    mix: TrafficMix
    spec: FleetSpec

    def __call__(self, rollout: Rollout) -> Figures:
        traffic = self.mix.traffic()
        world = RollingWorld(
            self.spec.build(shipped_prior),
            policy_spec("cost_aware").build(),
            replace(self.spec.conditions, regret_every=0),
            block_size_tokens=traffic.block_size_tokens,
            rollout=rollout,
        )
        return world.figures(world.run(traffic))


def main(
    per_s: Annotated[float, typer.Option(help="Streams a second.")] = 100.0,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 2000,
    prompts: Annotated[tuple[int, int], typer.Option(help="Shortest and longest prompt, in tokens.")] = (500, 2000),
    pods: Annotated[int, typer.Option(min=2, help="Number of pods, of one H100 with an 8B model each.")] = 32,
    duration_s: Annotated[float, typer.Option(help="Longest time of the load.")] = 3600.0,
    start_s: Annotated[float, typer.Option(min=0, help="What a new pod takes to start.")] = 0.0,
    jobs: Annotated[int, typer.Option(min=1, help="Number of processes.")] = 2,
) -> None:
    """Print a line for each rolling update. Exit code 1 if a request failed or was cut."""
    spec = load(shipped("config") / "fleets" / f"{DEFAULT_FLEET}.yaml", FleetSpec, [f"model={MODEL}"])
    group = spec.pods[0].model_copy(update={"count": pods, "hardware": HARDWARE, "gpus": 1})
    kind = Kind(first_tokens=prompts, output_tokens=(tokens, tokens))
    mix = TrafficMix(sessions_per_s=per_s, duration_s=duration_s, kinds={"any": kind})
    play = Play(mix, spec.model_copy(update={"pods": (group,)}))
    updates = [Rollout(start_s=start_s), Rollout(start_s=start_s, continues=True)]
    found = map_in_processes(play, updates, jobs, "rolling updates")
    for one in found:
        typer.echo(json.dumps(asdict(one)))
    raise SystemExit(any(one.failed + one.cut for one in found))


if __name__ == "__main__":
    typer.run(main)
