"""Builds a router from its configuration and runs its background tasks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import structlog
from fastapi import FastAPI

from router.admission.gate import AdmissionGate
from router.admission.jwt_verifier import JwtVerifier
from router.admission.quotas import Quotas
from router.config.credentials import ListenCertificate, admin_tokens
from router.config.models import ModelPrior, build_links, load_link_classes, slo_lookup
from router.config.policy_files import PolicyFolder, load_classes
from router.config.schema import RouterConfig
from router.config.tenant_file import TENANTS_INTERVAL_S, watched_tenants
from router.config.tokenizer_files import load_tokenizer
from router.config.watched_file import StaleFile, StartupFiles
from router.engines.engine_catalog import conversion_of, picture_identities
from router.feeds.pod_log import untested
from router.feeds.policy_feed import PolicyFeed, RingFeed, review_change
from router.feeds.process_memory import gc_loop, release_loop
from router.feeds.signing_keys import SigningKeyFeed
from router.feeds.supervise import Feeds, running, wait_until
from router.fleet.fleet import Fleet
from router.frontends.admin.admin import PREVIEWED_TENANT, AdminRoutes, ExplainRoutes, admin_app
from router.frontends.admin.admin_access import AdminEdge
from router.frontends.admin.lora_adapters import LoraAdapters
from router.frontends.admin.page_snapshot import PageFacts, PageSource, SnapshotStream
from router.frontends.admin.views import MetricsPage, describe_pods, describe_readiness
from router.frontends.http.app import public_app
from router.frontends.http.attempt import Forwarder
from router.frontends.http.http_edge import HttpEdge
from router.frontends.http.openai_edge import OpenAiEdge
from router.frontends.http.upstream import UpstreamPools
from router.frontends.prompt_readers import FleetLookups
from router.frontends.prompts import NO_CLIENT, LoadTokenizer, Prompts
from router.observe.declared import of_process
from router.observe.ended import RecordedDecision
from router.observe.loop_lag import LoopLag
from router.observe.metrics import Metrics, add_process_metrics
from router.observe.shadow_caches import ShadowCaches
from router.policy.classes import Classes
from router.policy.eligible import context_tokens
from router.request.decisions import Routing
from router.request.inbound import HeaderList
from router.request.life import Core
from router.request.quota_charges import QuotaCharges
from router.request.reading import RequestReader
from router.types import Endpoint, InferenceRequest
from router.wiring.core_parts import (
    SYSTEM_CLOCK,
    DecisionRecords,
    build_tracing,
    continuation_rules,
    live_core,
    observers,
    request_log,
    usage_writer,
)
from router.wiring.fleet_parts import FleetParts, ready_pods
from router.wiring.http_front import build_forwarder

if TYPE_CHECKING:
    from router.wiring.cluster_member import ClusterMember

CERTIFICATE_CHECK_S = 1.0
MAX_ADMIN_CONNECTIONS = 128
SIGNING_KEYS_TIMEOUT_S = 11.0
"""Longest wait for the keys of identity providers: two requests of 5 s."""

log = structlog.get_logger()


class Front(NamedTuple):
    """How requests come in. `hands_over`: see `AttemptRules`. `has_objectives`: of gateways."""

    build: Callable[..., Forwarder]
    hands_over: bool = False
    has_objectives: bool = False


HTTP_FRONT = Front(build_forwarder)


class Program:
    """One router with all its parts. `files`: those that `config` was read from."""

    def __init__(
        self,
        config: RouterConfig,
        policies: Path,
        priors: dict[str, ModelPrior],
        load: LoadTokenizer = load_tokenizer,
        *,
        files: StartupFiles | None = None,
        front: Front = HTTP_FRONT,
    ) -> None:
        self._config = config
        self._front = front
        self._files = files or StartupFiles(config, None)
        self.metrics = Metrics()
        add_process_metrics(self.metrics.registry)
        rules = load_classes(config.classes)
        self._classes = Classes(rules)
        folder = PolicyFolder(policies, config.policy, rules.names)
        self.records = DecisionRecords(config.receipts, self.metrics)
        changes = self.records.changes
        review = partial(review_change, self.records.recent)
        self.policies = PolicyFeed(folder, self.metrics, review, changes=changes)
        self.fleet = Fleet(build_links(config.links, load_link_classes()))
        self._pools = UpstreamPools(config.limits)
        ready = partial(ready_pods, self.fleet)
        self.prompts = Prompts(config, self._pools.of, ready, self.metrics, load, _fleet_lookups(self.fleet))
        self._continuation = continuation_rules(config, self.prompts.readers)
        words_of = self._continuation.words_of if self._continuation else None
        self.pods = FleetParts(config, priors, self.metrics, self.fleet, self.prompts, self._pools, words_of, changes)
        self._shared_quotas = self.pods.cluster.quotas if self.pods.cluster and config.tenants else None
        self.quotas = Quotas(self._shared_quotas.sharing if self._shared_quotas else None)
        self._usage = usage_writer(config.usage, self.metrics)
        self._shadows = ShadowCaches(self.metrics, self.pods.gpus_of, config.index.no_events_capacity_tokens)
        self._request_log = request_log(config.log)
        self.core = self._build_core()
        self._forwarder = self._build_forwarder()
        self.tracing = build_tracing(config.tracing)
        self._tenants = watched_tenants(Path(config.tenants)) if config.tenants else None
        jwts = JwtVerifier()
        tenants = self._tenants
        grants = (lambda: tenants.value) if tenants else None
        self._gate = AdmissionGate(grants, config.edge.control_paths, jwts)
        failing = self.metrics[of_process.IDENTITY_PROVIDERS_FAILING].set
        self._signing_keys = SigningKeyFeed(grants, jwts, self._pools.get_url, failing) if grants else None
        self._metrics_page = self._build_metrics_page()
        self._page = self._build_page()
        self._snapshots = SnapshotStream(self._page.snapshot)
        self.certificate = ListenCertificate(config.listen.tls) if config.listen.tls else None
        self.edge = self._build_edge()
        self.admin = self._admin_app()

    def _build_core(self) -> Core:
        config, pods = self._config, self.pods
        recording = observers(self.metrics, self.records.recent, self._request_log, self._usage, self._shadows)
        charges = None
        if config.tenants is not None:
            on_refusal, has_others = self.metrics.by_class.observe_quota_refusal, self._shared_quotas is not None
            charges = QuotaCharges(self.quotas, SYSTEM_CLOCK, has_others, on_refusal)
        return live_core(
            config,
            pods.state,
            Routing(self.policies.current, self._classes, slo_lookup(config)),
            recording,
            charges=charges,
            handoff_facts=pods.handoff_facts.of,
            publishes_events=pods.publishes_events,
            senders=pods.senders,
            continuation=self._continuation,
            hands_over=self._front.hands_over,
        )

    def _build_forwarder(self) -> Forwarder:
        exchange = self._shared_quotas.next_exchange if self._shared_quotas else None
        edge, prompts, responses = self._config.edge, self.prompts, self.pods.responses
        return self._front.build(
            self.core, self._pools, edge, self.metrics, prompts.readers, responses, exchange, prompts.unlisted
        )

    def _build_edge(self) -> OpenAiEdge:
        config, core = self._config, self.core
        models = frozenset(model.name for model in config.models if not model.is_pattern)
        reader = RequestReader(self.fleet, config.edge, config.limits.max_messages, models)
        endings, responses = core.endings, self.pods.responses
        own = public_app(self.fleet, self.is_ready, self.run, partial(endings.refused, Endpoint.OTHER))
        return OpenAiEdge(
            own,
            self._gate,
            self._forwarder,
            endings,
            reader,
            responses,
            config.edge,
            config.limits,
            self.tracing,
            core.rules.memory,
        )

    def _build_metrics_page(self) -> MetricsPage:
        return MetricsPage(
            self.metrics,
            self.fleet,
            self.pods.ledger,
            self.pods.store,
            self.pods.calibrator,
            self.pods.scaling,
            self.pods.cluster.observe if self.pods.cluster else None,
            self.pods.sources.statuses,
            self.prompts.cache_bytes,
            self.records.recent.in_flight_tokens,
            self.pods.matching_of,
        )

    def _build_page(self) -> PageSource:
        admin, kept = self._config.admin, self._config.receipts
        facts = PageFacts(admin.gpu_hour_price, admin.currency, kept.prompts, kept.keep, self._stale_files)
        records, streams = self.records, self.pods.kv_streams
        return PageSource(self._metrics_page, streams, records.recent, self.policies, facts, records.changes)

    def _stale_files(self) -> list[StaleFile]:
        found = self._files.changed()
        if self.certificate and self.certificate.stale:
            found.append(self.certificate.stale)
        return found

    def _admin_app(self) -> HttpEdge:
        listen, limits = self._config.admin, self._config.limits
        tokens = admin_tokens(listen)
        routes = AdminRoutes(
            self.fleet,
            self.policies,
            self.pods.membership,
            ExplainRoutes(self.records.recent.find, self._read_preview, self._preview),
            partial(describe_pods, self._metrics_page, self.pods.kv_streams),
            self.pods.share_drains,
            self.records.changes.latest,
            self._readiness,
            self._metrics_page.render,
            self._snapshots,
            LoraAdapters(self.fleet, self._pools.of),
            has_tokens=tokens is not None,
        )
        connections = min(limits.max_connections, MAX_ADMIN_CONNECTIONS)
        limits = limits.model_copy(update={"max_connections": connections})
        return AdminEdge(limits, admin_app(routes), listen.host, tokens)

    def is_ready(self) -> bool:
        return self._readiness()[0]

    def _readiness(self) -> tuple[bool, dict[str, Any]]:
        return describe_readiness(self.fleet, self.policies, self._tenants, is_stopping=self.edge.is_stopping)

    async def _read_preview(
        self, endpoint: Endpoint, named: Mapping[bytes, bytes], body: bytes, request_id: str
    ) -> InferenceRequest:
        """A request of an operator, on behalf of the tenant that the call names, also in `edge.tenant_header`."""
        header = self._config.edge.tenant_header.lower().encode()
        name = named.get(PREVIEWED_TENANT, named.get(header, b"")).decode("latin-1")
        return await self.edge.read(endpoint, named, body, request_id, self._gate.named(name))

    async def _preview(self, request: InferenceRequest, headers: HeaderList) -> RecordedDecision:
        return await self.core.preview(request, headers, self._forwarder)

    @asynccontextmanager
    async def run(self, _app: FastAPI | None = None) -> AsyncIterator[None]:
        try:
            async with running(self._feeds()):
                await self._wait_for_peers()
                yield
        finally:
            if self._request_log is not None:
                self._request_log.close()
            self.records.close()
            if self._usage is not None:
                self._usage.close()
            self._pools.close()
            await self.pods.close()
            if self.tracing is not None:
                await self.tracing.sink.close()

    def summary(self) -> dict[str, Any]:
        return {
            "models": [model.name for model in self._config.models],
            "unlisted_models": self._config.unlisted_models,
            "tenants": len(self._tenants.value.by_name) if self._tenants else "not configured: serves every client",
            "pods": len(self.fleet.snapshot.pods),
            "policies": [policy.name for policy in self.policies.current().active],
        }

    async def _wait_for_peers(self) -> None:
        """Wait for the state of other routers, before this process serves."""
        keys, cluster, redis = self._signing_keys, self.pods.cluster, self._config.index.redis
        if keys:
            await wait_until(lambda: keys.is_tried, SIGNING_KEYS_TIMEOUT_S)
        if cluster and redis:
            self_test = self._config.probes.self_test
            await wait_for_cluster(cluster, self.fleet, redis.ready_timeout_s, self_test=self_test)

    def _feeds(self) -> Feeds:
        feeds = {
            **self.pods.feeds,
            "idle connections": self._pools.expire_idle,
            "policies": self.policies.run,
            "operators' page": self._snapshots.run,
            "shadow caches": self._shadows.run,
            "page's last hour": self._page.follow,
            "ring points": RingFeed(self.fleet, self.policies.current).run,
            "loop lag": LoopLag(self.metrics[of_process.LOOP_LAG_S].labels().observe, self.metrics.is_serving).run,
            "garbage collection": lambda: gc_loop(self.metrics.is_serving),
            "free memory": lambda: release_loop(lambda: self.edge.body_memory.freed_bytes),
        }
        if self._front.has_objectives and self._config.admission is not None:
            feeds |= self.pods.sources.objectives()
        if self._shared_quotas:
            feeds[self._shared_quotas.name] = self._shared_quotas.run
        if self.certificate:
            feeds["certificate"] = partial(self._renew, self.certificate)
        if self._tenants:
            feeds["tenants"] = partial(self._tenants.follow, TENANTS_INTERVAL_S)
        if self._signing_keys:
            feeds["signing keys"] = self._signing_keys.run
        return feeds

    async def _renew(self, certificate: ListenCertificate) -> None:
        while True:
            await asyncio.sleep(CERTIFICATE_CHECK_S)
            certificate.refresh()


async def wait_for_cluster(cluster: ClusterMember, fleet: Fleet, timeout_s: float, *, self_test: bool) -> None:
    """Wait until the cluster's index is loaded and, with `self_test`, each pod has a result, or until Redis does not
    answer: the index is then read in the background."""

    def complete() -> bool:
        is_read = cluster.loaded.is_set() and cluster.drains.is_tried
        return is_read and not (self_test and untested(fleet))

    await wait_until(lambda: cluster.is_away or complete(), timeout_s)
    if not complete():
        log.warning("serving before startup is complete", index=cluster.loaded.is_set(), untested=untested(fleet))


def _fleet_lookups(fleet: Fleet) -> FleetLookups:
    """What prompt readers ask about the fleet, by the pods of each moment."""

    def model(request: InferenceRequest) -> str:
        return request.adapter or request.model

    return FleetLookups(
        context_tokens=lambda request: context_tokens(fleet.snapshot, request),
        conversion=lambda request: conversion_of(fleet.snapshot, model(request), request.endpoint),
        identities=lambda request: picture_identities(fleet.snapshot, model(request), proven=request.id != NO_CLIENT),
    )
