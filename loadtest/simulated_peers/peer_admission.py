"""The admission rules of other routers, in front of a simulated fleet."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

from loadtest.simulator.router_view import RouterView
from loadtest.simulator.session_turn import SessionTurn
from loadtest.simulator.world import World
from router.admission.admission_queue import queue_candidate
from router.admission.tenant import Slo
from router.decision import Candidate
from router.errors import Overloaded
from router.policy.decide import expected_ttft_ms

LATE = "The request would be late."


def _slo(turn: SessionTurn) -> Slo:
    return turn.context.tenant.slo or turn.router.slo


def _ttft_limit_ms(turn: SessionTurn) -> float:
    return _slo(turn).ttft_limit_ms(turn.outcome.idle_prefill_ms)


class EarlyRejectionWorld(World):
    """A request is refused if its prefill or its decoding is predicted to miss the SLO: Mooncake's rule (2407.00079),
    with the predicted load of the decoding pod."""

    def attempt(self, turn: SessionTurn, candidate: Candidate) -> None:
        context, core = turn.context, turn.core
        assert context.decision is not None
        best, inflight = context.decision.candidates[0], core.state.ledger.inflight()
        predicted = queue_candidate(
            best, inflight, core.clock.now_s(), context.prompt_tokens, expected_ttft_ms(best.cost)
        )
        is_late = predicted.ttft_ms > _ttft_limit_ms(turn) or predicted.step_ms > _slo(turn).tpot_ms
        if is_late and context.tries == 1:
            raise Overloaded(LATE, 0.0)
        super().attempt(turn, candidate)


class SaturationWorld(World):
    """All wait in order of arrival while every pod is saturated, and are dropped when their deadline has passed:
    llm-d's saturation rule with its defaults. Loads are current: its scrapes are faster than ours."""

    max_waiting = 5
    max_kv_usage = 0.8
    recheck_ms = 10.0

    def __init__(self, *values: Any, **settings: Any) -> None:
        super().__init__(*values, **settings)
        self._held: defaultdict[RouterView, deque[tuple[float, SessionTurn]]] = defaultdict(deque)

    def _begin(self, turn: SessionTurn) -> None:
        waiting = self._held[turn.router]
        waiting.append((self._clock.now_ms + _ttft_limit_ms(turn), turn))
        if len(waiting) == 1:
            self._send_in_order(waiting)

    def _send_in_order(self, waiting: deque[tuple[float, SessionTurn]]) -> None:
        while waiting:
            until_ms, turn = waiting[0]
            if self._clock.now_ms > until_ms:
                waiting.popleft()
                turn.refuse(Overloaded(LATE, 0.0))
            elif self._is_saturated():
                self._clock.call_in(self.recheck_ms, self._send_in_order, waiting)
                return
            else:
                waiting.popleft()
                super()._begin(turn)

    def _is_saturated(self) -> bool:
        loads = [pod.load for pod in self._pods.values()]
        return all(one.waiting > self.max_waiting or one.kv_usage > self.max_kv_usage for one in loads)
