"""How do the parts become a router?

Builds the owners, connects news to them and owners to the proxy, and starts and stops what runs in the background.
This file decides nothing about requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import structlog
from fastapi import FastAPI

from router.api.admin_commands import DRAIN, AdminCommands
from router.api.app import App, OwnRoutes, own_app
from router.api.explain_routes import ExplainRoutes
from router.api.openai_edge import OpenAiEdge
from router.api.views import MetricsPage, describe_pods
from router.config.links import build_links, load_link_classes
from router.config.policies import PolicyFolder, load_classes
from router.config.priors import ModelPrior, PodPriors
from router.config.schema import RouterConfig
from router.engines.adapter import PodFacts
from router.feeds.calibration_feed import CalibrationFeed
from router.feeds.discovery.membership import Membership
from router.feeds.discovery.pod_source import ConfiguredPods
from router.feeds.handoff_facts import HandoffFacts
from router.feeds.http_client import open_client
from router.feeds.kv_streams import KvStreams
from router.feeds.load_feed import LoadFeed
from router.feeds.policy_feed import PolicyFeed
from router.feeds.probe import ProbeFeed
from router.feeds.selftest import ParityFeed
from router.feeds.supervise import supervise
from router.fleet.breaker import Breaker
from router.fleet.fleet import Fleet
from router.fleet.ledger import Ledger
from router.fleet.lifecycle import PodEvent
from router.observe.calibrator import Calibrator
from router.observe.log import RequestLog
from router.observe.loop_lag import LoopLag
from router.observe.metrics import Metrics
from router.observe.shadow import Shadows
from router.policy.calibration import Calibration
from router.policy.classes import Classes
from router.policy.policy_set import PolicySet
from router.policy.spec import Policy
from router.prompt.tokenizer import load_tokenizer
from router.proxy.forward import Forwarder
from router.proxy.upstream import UpstreamPools
from router.stores.prefix_store import LocalStore, PrefixStore
from router.types import Generation, Pod, PodId, PodState, PrefixTrust
from router.wiring.cluster_member import ClusterMember
from router.wiring.decision_records import DecisionRecords
from router.wiring.forwarding import forwarding_of, timeouts_of
from router.wiring.gc_tuning import gc_loop
from router.wiring.joining import Joining
from router.wiring.prompts import LoadTokenizer, Prompts
from router.workers.shared_view import SharedOwners
from router.workers.worker_sync import WorkerHooks, WorkerIdentity, WorkerSync

IDLE_SWEEP_S = 1.0

log = structlog.get_logger()


def build(
    config: RouterConfig, policies: Path, priors: dict[str, ModelPrior], worker: WorkerIdentity | None = None
) -> App:
    """What `EdgeProtocol` serves; its lifespan starts and stops everything else. `policies` is their folder. Raises
    `ConfigError`."""
    return Program(config, policies, priors, worker=worker).app


class Program:
    """All owners and how they hang together. `worker`: set in one of several workers."""

    def __init__(
        self,
        config: RouterConfig,
        policies: Path,
        priors: dict[str, ModelPrior],
        load: LoadTokenizer = load_tokenizer,
        *,
        worker: WorkerIdentity | None = None,
    ) -> None:
        self._config = config
        self.metrics = Metrics()
        rules = load_classes(config.classes)
        self._classes = Classes(rules)
        folder = PolicyFolder(policies, config.policy, rules.names)
        self.policies = PolicyFeed(folder, self.metrics, self._review)
        links = build_links(config.links, load_link_classes())
        self.fleet = Fleet(links)
        self.calibrator = Calibrator(Calibration(), self.metrics, links)
        self.ledger = Ledger()
        self.breaker = Breaker(
            self.fleet,
            failures_to_eject=config.probes.failures_to_eject,
            late_factor=config.probes.slow_ttft_factor,
            late_to_eject=config.probes.slow_ttfts_to_eject,
        )
        self.client = open_client()
        self.handoff_facts = HandoffFacts(self.fleet, self.client, timeout_s=config.probes.health_timeout_s)
        self.pools = UpstreamPools(timeouts_of(config))
        self.prompts = Prompts(config, self.pools.of, self._ready_pods, self.metrics, load)
        redis = config.index.redis
        local = LocalStore()
        self.cluster = ClusterMember(redis, self.ledger, local, self._same_tokens, worker) if redis else None
        self.store: PrefixStore = self.cluster.store if self.cluster else local
        self.membership = Membership(
            self.fleet, PodPriors(config.models, priors).of, {"configuration": ConfiguredPods(config.pods)}
        )
        self.membership.check(config.pods)
        shared = self.cluster.calibration if self.cluster else None
        self.calibration = CalibrationFeed(self.fleet, self.calibrator, lambda: self.membership.pods, shared)
        shadows = Shadows(self._policy_named, self.metrics)
        self.records = DecisionRecords(config.receipts, shadows, self.metrics, self.cluster)
        self.kv_streams = KvStreams(self.fleet, self.store, self.metrics)
        observe_cluster = self.cluster.observe if self.cluster else None
        self.metrics_page = MetricsPage(
            self.metrics, self.fleet, self.ledger, self.store, self.calibrator, observe_cluster
        )
        self.admin_commands = AdminCommands(self.fleet, self.policies, self.membership.add, self.membership.remove)
        self.worker_sync = self._worker_sync(worker, local) if worker else None
        self.fleet.listen(self._on_change)
        self.app = self._app()

    def _worker_sync(self, worker: WorkerIdentity, local: LocalStore) -> WorkerSync:
        owners = SharedOwners(self.fleet, self.ledger, self.breaker, local, self.calibrator, self._classes)
        find, commands = self.records.journal.find, self.admin_commands
        hooks = WorkerHooks(commands.apply_remote, commands.reload_local, self.metrics_page.observe, find)
        sync = WorkerSync(worker, owners, hooks, self.metrics)
        commands.publish = sync.publish_command
        return sync

    # --- the edge ---

    def _app(self) -> App:
        logged = self._config.log
        self.forwarder = Forwarder(
            fleet=self.fleet,
            ledger=self.ledger,
            breaker=self.breaker,
            store=self.store,
            readers=self.prompts.readers,
            policies=self.policies.current,
            classes=self._classes,
            pool=self.pools.of,
            handoff_facts=self.handoff_facts.of,
            publishes_events=self._publishes_events,
            metrics=self.metrics,
            forwarding=forwarding_of(self._config),
            calibrator=self.calibrator,
            journal=self.records.journal,
            request_log=RequestLog(logged.format, logged.requests_sample) if logged.requests else None,
        )
        edge = OpenAiEdge(
            self.forwarder,
            self.fleet,
            self.metrics,
            self._config.edge,
            self._config.limits,
            frozenset(model.name for model in self._config.models),
        )
        find, max_bytes = self.records.journal.find, self._config.limits.max_body_bytes
        routes = OwnRoutes(
            self.fleet,
            self.policies,
            self.admin_commands,
            ExplainRoutes(find, self._find_elsewhere, edge.inference, self.forwarder.preview, max_bytes),
            partial(describe_pods, self.fleet, self.ledger, self.store, self.kv_streams),
            self.worker_sync.render if self.worker_sync else self.metrics_page.render,
        )
        own = own_app(routes, self._life)
        return App(edge, own)

    @asynccontextmanager
    async def _life(self, _app: FastAPI) -> AsyncIterator[None]:
        """Everything that runs beside requests."""
        feeds = self._feeds()
        tasks = [asyncio.create_task(supervise(name, run), name=name) for name, run in feeds.items()]
        try:
            await self._join()
            active = [policy.name for policy in self.policies.current().active]
            log.info("serving", policies=active, pods=len(self.membership.pods), models=sorted(self.prompts.readers))
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.records.close()
            await self.kv_streams.stop()
            if self.cluster:
                await self.cluster.close()
            self.pools.close()
            await self.client.aclose()

    async def _join(self) -> None:
        """Those that serve already."""
        joining = Joining(self.fleet, parity=self._config.probes.self_test)
        if self.cluster and self._config.index.redis:
            await joining.cluster(self.cluster, self._config.index.redis.ready_timeout_s)
        if self.worker_sync:
            await joining.workers(self.worker_sync)

    def _feeds(self) -> Mapping[str, Any]:
        probes = self._config.probes
        fetch, share = self.pools.fetch, self.worker_sync.scrape_share if self.worker_sync else None
        probe = ProbeFeed(
            self.fleet,
            self.breaker,
            fetch,
            self._on_described,
            interval_s=probes.health_interval_s,
            timeout_s=probes.health_timeout_s,
        )
        load = LoadFeed(
            self.fleet,
            self.ledger,
            fetch,
            interval_s=probes.load_interval_s,
            timeout_s=probes.load_timeout_s,
            share=share,
        )
        running = {
            **self.membership.feeds,
            "probe": probe.run,
            "load": load.run,
            "handoff facts": self.handoff_facts.run,
            "idle": self._sweep_idle,
            "policies": self.policies.run,
            "loop lag": LoopLag(self.metrics.loop_lag_s.labels().observe, self.metrics.is_serving).run,
            "garbage": lambda: gc_loop(self.metrics.is_serving),
        }
        if probes.self_test:
            parity = ParityFeed(
                self.fleet,
                self.store,
                self.client,
                self.prompts.of_probe,
                self._publishes_events,
                retest_s=probes.self_test_interval_s,
            )
            running["parity"] = parity.run
        feeds_of_cluster = self.cluster.feeds if self.cluster else {}
        feeds_of_workers = self.worker_sync.feeds if self.worker_sync else {}
        return {**running, **feeds_of_cluster, **feeds_of_workers, **self.calibration.runs, **self.records.feeds}

    def _publishes_events(self, pod_id: PodId) -> bool:
        """Will blocks that come into this pod's cache show up in the index?"""
        return self.kv_streams.follows(pod_id) or self.store.is_published(pod_id)

    def _same_tokens(self, generation: Generation) -> bool:
        """Can blocks of this generation be those of a prompt that is read here?"""
        ours = self.prompts.generations.get(generation.model)
        same = ours and (ours.tokenizer, ours.block_size_tokens) == (generation.tokenizer, generation.block_size_tokens)
        if ours and not same:
            log.warning("a publisher's tokenizer or block size is not ours: its blocks mean nothing here",
                        model=generation.model, ours=(ours.tokenizer, ours.block_size_tokens),
                        theirs=(generation.tokenizer, generation.block_size_tokens))  # fmt: skip
        return bool(same)

    async def _sweep_idle(self) -> None:
        while True:
            await asyncio.sleep(IDLE_SWEEP_S)
            self.pools.expire_idle()

    # --- pods ---

    def _ready_pods(self, model: str) -> list[Pod]:
        return [
            status.pod
            for status in self.fleet.snapshot.pods
            if status.state is PodState.READY and status.pod.serves(model)
        ]

    def _on_described(self, pod: Pod, facts: PodFacts) -> None:
        """A pod has come to life: know what it serves, and follow its cache."""
        generation = next(
            (self.prompts.generations[name] for name in facts.models if name in self.prompts.generations), None
        )
        size = generation.block_size_tokens if generation else 1
        self.fleet.describe(
            pod.id,
            models=facts.models,
            adapters=facts.adapters,
            max_model_len_tokens=facts.max_model_len_tokens,
            block_size_tokens=facts.block_size_tokens,
            capacity_blocks=facts.capacity_tokens // size if facts.capacity_tokens else None,
            version=facts.version,
        )
        if generation is None:
            log.warning(
                "no tokenizer configured for what this pod serves: it is routed by load alone",
                pod=pod.id,
                serves=facts.models,
                do="name the model under models[] with its tokenizer",
            )
            return
        self.membership.refresh_prior(pod)
        described, reported = self.fleet.status(pod.id), None if self.cluster else facts.kv_events
        source = self.membership.kv_events_of(pod, reported)
        self.kv_streams.follow(described.pod if described else pod, generation, source)
        if not self._config.probes.self_test:
            self.fleet.trust(pod.id, PrefixTrust.TRUSTED, "trusted by configuration (probes.self_test: false)")

    def _on_change(self, pod: Pod, old: PodState, new: PodState) -> None:
        log.info("pod", pod=pod.id, was=old.value, now=new.value)
        if (
            new is PodState.JOINING
            and self.worker_sync
            and self.worker_sync.command(DRAIN + pod.id) == PodEvent.DRAIN.value
        ):
            self.fleet.event(pod.id, PodEvent.DRAIN)
        if new is PodState.GONE:
            self.kv_streams.leave(pod.id)
            self.store.forget(pod.id)
            self.pools.remove(pod.id)
            self.calibrator.remove(pod)

    # --- what people see ---

    async def _review(self, old: PolicySet, new: PolicySet) -> str | None:
        return await self.records.review(old, new)

    def _policy_named(self, name: str) -> Policy | None:
        return self.policies.current().library.get(name)

    async def _find_elsewhere(self, request_id: str) -> bytes | None:
        return await self.worker_sync.find(request_id) if self.worker_sync else None
