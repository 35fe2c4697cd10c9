"""Builds everything that serves a request and is no HTTP: any front can drive it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from router.admission.gate import AdmissionGate
from router.admission.quotas import Quotas
from router.admission.tokens import TokenVerifier
from router.config.log_schema import Log
from router.config.schema import RouterConfig
from router.config.tenant_file import TenantFile
from router.feeds.tenant_feed import TenantFeed
from router.observe.ended import EndingSink
from router.observe.journal import Journal
from router.observe.log import LEVELS, RequestLog
from router.observe.metrics import Metrics
from router.observe.request_counters import RequestCounters
from router.observe.tracing import trace_ended
from router.observe.used_tokens import UsageWriter
from router.policy.classes import Classes
from router.policy.policy_set import PolicySet
from router.policy.retry import RetryBudget
from router.request.attempt_rules import AttemptRules, FactsLookup
from router.request.clock import Clock
from router.request.decisions import RequestDecisions
from router.request.endings import Endings
from router.request.fleet_state import FleetState
from router.request.predictions import PredictionLimits
from router.request.preparation import Preparation
from router.request.queues import QueueSettings, RequestQueues
from router.request.quota_charges import QuotaCharges
from router.request.reading import RequestReader
from router.request.requests import Requests
from router.types import PodId

SYSTEM_CLOCK = Clock(time.monotonic, time.time)


@dataclass(frozen=True, slots=True)
class Routing:
    """The policies and workload classes of now."""

    policies: Callable[[], PolicySet]
    classes: Classes


@dataclass(frozen=True, slots=True)
class Recording:
    """What records requests. `usage`: of the file of usage, if there is one."""

    metrics: Metrics
    journal: Journal
    request_log: RequestLog | None = None
    usage: UsageWriter | None = None

    def sinks(self) -> Iterator[EndingSink]:
        """What receives the requests that ended."""
        yield self.metrics.ended
        yield self.journal.settle
        yield trace_ended
        if self.usage is not None:
            yield self.usage.ended
        if self.request_log is not None:
            yield self.request_log.ended


@dataclass(frozen=True, slots=True, kw_only=True)
class PodLookups:
    """What feeds know of pods. `senders`: the processes that send to the same pods."""

    handoff_facts: FactsLookup = lambda _pod, _dialect: None
    publishes_events: Callable[[PodId], bool] = lambda _pod: False
    senders: Callable[[], int] = lambda: 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedQuotas:
    """The quotas of tenants. `has_others`: whether other processes enforce them, too."""

    quotas: Quotas
    has_others: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """What a front drives."""

    state: FleetState
    reader: RequestReader
    decisions: RequestDecisions
    requests: Requests
    queues: RequestQueues | None
    clock: Clock


def build_core(
    config: RouterConfig,
    state: FleetState,
    routing: Routing,
    recording: Recording,
    lookups: PodLookups,
    shared: SharedQuotas | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> Core:
    """The core of one process. `shared`: None where no tenant has quotas."""
    counters = RequestCounters(recording.metrics)
    on_refusal = recording.metrics.by_class.observe_quota_refusal
    charges = None
    if shared is not None:
        charges = QuotaCharges(shared.quotas, clock, has_others=shared.has_others, on_refusal=on_refusal)
    decisions = RequestDecisions(state, routing.policies, routing.classes, recording.journal, counters)
    queues = None
    if (admission := config.admission) is not None:
        settings = QueueSettings(admission.limits, admission.default_slo, lookups.senders)
        queues = RequestQueues(settings, state, decisions, counters, clock)
    records_usage = config.tenants is not None or config.usage.file is not None
    trusts_uuids = config.edge.trust_engine_fields
    preparation = Preparation(
        state, decisions, charges, queues, clock, counts_tokens=records_usage, trusts_uuids=trusts_uuids
    )
    sinks = list(recording.sinks())
    endings = Endings(state, counters, sinks, clock, charges=charges, queues=queues, records_usage=records_usage)
    rules = _attempt_rules(config, lookups)
    models = frozenset(model.name for model in config.models if not model.is_pattern)
    return Core(
        state=state,
        reader=RequestReader(state.fleet, config.edge, config.limits.max_messages, models),
        decisions=decisions,
        requests=Requests(state, decisions, preparation, rules, counters, endings, clock),
        queues=queues,
        clock=clock,
    )


def _attempt_rules(config: RouterConfig, lookups: PodLookups) -> AttemptRules:
    index = config.index
    predictions = PredictionLimits(
        predicted_ttl_s=index.predicted_ttl_s,
        no_events_ttl_s=index.no_events_ttl_s,
        no_events_capacity_tokens=index.no_events_capacity_tokens,
        publishes_events=lookups.publishes_events,
    )
    return AttemptRules(
        retries=config.limits.retries,
        route_headers=config.edge.route_headers,
        budget=RetryBudget(config.limits.retry_budget),
        predictions=predictions,
        handoff_facts=lookups.handoff_facts,
    )


def build_tenants(config: RouterConfig) -> TenantFeed | None:
    """The feed of tenants; None if there are none. Raises `ConfigError`."""
    return TenantFeed(TenantFile(Path(config.tenants))) if config.tenants else None


def build_gate(config: RouterConfig, tenants: TenantFeed | None, tokens: TokenVerifier) -> AdmissionGate:
    """The gate that admits requests."""
    return AdmissionGate(tenants.current if tenants else None, config.edge.control_paths, tokens)


def request_log(config: Log) -> RequestLog | None:
    """The log of requests, if it is shown."""
    is_shown = config.requests and LEVELS[config.level] <= LEVELS["info"]
    return RequestLog(config.format, config.requests_sample) if is_shown else None
