"""Builds the feeds that observe pods and the objects that they update: probes, loads, KV events, self-tests, index."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import structlog

from router.config.models import ModelPrior, PodPriors
from router.config.schema import RouterConfig
from router.engines.adapter import PodFacts
from router.engines.engine_catalog import ENGINES, OWNERS
from router.feeds.calibration_feed import CalibrationFeed
from router.feeds.discovery.membership import Membership
from router.feeds.kv_zmq import KvStreams
from router.feeds.pod_log import MatchingLog, log_changes
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
from router.frontends.prompts import Prompts
from router.frontends.response_locator import ResponseLocator
from router.index.stored_responses import StoredResponses
from router.observe.changes import Changes
from router.observe.declared import of_pods
from router.observe.metrics import Metrics
from router.policy.calibration import Calibration
from router.policy.calibrator import Calibrator
from router.request.continuation.answer_words import WordsOf
from router.request.continuation.terms import WITH_IDS
from router.request.fleet_state import FleetState
from router.stores.prefix_store import LocalStore
from router.types import Matching, Pod, PodId, PodState, PrefixTrust
from router.wiring.pod_sources import PodSources

if TYPE_CHECKING:
    from router.wiring.cluster_member import ClusterMember

OF_GENERATION = ("models", "weights", "version", "block_size_tokens")
"""What pods report of the generation of their blocks."""

log = structlog.get_logger()


class FleetParts:
    """The state of pods and the feeds that update it. Raises `ConfigError`."""

    def __init__(
        self,
        config: RouterConfig,
        priors: Mapping[str, ModelPrior],
        metrics: Metrics,
        fleet: Fleet,
        prompts: Prompts,
        pools: UpstreamPools,
        words_of: WordsOf | None = None,
        changes: Changes | None = None,
    ) -> None:
        self._config = config
        self.metrics = metrics
        self._prompts = prompts
        self._pools = pools
        self._words_of = words_of
        self.fleet = fleet
        self._changes = changes or Changes()
        fleet.listen(log_changes(fleet, self._changes))  # first, so that lines are in the order of the changes
        fleet.listen(metrics.observe_change)
        self.ledger = Ledger()
        max_load_age_s = config.probes.max_load_age_s
        self.scaling = ScalingView(fleet, self.ledger, config.scaling, max_load_age_s, time.monotonic())
        self.calibrator = Calibrator(Calibration(), metrics, fleet.snapshot.links)
        refused = metrics[of_pods.EJECTIONS_REFUSED]
        self.breaker = Breaker(fleet, config.probes, self.ledger, lambda pod: refused.labels(pod).inc())
        self.sources = PodSources(config)
        self._priors = PodPriors(config.models, priors)
        self.membership = Membership(fleet, self._priors.of, self.sources.by_name)
        self.membership.check(config.pods)
        self.cluster = self._join_cluster()
        self.store: LocalStore = self.cluster.store if self.cluster else LocalStore()
        shared = self.cluster.responses if self.cluster else None
        self.state = FleetState(
            fleet=fleet,
            ledger=self.ledger,
            breaker=self.breaker,
            store=self.store,
            calibrator=self.calibrator,
            stored=StoredResponses(shared.add) if shared else StoredResponses(),
        )
        self.responses = ResponseLocator(fleet, self.state.stored, shared.find if shared else None)
        self.kv_streams = KvStreams(fleet, self.store, metrics.kv, self.breaker.exceeded)
        self.handoff_facts = HandoffFacts(fleet, pools.get_url, timeout_s=config.probes.health_timeout_s)
        fleet.listen(self._remove_gone)
        self.matching_log = MatchingLog(fleet, self.matching_of)

    def _join_cluster(self) -> ClusterMember | None:
        redis, membership = self._config.index.redis, self.membership
        if redis is None:
            return None
        from router.wiring.cluster_member import ClusterMember, ReadableGenerations  # imports redis: 6 MiB

        readable, drains = ReadableGenerations(self._prompts.generations), (membership.drains, membership.follow_drains)
        return ClusterMember(redis, readable, self.ledger, self.calibrator, self.fleet, *drains)

    @property
    def feeds(self) -> Feeds:
        return {
            **self.membership.feeds,
            "checks of pods": Watch(self.fleet, self.checks).run,
            "matching log": self.matching_log.run,
            "calibration": CalibrationFeed(self.fleet, self.calibrator, lambda: self.membership.pods).run,
            **(self.cluster.feeds if self.cluster else {}),
        }

    @property
    def checks(self) -> Sequence[Sequence[Check]]:
        """The table of what is checked of each pod."""
        config, fleet, fetch, post = self._config.probes, self.fleet, self._pools.fetch, self._pools.post
        tests, has_events, prompts = list[Check](), self.publishes_events, self._prompts
        if config.self_test:
            timing = SelfTestTiming(retest_s=config.self_test_interval_s)
            tests += SelfTest(fleet, self.store, post, prompts.of_probe, has_events, timing, prompts.advice).checks
            tests.append(HitTest(fleet, self.store, post, has_events, timing).check)
            tests.append(ContinuationTest(fleet, post, self._words_of or (lambda _model: None), timing).check)
        return (
            [PodProbe(fleet, self.breaker, fetch, self._on_described, config).check],
            [LoadScrapes(fleet, self.ledger, fetch, config, self.breaker.exceeded).check],
            [self.handoff_facts.check],
            [*tests, self.matching_log.check],
        )

    async def close(self) -> None:
        """Close all connections. Call it after the feeds have ended."""
        await self.kv_streams.stop()
        if self.cluster:
            await self.cluster.close()

    def gpus_of(self, pod: Pod) -> int:
        return self._priors.gpus_of(pod.hardware, pod.models)

    def publishes_events(self, pod_id: PodId) -> bool:
        """Whether the index receives the pod's KV events."""
        is_followed = self.kv_streams.follows(pod_id) and not self.kv_streams.problems.get(pod_id)
        return is_followed or self.store.is_published(pod_id, time.monotonic())

    def matching_of(self, pod: Pod) -> tuple[Matching, str]:
        """How prompts are matched on a pod, and why not by its KV events."""
        if why := next(filter(None, map(self._prompts.unread_reason, pod.models)), ""):
            return Matching.OFF, why
        if pod.trust is not PrefixTrust.TRUSTED:
            return Matching.OFF, f"self-test {pod.trust.value}: {self.fleet.trust_reason(pod.id)}"
        if self.publishes_events(pod.id):
            return Matching.EVENTS, ""
        why = self._no_events_reason(pod)
        return (Matching.NO_EVENTS, f"no KV events: {why}") if why else (Matching.PREDICTED, "")

    def _no_events_reason(self, pod: Pod) -> str:
        """The first known cause, and what to do; empty where there should be none."""
        config = self.membership.config_of(pod)
        if config is not None and config.kv_events == "off":
            return ""
        own, has_flag = self.kv_streams.problems.get(pod.id, ""), ENGINES[pod.engine].kv_events_flag
        if self.cluster is None or self.kv_streams.follows(pod.id) or not has_flag:
            return own
        return self.cluster.no_events_reason(pod, own)

    def senders(self) -> int:
        return 1 + (self.cluster.other_routers if self.cluster else 0)

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
        self._warn_of_others_models(pod, facts)
        if change := generation_change(pod, facts):
            self._changes.add("generation", pod.id, change)
        self._prompts.add_served(facts.models, lambda: self.fleet.served)
        generation = self._prompts.generation_of(facts.models)
        self.membership.describe(pod, facts)
        self.membership.refresh_prior(pod)
        if generation is None:
            return
        described, reported = self.fleet.status(pod.id), None if self.cluster else facts.kv_events
        source = self.membership.kv_events_of(pod, reported)
        self.kv_streams.follow(described.pod if described else pod, generation, source, facts.no_events)
        if not self._config.probes.self_test:
            self.fleet.trust(pod.id, PrefixTrust.TRUSTED, "trusted by configuration (probes.self_test: false)")
            self.fleet.learn(pod.id, converts=frozenset(ENGINES[pod.engine].conversions), reads_pictures=True)
            if ENGINES[pod.engine].continues(described.pod if described else pod):
                self.fleet.learn(pod.id, continues=WITH_IDS)

    def _warn_of_others_models(self, pod: Pod, facts: PodFacts) -> None:
        """A pod that lists models of others receives their prompts. Pods of one model usually list the same names."""
        names = {*facts.models, *facts.adapters}
        for other in (status.pod for status in self.fleet.snapshot.pods if status.pod.id != pod.id):
            taken = names.intersection(other.models)
            if taken and not pod.allowed_models and set(facts.models) != set(other.models):
                hint = "limit what it may serve by `models` of the pod"
                log.warning("pod lists models of others", pod=pod.id, models=sorted(taken)[:8], of=other.id, hint=hint)
                return

    def _remove_gone(self, pod: Pod, _old: PodState, new: PodState) -> None:
        if new is PodState.GONE:
            self.kv_streams.leave(pod.id)
            self.store.forget(pod.id)
            self._pools.remove(pod.id)
            self.calibrator.remove(pod)
            self.ledger.remove(pod.id)


def generation_change(pod: Pod, facts: PodFacts) -> str:
    """What a pod that was described before reports otherwise now, of that which decides whether its KV is reusable."""
    pairs = ((name, getattr(pod, name), getattr(facts, name)) for name in OF_GENERATION)
    different = [f"{name} {new}, before {old}" for name, old, new in pairs if old != new]
    return "; ".join(different) if pod.models else ""


def ready_pods(fleet: Fleet, model: str) -> list[Pod]:
    return [status.pod for status in fleet.snapshot.pods if status.state is PodState.READY and status.pod.serves(model)]
