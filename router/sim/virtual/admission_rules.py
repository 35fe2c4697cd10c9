"""Which requests may go to a pod, and when? All at once, by the router's own queue, or by a rule of other routers."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import ClassVar

from pydantic import ConfigDict

from router.admission.admission_queue import MIN_RECHECK_MS, AdmissionQueue, Offer, Place, QueueLimits, Refusal
from router.admission.fair_order import Waiting
from router.admission.places import places_of
from router.admission.tenant import OPEN_TENANT, Slo, Tenant
from router.decision import RouteDecision
from router.errors import RouterError
from router.policy.decide import expected_ttft_ms
from router.sim.virtual.session_turn import SessionTurn
from router.types import PodLoad, Scene


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
        """The tenant of a session of that kind."""
        tenant = self.tenants.get(kind, OPEN_TENANT)
        return replace(tenant, slo=self.slo) if tenant.slo == OPEN_TENANT.slo else tenant

    @property
    def strictest_tpot_ms(self) -> float:
        """The lowest limit of all tenants."""
        return min(self.slo.tpot_ms, *(tenant.slo.tpot_ms for tenant in self.tenants.values()), math.inf)


@dataclass(frozen=True, slots=True)
class FleetActions:
    """What a rule reads and does. `decide` is called again, with False, for a request that waits."""

    decide: Callable[[SessionTurn, bool], tuple[Scene, RouteDecision]]
    dispatch: Callable[[SessionTurn, RouteDecision], None]
    refuse: Callable[[SessionTurn, str], None]
    call_in: Callable[[float, Callable[[], None]], None]
    loads: Callable[[], Sequence[PodLoad]]
    now_ms: Callable[[], float]


class AdmitAll:
    """All requests go at once."""

    def __init__(self, fleet: FleetActions) -> None:
        self._fleet = fleet

    def arrive(self, turn: SessionTurn) -> None:
        """Dispatch a request or refuse it, now or later."""
        try:
            scene, decision = self._fleet.decide(turn, True)
        except RouterError as error:
            self._fleet.refuse(turn, error.code)
            return
        self._admit(turn, scene, decision)

    def _admit(self, turn: SessionTurn, scene: Scene, decision: RouteDecision) -> None:
        self._fleet.dispatch(turn, decision)

    def answered(self, turn: SessionTurn) -> None:
        """A request has its last token."""


class EarlyRejection(AdmitAll):
    """Mooncake's rule (2407.00079), with the predicted load of the decoding pod."""

    def _admit(self, turn: SessionTurn, scene: Scene, decision: RouteDecision) -> None:
        place = _places(turn, scene, decision)[0]
        if place.ttft_ms > turn.ttft_limit_ms or place.step_ms > turn.tenant.slo.tpot_ms:
            self._fleet.refuse(turn, "too long to wait")
        else:
            self._fleet.dispatch(turn, decision)


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
        self._waiting.append((self._fleet.now_ms() + turn.ttft_limit_ms, turn))
        if len(self._waiting) == 1:
            self._send()

    def _send(self) -> None:
        while self._waiting:
            until_ms, turn = self._waiting[0]
            if self._fleet.now_ms() > until_ms:
                self._waiting.popleft()
                self._fleet.refuse(turn, "expired")
            elif self._is_saturated():
                self._fleet.call_in(self.recheck_ms, self._send)
                return
            else:
                self._waiting.popleft()
                super().arrive(turn)

    def _is_saturated(self) -> bool:
        return all(one.waiting > self.max_waiting or one.kv_usage > self.max_kv_usage for one in self._fleet.loads())


class QueueRule(AdmitAll):
    """The router's own queue."""

    def __init__(self, fleet: FleetActions, limits: QueueLimits, tpot_ms: float, routers: int) -> None:
        super().__init__(fleet)
        self._queue = AdmissionQueue(limits, tpot_ms, lambda: routers)
        self._turns: dict[int, SessionTurn] = {}
        self._next_ms = math.inf
        self._latest: RouteDecision

    def _admit(self, turn: SessionTurn, scene: Scene, decision: RouteDecision) -> None:
        places, now_s = _places(turn, scene, decision), scene.now_s
        request, pods = Offer(turn.tenant, turn.ttft_limit_ms), len(scene.fleet.pods)
        if self._queue.send_at_once(request, places[0], now_s, pods):
            self._fleet.dispatch(turn, decision)
            return
        found = self._queue.offer(request, places, now_s, pods)
        if isinstance(found, Refusal):
            self._fleet.refuse(turn, found.reason)
            return
        self._turns[found.number] = turn
        while (dropped := self._queue.overflow()) is not None:
            self._fleet.refuse(self._turns.pop(dropped.number), "queue full")
        self._send()

    def answered(self, turn: SessionTurn) -> None:
        self._queue.answered(turn.outcome.ttft_ms > turn.ttft_limit_ms, turn.outcome.tpot_ms)

    def _send(self) -> None:
        now_ms = self._fleet.now_ms()
        while isinstance(expired := self._queue.expire(now_ms / 1000), Waiting):
            self._fleet.refuse(self._turns.pop(expired.number), "expired")
        while len(self._queue):
            found = self._queue.next_to_send(now_ms / 1000, self._places_of)
            if isinstance(found, float):
                found = min(found, max(expired, MIN_RECHECK_MS))
                if not now_ms < self._next_ms <= now_ms + found:
                    self._next_ms = now_ms + found
                    self._fleet.call_in(found, self._send)
                return
            one, place = found
            self._fleet.dispatch(self._turns.pop(one.number), place.first_in(self._latest))

    def _places_of(self, one: Waiting) -> list[Place]:
        turn = self._turns[one.number]
        scene, self._latest = self._fleet.decide(turn, False)
        return _places(turn, scene, self._latest)


def _places(turn: SessionTurn, scene: Scene, decision: RouteDecision) -> list[Place]:
    return places_of(decision, scene.inflight, scene.now_s, turn.request.prompt_tokens, expected_ttft_ms)


def rule_of(admission: Admission, fleet: FleetActions, routers: int) -> AdmitAll:
    """The rule of one of `routers` equal routers."""
    if admission.rule is Rule.QUEUE:
        return QueueRule(fleet, admission.queue, admission.strictest_tpot_ms, routers)
    others = {Rule.NONE: AdmitAll, Rule.LLM_D: SaturationRule, Rule.EARLY_REJECTION: EarlyRejection}
    return others[admission.rule](fleet)
