"""Which pods may go on with a stream, when is a pod silent for too long, and when does a stream leave a drained one?

Another pod must compute the prompt and the answer so far. A stream leaves where that takes less time than the rest of
its answer probably will, the cheapest first, and only as many as cost the other pods a `SHARE` of their time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import TypeVar

from router.decision import Candidate, Direct, RouteDecision
from router.request.context import RequestContext
from router.request.fleet_state import FleetState
from router.types import Endpoint, PodId

MOVED = "moved"
"""Why a stream leaves a pod that is drained, which has not failed: it may come back once the pod is another one."""
CHECK_S = 0.5
"""How often streams are looked for that should leave their pods."""
SHARE = 0.1
SILENT_STEPS = 20
"""A pod's silence counts after as many of its steps: one that takes a long prompt in, too, is longer than others."""
LEAST_PIECES = 8
"""The mean of fewer says little."""
_WEIGHT, _MOST = 0.1, 4096
StreamT = TypeVar("StreamT")


def other_pod(context: RequestContext, decision: RouteDecision, endpoint: Endpoint) -> Candidate | None:
    """The best candidate on a pod that has not failed this request and is like the one that has it, for the `endpoint`
    that it was asked at."""
    assert context.candidate is not None
    first, failed = context.candidate.pod, {one.pod for one in context.failures if one.error != MOVED}
    for candidate in decision.candidates:
        pod = candidate.pod
        is_proven = endpoint in pod.continues or (
            endpoint not in first.continues and (pod.continues or not first.continues)
        )
        own, others = (pod.engine, pod.version, pod.front_end), (first.engine, first.version, first.front_end)
        alike = is_proven and own == others
        if alike and pod.id not in (*failed, first.id) and pod.serves_alone and pod.dp_rank is None:
            return Candidate(Direct(pod), candidate.cost, candidate.cached_tokens)
    return None


def move_ms(state: FleetState, context: RequestContext, answered: int, last_s: float) -> float | None:
    """What the move of a stream with `answered` tokens, the last at `last_s`, takes of the time of the other pods; None
    where its pod stays, or the rest takes less. An answer longer than expected lasts twice as long."""
    candidate, decision, first_s = context.candidate, context.decision, context.first_token_s
    if candidate is None or decision is None or first_s is None or not state.fleet.is_leaving(candidate.pod.id):
        return None
    expected = state.output_lengths.expected_tokens(context.request, context.request.tenant)
    rest_ms = max(expected - answered, answered) * (last_s - first_s) * 1000 / answered
    cost_ms = candidate.pod.speed.prefill_ms(context.prompt_tokens + answered)
    return cost_ms / max(len(decision.candidates) - 1, 1) if cost_ms < rest_ms else None


class MovePace:
    """How fast streams leave."""

    def __init__(self) -> None:
        self._left_ms = 0.0

    def due(self, moves: Iterable[tuple[float, StreamT]]) -> Iterator[StreamT]:
        """Those that leave now: of what should, with its cost. To be called every `CHECK_S`."""
        more_ms = CHECK_S * 1000 * SHARE
        self._left_ms = min(self._left_ms + more_ms, more_ms)
        for cost_ms, one in sorted(moves, key=itemgetter(0)):
            if self._left_ms > 0:
                self._left_ms -= cost_ms
                yield one


class StepTimes:
    """Mean times between the pieces of streams, by pod and workload class, learnt from each stream that was whole."""

    def __init__(self) -> None:
        self._step_s: dict[tuple[PodId, str], float] = {}

    def learn(self, pod: PodId, workload: str, step_s: float) -> None:
        known_s = self._step_s.pop((pod, workload), step_s)
        self._step_s[pod, workload] = known_s + _WEIGHT * (step_s - known_s)
        if len(self._step_s) > _MOST:
            del self._step_s[next(iter(self._step_s))]

    def silence_s(self, pod: PodId, workload: str) -> float:
        """0 for streams of which nothing was learnt."""
        return SILENT_STEPS * self._step_s.get((pod, workload), 0.0)
