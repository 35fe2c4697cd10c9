"""Builds the readers of prompts, and the state of pods with the feeds that update it: probes, loads, KV events,
self-tests, index. `warmroute doctor` needs no more."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from router.config.models import PodPriors
from router.config.schema import Limits, RouterConfig
from router.engines.adapter import PodFacts
from router.engines.engine_catalog import ENGINES, OWNERS, picture_identities, readings_of
from router.feeds.answers_test import AnswersTest
from router.feeds.calibration_feed import CalibrationFeed
from router.feeds.discovery.membership import Membership
from router.feeds.kv_zmq import CacheFacts, KvStreams
from router.feeds.lacks_test import LacksTest
from router.feeds.pod_log import MatchingLog, PodMatching, generation_change, log_changes, warn_of_others_models
from router.feeds.probe import HandoffFacts, PodProbe
from router.feeds.scrapes import LoadScrapes
from router.feeds.self_test import ContinuationTest, HitTest, SelfTest, SelfTestTiming
from router.feeds.supervise import Feeds
from router.feeds.watch import Check, Watch
from router.fleet.breaker import Breaker
from router.fleet.fleet import Fleet
from router.fleet.ledger import Ledger
from router.fleet.scaling import ScalingView
from router.frontends.http.upstream import UpstreamPools
from router.frontends.prompt_readers import FleetLookups
from router.frontends.prompts import NO_CLIENT, LoadTokenizer, Prompts
from router.frontends.response_locator import ResponseLocator
from router.index.stored_responses import StoredResponses
from router.observe.changes import Changes
from router.observe.declared import of_pods, of_requests
from router.observe.metrics import Metrics
from router.policy.calibration import Calibration
from router.policy.calibrator import Calibrator
from router.policy.eligible import context_tokens
from router.request.fleet_state import FleetState
from router.stores.prefix_store import LocalStore
from router.types import InferenceRequest, Pod, PodState, PrefixTrust
from router.wiring.pod_sources import PodSources, pod_sources

if TYPE_CHECKING:
    from router.frontends.held_requests import HeldRequests
    from router.wiring.cluster_member import ClusterMember


def build_prompts(
    config: RouterConfig, fleet: Fleet, pools: UpstreamPools, metrics: Metrics, load: LoadTokenizer
) -> Prompts:
    """The readers of prompts, by model. Raises `ConfigError`."""

    def ready(model: str) -> list[Pod]:
        pods = (status.pod for status in fleet.snapshot.pods if status.state is PodState.READY)
        return [pod for pod in pods if pod.serves(model)]

    def name(request: InferenceRequest) -> str:
        return request.adapter or request.model

    lookups = FleetLookups(
        context_tokens=lambda request: context_tokens(fleet.snapshot, request),
        readings=lambda request: readings_of(fleet.snapshot, name(request), request.endpoint),
        identities=lambda request: picture_identities(fleet.snapshot, name(request), proven=request.id != NO_CLIENT),
    )
    return Prompts(config, pools.of, ready, metrics, load, lookups)


def build_fleet(
    config: RouterConfig,
    priors: PodPriors,
    metrics: Metrics,
    fleet: Fleet,
    prompts: Prompts,
    pools: UpstreamPools,
    changes: Changes | None = None,
) -> FleetParts:
    """The state of pods and the feeds that update it. Raises `ConfigError`."""
    changes = changes or Changes()
    fleet.listen(log_changes(fleet, changes))  # first, so that lines are in the order of the changes
    fleet.listen(metrics.observe_change)
    ledger, refused = Ledger(), metrics[of_pods.EJECTIONS_REFUSED]
    scaling = ScalingView(fleet, ledger, config.scaling, config.probes.max_load_age_s, time.monotonic())
    calibrator = Calibrator(Calibration(), metrics, fleet.snapshot.links)
    breaker = Breaker(fleet, config.probes, ledger, lambda pod: refused.labels(pod).inc())
    sources = pod_sources(config)
    membership = Membership(fleet, priors.of, sources.by_name)
    membership.check(config.pods)
    cluster = None
    if config.index.redis:
        from router.wiring.cluster_member import join_cluster  # imports redis: 6 MiB

        cluster = join_cluster(config.index.redis, prompts.generations, ledger, calibrator, fleet, membership)
    store: LocalStore = cluster.store if cluster else LocalStore()
    shared = cluster.responses if cluster else None
    stored = StoredResponses(shared.add) if shared else StoredResponses()
    kv_streams = KvStreams(fleet, store, metrics.kv, breaker.exceeded)
    matching = PodMatching(
        fleet, prompts.unread_reason, membership, store, kv_streams, cluster.no_events_reason if cluster else None
    )
    parts = FleetParts(
        config=config,
        metrics=metrics,
        prompts=prompts,
        pools=pools,
        changes=changes,
        scaling=scaling,
        sources=sources,
        membership=membership,
        cluster=cluster,
        state=FleetState(
            fleet=fleet, ledger=ledger, breaker=breaker, store=store, calibrator=calibrator, stored=stored
        ),
        responses=ResponseLocator(fleet, stored, shared.find if shared else None),
        kv_streams=kv_streams,
        lacks=LacksTest(fleet, pools.post, timeout_s=SelfTestTiming().answer_timeout_s),
        handoff_facts=HandoffFacts(fleet, pools.get_url, timeout_s=config.probes.health_timeout_s),
        matching=matching,
        matching_log=MatchingLog(fleet, matching.of),
        held=held_requests(config.limits, fleet, metrics),
    )
    fleet.listen(parts.remove_gone)
    return parts


def held_requests(limits: Limits, fleet: Fleet, metrics: Metrics) -> HeldRequests | None:
    """What waits for the first pod of a model; None where nothing does."""
    if limits.hold_s is None:
        return None
    from router.frontends.held_requests import HeldRequests

    waiting = metrics[of_requests.WAITING_FOR_PODS]

    def report(model: str, count: int) -> None:
        waiting.labels(model).set(count)

    return HeldRequests(fleet, limits.hold_s, limits.max_waiting_for_pods, report)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetParts:
    """The state of pods, and what updates it."""

    config: RouterConfig
    metrics: Metrics
    prompts: Prompts
    pools: UpstreamPools
    changes: Changes
    scaling: ScalingView
    sources: PodSources
    membership: Membership
    cluster: ClusterMember | None
    state: FleetState
    responses: ResponseLocator
    kv_streams: KvStreams
    lacks: LacksTest
    handoff_facts: HandoffFacts
    matching: PodMatching
    matching_log: MatchingLog
    held: HeldRequests | None

    @property
    def fleet(self) -> Fleet:
        return self.state.fleet

    @property
    def feeds(self) -> Feeds:
        return {
            **self.membership.feeds,
            "checks of pods": Watch(self.fleet, self.checks).run,
            "matching log": self.matching_log.run,
            "calibration": CalibrationFeed(self.fleet, self.state.calibrator, lambda: self.membership.pods).run,
            **(self.cluster.feeds if self.cluster else {}),
        }

    @property
    def checks(self) -> Sequence[Sequence[Check]]:
        """The table of what is checked of each pod."""
        config, fleet, store = self.config.probes, self.fleet, self.state.store
        fetch, post = self.pools.fetch, self.pools.post
        tests, answers, has_events, prompts = list[Check](), list[Check](), self.matching.publishes_events, self.prompts
        if config.self_test:
            timing = SelfTestTiming(retest_s=config.self_test_interval_s)
            tests += SelfTest(fleet, store, post, prompts.of_probe, has_events, timing, prompts.advice).checks
            tests.append(HitTest(fleet, store, post, has_events, timing).check)
            answers.append(AnswersTest(fleet, post, timing).check)
            tests.append(ContinuationTest(fleet, post, prompts.words_of, timing).check)
        return (
            [PodProbe(fleet, self.state.breaker, fetch, self._on_described, config).check],
            [LoadScrapes(fleet, self.state.ledger, fetch, config, self.state.breaker.exceeded).check],
            [self.lacks.check, CacheFacts(fleet, store).check],
            [self.handoff_facts.check],
            [*tests, self.matching_log.check],
            answers,
            self._wake_ups(),
        )

    def _wake_ups(self) -> Sequence[Check]:
        if self.held is None or not self.config.scaling.wake_pods:
            return ()
        from router.feeds.wake_ups import WakeUps

        fetch, post, is_wanted = self.pools.fetch, self.pools.post, self.held.is_wanted
        return (WakeUps(self.fleet, self.state.ledger, fetch, post, is_wanted, time.monotonic).check,)

    async def close(self) -> None:
        """Close all connections. Call it after the feeds have ended."""
        await self.kv_streams.stop()
        if self.cluster:
            await self.cluster.close()

    def senders(self) -> int:
        return 1 + (self.cluster.work.known if self.cluster else 0)

    async def share_drains(self) -> str:
        """Apply the drains of this router and share them. Returns which routers have them."""
        await self.membership.follow_drains()
        if self.cluster is None:
            return "this router alone, until it ends; index.redis shares them"
        is_shared = await self.cluster.drains.share()
        return "all routers" if is_shared else "this router alone, until Redis answers; the log says why it does not"

    def _on_described(self, pod: Pod, facts: PodFacts) -> None:
        if self.membership.report(pod, OWNERS.get(facts.owner, ""), facts.dp_size):
            return
        warn_of_others_models(self.fleet, pod, facts)
        if change := generation_change(pod, facts):
            self.changes.add("generation", pod.id, change)
        self.prompts.add_served(facts.models, lambda: self.fleet.served)
        generation = self.prompts.generation_of(facts.models)
        self.membership.describe(pod, facts)
        self.membership.refresh_prior(pod)
        if facts.keeps_answers is not None:
            self.fleet.learn(pod.id, keeps_answers=facts.keeps_answers)
        if generation is None:
            return
        status, reported = self.fleet.status(pod.id), None if self.cluster else facts.kv_events
        source, described = self.membership.kv_events_of(pod, reported), status.pod if status else pod
        self.kv_streams.follow(described, generation, source, facts.no_events)
        if not self.config.probes.self_test:
            adapter = ENGINES[pod.engine]
            self.fleet.trust(pod.id, PrefixTrust.TRUSTED, "trusted by configuration (probes.self_test: false)")
            converts = frozenset(adapter.conversions_of(facts.front_end))
            self.fleet.learn(pod.id, converts=converts, continues=adapter.continues(described), reads_pictures=True)

    def remove_gone(self, pod: Pod, _old: PodState, new: PodState) -> None:
        if new is PodState.GONE:
            self.kv_streams.leave(pod.id)
            self.state.store.forget(pod.id)
            self.pools.remove(pod.id)
            self.state.calibrator.remove(pod)
            self.state.ledger.remove(pod.id)
