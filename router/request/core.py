"""Builds what serves requests, independent of any front: the HTTP front, others and the simulator drive the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.observe.counters import Counters
from router.observe.ended import EndingSink
from router.request.attempt_rules import AttemptRules
from router.request.clock import Clock
from router.request.decisions import DecisionRecorder, RequestDecisions, Routing
from router.request.endings import Endings
from router.request.fleet_state import FleetState
from router.request.queues import QueueSettings, RequestQueues
from router.request.quota_charges import QuotaCharges
from router.request.requests import Requests


@dataclass(frozen=True, slots=True)
class Observers:
    """What records requests: `recorder` their decisions, `counters` what happens meanwhile, `sinks` how they ended."""

    recorder: DecisionRecorder
    counters: Counters
    sinks: Sequence[EndingSink] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSettings:
    """`queue`: None where requests wait in the engines. `charges`: None where no tenant has quotas. `records_usage` and
    `trusts_uuids`: see `Endings` and `Requests`."""

    rules: AttemptRules
    queue: QueueSettings | None = None
    charges: QuotaCharges | None = None
    records_usage: bool = False
    trusts_uuids: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    state: FleetState
    decisions: RequestDecisions
    requests: Requests
    queues: RequestQueues | None
    clock: Clock


def build_core(state: FleetState, settings: CoreSettings, routing: Routing, observers: Observers, clock: Clock) -> Core:
    counters, charges, queues = observers.counters, settings.charges, None
    decisions = RequestDecisions(state, routing, observers.recorder, counters, clock)
    if settings.queue is not None:
        queues = RequestQueues(settings.queue, state, decisions, counters, clock)
    requests = Requests(
        state=state,
        decisions=decisions,
        endings=Endings(state, counters, observers.sinks, clock, charges, queues, settings.records_usage),
        rules=settings.rules,
        counters=counters,
        clock=clock,
        charges=charges,
        queues=queues,
        counts_tokens=settings.records_usage,
        trusts_uuids=settings.trusts_uuids,
    )
    return Core(state=state, decisions=decisions, requests=requests, queues=queues, clock=clock)
