"""Builds a router from its configuration. `build_router` says what is built from what; what it builds is frozen."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fastapi import FastAPI

from router.admission.fair_bound import body_memory
from router.admission.gate import AdmissionGate
from router.admission.jwt_verifier import JwtVerifier
from router.admission.names import NamesInUse
from router.admission.quotas import Quotas
from router.config.credentials import ListenCertificate, admin_tokens
from router.config.models import PodPriors, build_links, load_link_classes, slo_lookup
from router.config.names_file import watched_names
from router.config.policy_files import PolicyFolder, load_classes
from router.config.tenant_file import TENANTS_INTERVAL_S, watched_tenants
from router.config.tokenizer_files import load_tokenizer
from router.config.watched_file import StartupFiles, WatchedFile
from router.errors import ConfigError
from router.feeds.policy_feed import PolicyFeed, RingFeed, review_change
from router.feeds.process_memory import gc_loop, release_loop
from router.feeds.supervise import Feeds, running, wait_until
from router.fleet.fleet import Fleet
from router.frontends.admin.admin import PREVIEWED_TENANT, AdminRoutes, ExplainRoutes, admin_app
from router.frontends.admin.admin_access import AdminEdge
from router.frontends.admin.lora_adapters import LoraAdapters
from router.frontends.admin.page_snapshot import PageFacts, PageSource, SnapshotStream
from router.frontends.admin.views import MetricsPage, WithoutPods, describe_pods, describe_readiness
from router.frontends.http.app import public_app
from router.frontends.http.attempt import Forwarder
from router.frontends.http.headers import HeaderRules
from router.frontends.http.kv_transfer import PullExecutor, SplitExecutor
from router.frontends.http.openai_edge import OpenAiEdge
from router.frontends.http.provider import ProviderSender
from router.frontends.http.upstream import UpstreamPools, UpstreamSender
from router.frontends.prompt_readers import NoPromptReader, PromptReader
from router.observe.changes import Changes
from router.observe.declared import of_process
from router.observe.log import LEVELS, RequestLog
from router.observe.loop_lag import LoopLag
from router.observe.metrics import Metrics, add_process_metrics
from router.observe.receipts import ReceiptLog, ReceiptWriter, UsageWriter
from router.observe.recent_decisions import RecentDecisions
from router.observe.shadow_caches import ShadowCaches
from router.observe.tracing import Tracing, trace_ended
from router.policy.classes import Classes
from router.policy.retry import RetryBudget
from router.request.attempt_rules import AttemptRules, ContinuationRules
from router.request.decisions import Routing
from router.request.fleet_state import Clock
from router.request.hosted import HostedModel
from router.request.life import Core, Observers
from router.request.queues import QueueSettings
from router.request.quota_charges import QuotaCharges
from router.request.reading import RequestReader
from router.types import Endpoint, Pod
from router.wiring.fleet import build_fleet, build_prompts

if TYPE_CHECKING:
    from router.admission.tenant import Tenants
    from router.config.models import ModelPrior
    from router.config.schema import Edge, PickerListen, RouterConfig, TracingConfig
    from router.config.watched_file import StaleFile
    from router.feeds.discovery.inference_pool import PoolObjectives
    from router.feeds.shared_rows import SharedQuotas
    from router.feeds.signing_keys import SigningKeyFeed
    from router.frontends.held_requests import HeldRequests
    from router.frontends.prompts import LoadTokenizer
    from router.frontends.response_locator import ResponseLocator
    from router.observe.ended import EndingSink
    from router.request.attempt_rules import FactsLookup
    from router.request.fleet_state import FleetState
    from router.types import InferenceRequest, PodId
    from router.wiring.fleet import FleetParts

MAX_ADMIN_CONNECTIONS = 128
SIGNING_KEYS_TIMEOUT_S = 11.0
"""Longest wait for the keys of identity providers: two requests of 5 s."""
USAGE_RETRIED_BYTES = 64 * 1024 * 1024
SYSTEM_CLOCK = Clock(time.monotonic, time.time)


class Front(NamedTuple):
    """How requests come in. `kind`: makes a `Forwarder` of its parts. `hands_over`: see `AttemptRules`.
    `has_objectives`: of gateways."""

    kind: Callable[..., Forwarder] = Forwarder
    hands_over: bool = False
    has_objectives: bool = False


HTTP_FRONT = Front()


def picker_front(picker: PickerListen) -> Front:
    """Serves gateways: names the pods of requests, or sends requests to them."""
    from router.frontends.extproc.picks import PickForwarder

    if picker.requests == "picker":
        return Front(has_objectives=True)
    return Front(partial(PickForwarder, picker=picker), hands_over=True, has_objectives=True)


def build_router(
    config: RouterConfig,
    policies: Path,
    priors: Mapping[str, ModelPrior],
    load: LoadTokenizer = load_tokenizer,
    *,
    files: StartupFiles | None = None,
    front: Front = HTTP_FRONT,
) -> Router:
    """One router with all its parts. `files`: those that `config` was read from. Raises `ConfigError`."""
    files, metrics, pools = files or StartupFiles(config, None), Metrics(), UpstreamPools(config.limits)
    add_process_metrics(metrics.registry)
    classes, rows = load_classes(config.classes), PodPriors(config.models, priors)
    folder = PolicyFolder(policies, config.policy, classes.names)
    records = build_records(config, metrics, rows)
    review = partial(review_change, records.recent)
    policy_feed = PolicyFeed(folder, metrics, review, changes=records.changes)
    fleet = Fleet(build_links(config.links, load_link_classes()))
    prompts = build_prompts(config, fleet, pools, metrics, load)
    pods = build_fleet(config, rows, metrics, fleet, prompts, pools, records.changes)
    access = build_access(pods, records.changes)
    core = build_core(
        config,
        pods.state,
        Routing(policy_feed.current, Classes(classes), slo_lookup(config)),
        observers(metrics, records.recent, records.requests, records.usage, records.shadows),
        charges=access.charges,
        handoff_facts=pods.handoff_facts.of,
        publishes_events=pods.matching.publishes_events,
        suspect=pods.lacks.suspect,
        senders=pods.senders,
        continuation=prompts.continuation,
        hands_over=front.hands_over,
    )
    next_exchange = access.shared.next_exchange if access.shared else None
    parts = core, pools, config.edge, metrics, prompts.readers, pods.responses, next_exchange, prompts.unlisted
    forwarder = build_forwarder(*parts, front.kind, provider_senders(config, pools), pods.held)
    objectives = pods.sources.objectives if front.has_objectives and config.admission is not None else ()
    edges = build_edge(
        pods, core, forwarder, records, policy_feed, access, files, objectives, lambda _app: router.run()
    )
    feeds = build_feeds(pods, records, policy_feed, access, edges, objectives)
    router = Router(config, pods, core, forwarder, records, policy_feed, access, edges, feeds)
    return router


@dataclass(frozen=True, slots=True)
class Router:
    """One router, ready to run."""

    config: RouterConfig
    pods: FleetParts
    core: Core
    forwarder: Forwarder
    records: Records
    policies: PolicyFeed
    access: Access
    edges: Edges
    feeds: Feeds

    @property
    def fleet(self) -> Fleet:
        return self.pods.fleet

    @property
    def metrics(self) -> Metrics:
        return self.pods.metrics

    @property
    def edge(self) -> OpenAiEdge:
        return self.edges.public

    def is_ready(self) -> bool:
        return self.edges.readiness()[0]

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        try:
            async with running(self.feeds):
                await self._wait_for_peers()
                yield
        finally:
            self.records.close()
            self.pods.pools.close()
            await self.pods.close()
            if self.edges.tracing is not None:
                await self.edges.tracing.sink.close()

    async def _wait_for_peers(self) -> None:
        """Wait for the state of other routers, before this process serves."""
        keys, cluster, redis = self.access.signing_keys, self.pods.cluster, self.config.index.redis
        if keys:
            await wait_until(lambda: keys.is_tried, SIGNING_KEYS_TIMEOUT_S)
        if cluster and redis:
            self_test = self.config.probes.self_test
            await cluster.wait(self.fleet, redis.ready_timeout_s, self_test=self_test)

    def summary(self) -> dict[str, Any]:
        tenants = self.access.tenants
        return {
            "models": [model.name for model in self.config.models],
            "unlisted_models": self.config.unlisted_models,
            "tenants": len(tenants.value.by_name) if tenants else "not configured: serves every client",
            "pods": len(self.fleet.snapshot.pods),
            "policies": [policy.name for policy in self.policies.current().active],
        }


# --- records of decisions, usage and spans ---


@dataclass(frozen=True, slots=True)
class Records:
    """What is recorded of requests and changes, and the files of it."""

    recent: RecentDecisions
    changes: Changes
    shadows: ShadowCaches
    receipts: ReceiptLog | None
    usage: UsageWriter | None
    requests: RequestLog | None

    def close(self) -> None:
        for each in (self.requests, self.receipts, self.usage):
            if each is not None:
                each.close()


def build_records(config: RouterConfig, metrics: Metrics, priors: PodPriors) -> Records:
    """Raises `ConfigError` if a file cannot be written."""
    kept, usage, log = config.receipts, config.usage.file, config.log
    receipts = receipt_writer = usage_writer = None
    if kept.file:
        lost, most = metrics[of_process.RECEIPTS_LOST].labels().inc, kept.max_file_bytes
        receipts = file = _log("receipts", kept.file, max_bytes=most, kept=kept.rotated_files, on_lost=lost)
        receipt_writer = ReceiptWriter(file.write, lambda: file.files, scenes=kept.replay_data)
    if usage is not None:
        lost = metrics[of_process.USAGE_LOST].labels().inc
        used = _log("usage", usage, retried_bytes=USAGE_RETRIED_BYTES, on_lost=lost)
        usage_writer = UsageWriter(secrets.token_hex(8), used.write, used.close)
    is_shown = log.requests and LEVELS[log.level] <= LEVELS["info"]
    no_events_tokens = config.index.no_events_capacity_tokens
    shadows = ShadowCaches(metrics, lambda pod: priors.gpus_of(pod.hardware, pod.models), no_events_tokens)
    return Records(
        recent=RecentDecisions(kept.keep, kept.prompts, receipt_writer, shadows.decided),
        changes=Changes(receipt_writer.write_change) if receipt_writer else Changes(),
        shadows=shadows,
        receipts=receipts,
        usage=usage_writer,
        requests=RequestLog(log.format, log.requests_sample, later=call_later) if is_shown else None,
    )


def call_later(delay_s: float, call: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(delay_s, call)


def _log(key: str, file: str, **options: Any) -> ReceiptLog:
    try:
        return ReceiptLog(Path(file), call_later, **options)
    except OSError as error:
        raise ConfigError(f"{key}: {error}") from error


def observers(
    metrics: Metrics,
    recent: RecentDecisions,
    log: RequestLog | None = None,
    usage: UsageWriter | None = None,
    shadows: ShadowCaches | None = None,
) -> Observers:
    """What records requests. `usage`: of the file of usage, if there is one."""
    sinks: list[EndingSink] = [metrics.ended, recent.settle, trace_ended]
    if shadows is not None:
        sinks.append(shadows.ended)
    if usage is not None:
        sinks.append(usage.ended)
    if log is not None:
        sinks.append(log.ended)
    return Observers(recent, metrics, sinks)


def build_tracing(config: TracingConfig) -> Tracing | None:
    """None if tracing is off. Raises `ConfigError`."""
    if not config.enabled:
        return None
    try:
        from router.observe.spans import SpanExport
    except ImportError as error:
        install = "run `pip install '.[otel]'` in the clone"
        raise ConfigError(f"tracing.enabled needs OpenTelemetry: {install} ({error})") from error
    try:
        sink = SpanExport(config.endpoint)
    except ValueError as error:
        raise ConfigError(f"tracing: a variable OTEL_* of the environment is invalid: {error}") from error
    return Tracing(sink, sample_share=config.sample_share, max_per_s=config.max_requests_per_s)


# --- who may come in ---


@dataclass(frozen=True, slots=True)
class Access:
    """Who may come in, and how much of each. `tenants`: None where every client is served; `shared`: what the routers
    of a cluster share of quotas; `files`: those that are read again, by the key that names them."""

    gate: AdmissionGate
    tenants: WatchedFile[Tenants] | None
    signing_keys: SigningKeyFeed | None
    quotas: Quotas
    shared: SharedQuotas | None
    charges: QuotaCharges | None
    names: NamesInUse | None
    files: Mapping[str, WatchedFile[Any]]


def build_access(pods: FleetParts, changes: Changes) -> Access:
    """Raises `ConfigError`."""
    config, metrics, jwts, names = pods.config, pods.metrics, JwtVerifier(), None
    files: dict[str, WatchedFile[Any]] = {}
    if config.names:
        path, names, providers = Path(config.names), NamesInUse(), [one.name for one in config.providers]
        files["names"] = watched_names(path, names, partial(changes.add, "names", path.name), providers)
    shared = pods.cluster.quotas if pods.cluster and (config.tenants or config.providers) else None
    quotas = Quotas(shared.sharing if shared else None)
    charges = QuotaCharges(quotas, SYSTEM_CLOCK, shared is not None, metrics.by_class.observe_quota_refusal)
    gate, tenants, signing_keys = AdmissionGate(None, config.edge.control_paths, jwts), None, None
    if config.tenants is not None:
        from router.feeds.signing_keys import SigningKeyFeed

        tenants = file = files["tenants"] = watched_tenants(Path(config.tenants))
        failing = metrics[of_process.IDENTITY_PROVIDERS_FAILING].set

        def grants() -> Tenants:
            return file.value

        gate = AdmissionGate(grants, config.edge.control_paths, jwts)
        signing_keys = SigningKeyFeed(grants, jwts, pods.pools.get_url, failing)
    is_charged = config.tenants is not None or config.providers
    return Access(gate, tenants, signing_keys, quotas, shared, charges if is_charged else None, names, files)


# --- the core, independent of any front ---


def build_core(
    config: RouterConfig,
    state: FleetState,
    routing: Routing,
    recording: Observers,
    clock: Clock = SYSTEM_CLOCK,
    charges: QuotaCharges | None = None,
    *,
    handoff_facts: FactsLookup,
    publishes_events: Callable[[PodId], bool],
    suspect: Callable[[Pod, str], object] = lambda _pod, _need: None,
    senders: Callable[[], int] = lambda: 1,
    continuation: ContinuationRules | None = None,
    hands_over: bool = False,
) -> Core:
    """The core of a router with this configuration. `senders`: the processes that send to the same pods."""
    to_pause = config.probes.clients_to_eject
    rules = AttemptRules(
        retries=config.limits.retries,
        route_headers=config.edge.route_headers,
        budget=RetryBudget(config.limits.retry_budget),
        index=config.index,
        publishes_events=publishes_events,
        handoff_facts=handoff_facts,
        suspect=suspect,
        memory=body_memory(config.limits.max_held_bytes),
        hosted={one.name: HostedModel(one, to_pause) for one in config.providers if not hands_over},
        hands_over=hands_over,
        runs_prefill=config.picker.prefill == "picker",
        continuation=continuation,
    )
    queue = QueueSettings(config.admission, senders) if config.admission is not None else None
    return Core(
        state,
        rules,
        routing,
        recording,
        clock,
        queue=queue,
        charges=charges,
        records_usage=config.tenants is not None or config.usage.file is not None,
        trusts_uuids=config.edge.trust_engine_fields,
    )


# --- the fronts: clients, and operators ---


def build_forwarder(
    core: Core,
    pools: UpstreamPools,
    edge: Edge,
    metrics: Metrics,
    readers: Mapping[str, PromptReader],
    responses: ResponseLocator,
    next_exchange: Callable[[], Awaitable[None]] | None = None,
    unlisted: PromptReader | None = None,
    kind: Callable[..., Forwarder] = Forwarder,
    providers: Mapping[PodId, ProviderSender] | None = None,
    held: HeldRequests | None = None,
) -> Forwarder:
    """`next_exchange`, `unlisted`: see `Waits`. `kind`: makes one of the parts of a `Forwarder`."""
    rules = HeaderRules(trust_engine_fields=edge.trust_engine_fields, forward=edge.forward_headers)
    sender, facts = UpstreamSender(pools.of, rules), core.rules.handoff_facts
    return kind(
        core=core,
        readers=readers,
        unlisted=unlisted or NoPromptReader(lambda *_: None),
        responses=responses,
        next_exchange=next_exchange,
        sender=sender,
        splits=SplitExecutor(core.state, facts, sender, metrics),
        pulls=PullExecutor(core.state.fleet, facts, sender),
        providers=providers or {},
        held=held,
    )


def provider_senders(config: RouterConfig, pools: UpstreamPools) -> Mapping[PodId, ProviderSender]:
    found = {}
    for one in config.providers:
        times = {"first_byte_timeout_s": one.timeout_s, "idle_timeout_s": one.timeout_s}
        found[one.pod.id] = ProviderSender(one, pools.add(one.pod, config.limits.model_copy(update=times)))
    return found


@dataclass(frozen=True, slots=True)
class Edges:
    """The listeners for clients and for operators, and what operators see."""

    public: OpenAiEdge
    admin: AdminEdge
    page: PageSource
    snapshots: SnapshotStream
    certificate: ListenCertificate | None
    tracing: Tracing | None
    readiness: Callable[[], tuple[bool, dict[str, Any]]]


def build_edge(
    pods: FleetParts,
    core: Core,
    forwarder: Forwarder,
    records: Records,
    policies: PolicyFeed,
    access: Access,
    files: StartupFiles,
    objectives: Sequence[PoolObjectives],
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]],
) -> Edges:
    """`objectives`: what gives requests their priority. `lifespan`: what runs while clients are served. Raises
    `ConfigError`."""
    config, fleet, hosted, holds = pods.config, pods.fleet, core.rules.hosted, pods.config.limits.hold_s is not None
    without_pods = WithoutPods.of(holds=holds, has_providers=bool(hosted))

    def readiness() -> tuple[bool, dict[str, Any]]:
        return describe_readiness(fleet, policies, access.files, without_pods, is_stopping=edge.is_stopping)

    def stale_files() -> list[StaleFile]:
        stale = certificate.stale if certificate else None
        return [*files.changed(), *([stale] if stale else [])]

    tracing = build_tracing(config.tracing)
    certificate = ListenCertificate(config.listen.tls) if config.listen.tls else None
    models = frozenset(model.name for model in config.models if not model.is_pattern)
    refused = partial(core.endings.refused, Endpoint.OTHER)
    edge = OpenAiEdge(
        public_app(fleet, lambda: readiness()[0], lifespan, refused, access.names, models if holds else None, hosted),
        access.gate,
        forwarder,
        core.endings,
        RequestReader(fleet, config.edge, config.limits.max_messages, models, access.names, hosted),
        pods.responses,
        config.edge,
        config.limits,
        tracing,
        core.rules.memory,
        pods.held,
    )
    gauges = MetricsPage(
        pods.metrics,
        fleet,
        pods.state.ledger,
        pods.state.store,
        pods.state.calibrator,
        pods.scaling,
        pods.cluster.observe if pods.cluster else None,
        [*pods.sources.statuses, *(one.status for one in objectives)],
        pods.prompts.cache_bytes,
        records.recent.in_flight_tokens,
        pods.matching.of,
    )
    price, kept = (config.admin.gpu_hour_price, config.admin.currency), config.receipts
    facts = PageFacts(*price, kept.prompts, kept.keep, stale_files, without_pods)
    page = PageSource(gauges, pods.kv_streams, records.recent, policies, facts, records.changes)
    snapshots = SnapshotStream(page.snapshot)
    explain = _explain_routes(pods, core, forwarder, records, edge, access.gate)
    admin = _admin_edge(pods, policies, records, page, snapshots, explain, readiness)
    return Edges(edge, admin, page, snapshots, certificate, tracing, readiness)


def _explain_routes(
    pods: FleetParts, core: Core, forwarder: Forwarder, records: Records, edge: OpenAiEdge, gate: AdmissionGate
) -> ExplainRoutes:
    header = pods.config.edge.tenant_header.lower().encode()

    async def read(endpoint: Endpoint, named: Mapping[bytes, bytes], body: bytes, request_id: str) -> InferenceRequest:
        """A request of an operator, on behalf of the tenant that the call names, also in `edge.tenant_header`."""
        name = named.get(PREVIEWED_TENANT, named.get(header, b"")).decode("latin-1")
        return await edge.read(endpoint, named, body, request_id, gate.named(name))

    return ExplainRoutes(records.recent.explained, read, partial(core.preview, forwarder, gate.named))


def _admin_edge(
    pods: FleetParts,
    policies: PolicyFeed,
    records: Records,
    page: PageSource,
    snapshots: SnapshotStream,
    explain: ExplainRoutes,
    readiness: Callable[[], tuple[bool, dict[str, Any]]],
) -> AdminEdge:
    listen, limits = pods.config.admin, pods.config.limits
    tokens = admin_tokens(listen)
    routes = AdminRoutes(
        pods.fleet,
        policies,
        pods.membership,
        explain,
        partial(describe_pods, page.gauges, pods.kv_streams),
        pods.share_drains,
        records.changes.latest,
        readiness,
        page.gauges.render,
        snapshots,
        LoraAdapters(pods.fleet, pods.pools.of),
        has_tokens=tokens is not None,
    )
    connections = min(limits.max_connections, MAX_ADMIN_CONNECTIONS)
    limits = limits.model_copy(update={"max_connections": connections})
    return AdminEdge(limits, admin_app(routes), listen.host, tokens)


# --- what runs in the background ---


def build_feeds(
    pods: FleetParts,
    records: Records,
    policies: PolicyFeed,
    access: Access,
    edges: Edges,
    objectives: Sequence[PoolObjectives],
) -> Feeds:
    """Background tasks by name, in the order of their start."""
    metrics = pods.metrics
    feeds = {
        **pods.feeds,
        "idle connections": pods.pools.expire_idle,
        "policies": policies.run,
        "operators' page": edges.snapshots.run,
        "shadow caches": records.shadows.run,
        "page's last hour": edges.page.follow,
        "ring points": RingFeed(pods.fleet, policies.current).run,
        "loop lag": LoopLag(metrics[of_process.LOOP_LAG_S].labels().observe, metrics.is_serving).run,
        "garbage collection": lambda: gc_loop(metrics.is_serving),
        "free memory": lambda: release_loop(lambda: edges.public.body_memory.freed_bytes),
    }
    feeds |= {one.status.source: one.run for one in objectives}
    if access.shared:
        feeds[access.shared.name] = access.shared.run
    if edges.certificate:
        feeds["certificate"] = edges.certificate.follow
    feeds |= {key: partial(file.follow, TENANTS_INTERVAL_S) for key, file in access.files.items()}
    if access.signing_keys:
        feeds["signing keys"] = access.signing_keys.run
    return feeds
