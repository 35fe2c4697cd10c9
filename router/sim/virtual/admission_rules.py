"""Which requests may go to a pod, and when? All at once, by the router's own queue, or by a rule of other routers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import ClassVar

from pydantic import ConfigDict

from router.admission.admission_queue import QueueLimits
from router.admission.places import place_of
from router.admission.tenant import OPEN_TENANT, Slo, Tenant
from router.errors import Overloaded, RouterError
from router.policy.decide import expected_ttft_ms
from router.request.queues import QueueSettings
from router.sim.virtual.session_turn import SessionTurn
from router.sim.virtual.virtual_clock import VirtualClock
from router.sim.virtual.virtual_pod import VirtualPod


class Rule(StrEnum):
    """Which requests may go to a pod, and when."""

    NONE = "none"
    """All go at once, and wait in the engines."""
    QUEUE = "queue"
    """The router's own queue."""
    LLM_D = "llm_d"
    """llm-d: all wait in order of arrival while every pod is saturated."""
    EARLY_REJECTION = "early_rejection"
    """Mooncake: a request is refused if its prefill or its decoding is predicted to miss the SLO."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A rule, and who sends what. `tenants`: by the kind of a session; others belong to one tenant. `slo`: of tenants
    that have none."""

    rule: Rule = Rule.NONE
    slo: Slo = OPEN_TENANT.slo
    queue: QueueLimits = field(default_factory=QueueLimits)
    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    def tenant_of(self, kind: str) -> Tenant:
        tenant = self.tenants.get(kind, OPEN_TENANT)
        return replace(tenant, slo=self.slo) if tenant.slo == OPEN_TENANT.slo else tenant

    def queue_settings(self, routers: int) -> QueueSettings | None:
        """The queue of one of `routers` equal routers; None without one."""
        return QueueSettings(self.queue, self.slo, lambda: routers) if self.rule is Rule.QUEUE else None


@dataclass(frozen=True, slots=True)
class FleetActions:
    """What a rule reads and does. `prepare` calls back when the router would send the request."""

    prepare: Callable[[SessionTurn, Callable[[SessionTurn], None]], None]
    dispatch: Callable[[SessionTurn], None]
    refuse: Callable[[SessionTurn, RouterError], None]
    clock: VirtualClock
    pods: Collection[VirtualPod]


class AdmitAll:
    """All requests go when the router has prepared them."""

    def __init__(self, fleet: FleetActions) -> None:
        self._fleet = fleet

    def arrive(self, turn: SessionTurn) -> None:
        """Prepare a request, now or later, or refuse it."""
        self._fleet.prepare(turn, self._prepared)

    def _prepared(self, turn: SessionTurn) -> None:
        """Dispatch a decided request, or refuse it."""
        self._fleet.dispatch(turn)


class EarlyRejection(AdmitAll):
    """Mooncake's rule (2407.00079), with the predicted load of the decoding pod."""

    def _prepared(self, turn: SessionTurn) -> None:
        context, core = turn.context, turn.core
        assert context.decision is not None
        best, inflight = context.decision.candidates[0], core.state.ledger.inflight()
        place = place_of(best, inflight, core.clock.now_s(), context.prompt_tokens, expected_ttft_ms(best.cost))
        if place.ttft_ms > turn.ttft_limit_ms or place.step_ms > context.tenant.slo.tpot_ms:
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


def rule_of(rule: Rule, fleet: FleetActions) -> AdmitAll:
    others = {Rule.LLM_D: SaturationRule, Rule.EARLY_REJECTION: EarlyRejection}
    return others.get(rule, AdmitAll)(fleet)
