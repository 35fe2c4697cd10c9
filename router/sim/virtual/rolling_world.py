"""A world whose pods are replaced one after the other, by ones with empty caches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from router.errors import ConfigError, UpstreamBroken
from router.request.continuation.later_pods import CHECK_S, due
from router.sim.virtual.layered_pod import new_pod
from router.sim.virtual.outcome import RolloutFigures, Run, percentile
from router.sim.virtual.session_turn import SessionTurn
from router.sim.virtual.traffic import Traffic
from router.sim.virtual.virtual_job import Job
from router.sim.virtual.virtual_pod import VirtualPod
from router.sim.virtual.world import OnEnded, World, ignore_progress
from router.types import PodId


class RollingWorld(World):
    """Its `Conditions.rollout` says when and how. Each pod is another one afterwards, under the same id."""

    def __init__(self, *values: Any, **settings: Any) -> None:
        super().__init__(*values, **settings)
        assert self._conditions.rollout is not None
        self._rollout = self._conditions.rollout
        if any(pod.known.role is not pod.known.role.BOTH for pod in self._fleet.values()):
            raise ConfigError("conditions.rollout: prefill and decode pods are not simulated")
        self._left: Iterator[PodId] = iter(list(self._pods))
        self._absent: PodId = ""
        self._moved_ms: dict[SessionTurn, float] = {}
        """When the streams left their pods that have no token of another one yet."""
        self._gaps_ms: list[float] = []
        self._again_tokens = 0
        self._replaced_ms = 0.0

    def run(self, traffic: Traffic, on_progress: OnEnded = ignore_progress) -> Run:
        began_ms = self._rollout.at_s * 1000
        self._clock.call_at(began_ms, self._drain_next)
        run = super().run(traffic, on_progress)
        broken = [one for one in run.outcomes if one.refused]
        meanwhile = [one for one in run.outcomes if began_ms <= one.arrived_ms <= self._replaced_ms]
        ttft_ms = np.array([one.ttft_ms for one in meanwhile if not one.refused])
        gaps_ms = np.array(self._gaps_ms)
        figures = RolloutFigures(
            minutes=(self._replaced_ms - began_ms) / 60_000,
            failed=sum(np.isnan(one.ttft_ms) for one in broken),
            cut=sum(not np.isnan(one.ttft_ms) for one in broken),
            moved=len(gaps_ms),
            gap_p50_ms=percentile(gaps_ms, 50),
            gap_p99_ms=percentile(gaps_ms, 99),
            ttft_p50_ms=percentile(ttft_ms, 50),
            ttft_p99_ms=percentile(ttft_ms, 99),
            again_tokens=self._again_tokens,
        )
        return replace(run, rollout=figures)

    # --- pods ---

    def _drain_next(self) -> None:
        self._replaced_ms = self._clock.now_ms
        pod_id = next(self._left, None)
        if pod_id is not None:
            for view in self.views:
                view.drain(pod_id)
            self._empty(pod_id, self._clock.now_ms + self._rollout.drain_timeout_s * 1000)

    def _empty(self, pod_id: PodId, until_ms: float) -> None:
        """Move what is worth it; end the pod once it is idle, or its time is over."""
        pod, now_ms = self._pods[pod_id], self._clock.now_ms
        if not pod.jobs or now_ms >= until_ms:
            self._end_pod(pod_id)
            return
        for job in due(self._moves(pod), len(self._pods) - 1):
            pod.end_early(job, now_ms)
        self._schedule_wake(pod_id)
        self._clock.call_in(CHECK_S * 1000, self._empty, pod_id, until_ms)

    def _moves(self, pod: VirtualPod) -> Iterator[tuple[float, Job]]:
        for job in pod.decoding:
            cost_ms = job.tag.move_ms(pod.emitted(job, self._clock.now_ms))
            if cost_ms is not None:
                yield cost_ms, job

    def _end_pod(self, pod_id: PodId) -> None:
        old = self._pods[pod_id]
        answered = [(job.tag, old.emitted(job, self._clock.now_ms)) for job in old.jobs]
        new = new_pod(self._fleet[pod_id].true, self._generation.block_size_tokens)
        new.computed_tokens, new.busy_ms, new.preemptions = old.computed_tokens, old.busy_ms, old.preemptions
        self._pods[pod_id], self._absent = new, pod_id
        self._versions[pod_id] += 1
        for turn, tokens in answered:
            self._break_off(turn, pod_id, tokens)
        self._clock.call_in(self._rollout.start_s * 1000, self._start_pod, pod_id)

    def _start_pod(self, pod_id: PodId) -> None:
        self._absent = ""
        for view in self.views:
            view.restarted(pod_id)
        self._drain_next()

    # --- streams ---

    def _break_off(self, turn: SessionTurn, pod_id: PodId, tokens: int) -> None:
        error = UpstreamBroken(f"pod {pod_id} is replaced", pod=pod_id)
        has_begun = turn.context.first_token_s is not None
        candidate = turn.broken(error)
        if candidate is None:
            self._refuse(turn, error)
            return
        if has_begun:
            turn.request = turn.request.after(tokens, self._generation.block_size_tokens)
            self._moved_ms.setdefault(turn, self._clock.now_ms)
        self._send_in(turn, candidate)

    def _submit(self, turn: SessionTurn, pod_id: PodId, arrived_tokens: int) -> None:
        if pod_id == self._absent:
            self._break_off(turn, pod_id, 0)
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
            return  # the stream has left it meanwhile
        moved_ms = self._moved_ms.pop(turn, None)
        if moved_ms is None:
            super()._stream(turn, pod_id)
            return
        self._gaps_ms.append(self._clock.now_ms - moved_ms)
        turn.first_token(pod_id)

    def _on_finish(self, job: Job, pod_id: PodId) -> None:
        if job.request.output_tokens < job.tag.request.output_tokens:
            self._break_off(job.tag, pod_id, job.emitted)
        else:
            super()._on_finish(job, pod_id)
