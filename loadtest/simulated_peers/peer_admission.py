"""The admission rules of other routers, in front of a simulated fleet."""

from __future__ import annotations

from collections import deque

from router.admission.queue_candidates import queue_candidate
from router.errors import Overloaded
from router.policy.decide import expected_ttft_ms
from router.sim.virtual.admission_rules import AdmitAll, FleetActions
from router.sim.virtual.session_turn import SessionTurn
from router.sim.virtual.world import World


class EarlyRejection(AdmitAll):
    """Mooncake's rule (2407.00079), with the predicted load of the decoding pod."""

    def _prepared(self, turn: SessionTurn) -> None:
        context, core = turn.context, turn.core
        assert context.decision is not None
        best, inflight = context.decision.candidates[0], core.state.ledger.inflight()
        candidate = queue_candidate(
            best, inflight, core.clock.now_s(), context.prompt_tokens, expected_ttft_ms(best.cost)
        )
        if candidate.ttft_ms > turn.ttft_limit_ms or candidate.step_ms > context.tenant.slo.tpot_ms:
            self._fleet.refuse(turn, Overloaded("The request would be late.", 0.0))
        else:
            self._fleet.dispatch(turn)


class SaturationRule(AdmitAll):
    """llm-d's saturation rule with its defaults, and a queue in order of arrival. Requests are dropped when their
    deadline has passed. Loads are current: its scrapes are faster than ours."""

    max_waiting = 5
    max_kv_usage = 0.8
    recheck_ms = 10.0

    def __init__(self, fleet: FleetActions) -> None:
        super().__init__(fleet)
        self._waiting: deque[tuple[float, SessionTurn]] = deque()

    def arrive(self, turn: SessionTurn) -> None:
        self._waiting.append((self._fleet.clock.now_ms + turn.ttft_limit_ms, turn))
        if len(self._waiting) == 1:
            self._send()

    def _send(self) -> None:
        while self._waiting:
            until_ms, turn = self._waiting[0]
            if self._fleet.clock.now_ms > until_ms:
                self._waiting.popleft()
                self._fleet.refuse(turn, Overloaded("The request would be late.", 0.0))
            elif self._is_saturated():
                self._fleet.clock.call_in(self.recheck_ms, self._send)
                return
            else:
                self._waiting.popleft()
                super().arrive(turn)

    def _is_saturated(self) -> bool:
        loads = (pod.load for pod in self._fleet.pods)
        return all(one.waiting > self.max_waiting or one.kv_usage > self.max_kv_usage for one in loads)


class EarlyRejectionWorld(World):
    """A request is refused if its prefill or its decoding is predicted to miss the SLO."""

    rule_class = EarlyRejection


class SaturationWorld(World):
    """All wait in order of arrival while every pod is saturated."""

    rule_class = SaturationRule
