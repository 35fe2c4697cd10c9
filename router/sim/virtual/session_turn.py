"""One request of a session, while it is served."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from router.admission.tenant import Tenant
from router.decision import Lease
from router.fleet.ledger import Ledger
from router.sim.virtual.outcome import RequestOutcome
from router.sim.virtual.router_view import RouterView
from router.sim.virtual.traffic import Session, TrafficRequest


@dataclass(slots=True)
class SessionTurn:
    """A request with its leases in the ledger of the router that sends it.

    Without a `decode` lease, the `prefill` pod serves it completely."""

    id: str
    session: Session
    number: int
    tenant: Tenant
    outcome: RequestOutcome
    view: RouterView
    ledger: Ledger
    answered: Callable[[SessionTurn], None]
    prefill: Lease | None = None
    decode: Lease | None = None

    @property
    def request(self) -> TrafficRequest:
        return self.session.requests[self.number]

    @property
    def ttft_limit_ms(self) -> float:
        """The latest first token that meets the SLO."""
        return self.tenant.slo.ttft_limit_ms(self.outcome.idle_prefill_ms)
