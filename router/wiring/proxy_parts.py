"""Builds the admission gate and the forwarder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from router.admission.gate import AdmissionGate
from router.admission.tokens import TokenVerifier
from router.api.error_responses import response_for
from router.config.log_schema import Log
from router.config.schema import RouterConfig
from router.config.tenant_file import TenantFile
from router.feeds.policy_feed import PolicyFeed
from router.feeds.tenant_feed import TenantFeed
from router.observe.journal import Journal
from router.observe.log import LEVELS, RequestLog
from router.policy.classes import Classes
from router.proxy.dependencies import ForwardSettings, ProxyDependencies, QueueSettings
from router.proxy.forward import Forwarder
from router.proxy.headers import HeaderRules
from router.proxy.quota_admission import QuotaAdmission
from router.proxy.upstream import UpstreamPools
from router.proxy.usage_records import UsageRecords
from router.wiring.decision_records import call_later
from router.wiring.fleet_parts import FleetParts
from router.wiring.prompts import Prompts


@dataclass(frozen=True, slots=True)
class RequestRecords:
    """What is recorded of requests."""

    journal: Journal
    quotas: QuotaAdmission
    usage: UsageRecords | None


def build_tenants(config: RouterConfig) -> TenantFeed | None:
    """The feed of tenants; None if there are none. Raises `ConfigError`."""
    return TenantFeed(TenantFile(Path(config.tenants))) if config.tenants else None


def build_gate(config: RouterConfig, tenants: TenantFeed | None, tokens: TokenVerifier) -> AdmissionGate:
    """The gate that admits requests."""
    return AdmissionGate(tenants.current if tenants else None, config.edge.control_paths, tokens)


def build_forwarder(
    config: RouterConfig,
    parts: FleetParts,
    prompts: Prompts,
    pools: UpstreamPools,
    policies: PolicyFeed,
    classes: Classes,
    records: RequestRecords,
) -> Forwarder:
    """The forwarder. The fleet's feeds use the same `pools`."""
    settings = ForwardSettings(
        retries=config.limits.retries,
        retry_budget=config.limits.retry_budget,
        route_headers=config.edge.route_headers,
        headers=HeaderRules(trust_engine_fields=config.edge.trust_engine_fields, forward=config.edge.forward_headers),
        predicted_ttl_s=config.index.predicted_ttl_s,
        no_events_ttl_s=config.index.no_events_ttl_s,
        no_events_capacity_tokens=config.index.no_events_capacity_tokens,
        trusts_uuids=config.edge.trust_engine_fields,
    )
    dependencies = ProxyDependencies(
        fleet=parts.fleet,
        ledger=parts.ledger,
        breaker=parts.breaker,
        store=parts.store,
        readers=prompts.readers,
        policies=policies.current,
        classes=classes,
        pool=pools.of,
        handoff_facts=parts.handoff_facts.of,
        publishes_events=parts.publishes_events,
        metrics=parts.metrics,
        settings=settings,
        calibrator=parts.calibrator,
        journal=records.journal,
        request_log=_request_log(config.log),
        responses=parts.responses,
        quotas=records.quotas,
        usage=records.usage,
        status_of=lambda error: response_for(error).status,
        queue=_queue_settings(config, parts),
    )
    return Forwarder(dependencies)


def _queue_settings(config: RouterConfig, parts: FleetParts) -> QueueSettings | None:
    if (admission := config.admission) is None:
        return None
    workers, cluster = config.listen.workers, parts.cluster
    senders = (lambda: workers + cluster.other_workers) if cluster else (lambda: workers)
    return QueueSettings(admission.limits, admission.default_slo, senders)


def _request_log(config: Log) -> RequestLog | None:
    is_shown = config.requests and LEVELS[config.level] <= LEVELS["info"]
    return RequestLog(config.format, config.requests_sample, later=call_later) if is_shown else None
