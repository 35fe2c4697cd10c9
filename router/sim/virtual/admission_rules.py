"""Which requests may go to a pod, and when? All at once, or by the router's own queue."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import ClassVar

from pydantic import ConfigDict

from router.admission.admission_queue import QueueLimits
from router.admission.tenant import OPEN_TENANT, Slo, Tenant
from router.errors import RouterError
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
