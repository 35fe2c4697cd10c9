"""One replica of the router in the simulation: its core, and what it knows of the pods.

Requests are prepared, booked, predicted, queued and settled by `request/`, as behind any front. The simulation replaces
the feeds: it applies loads, KV events and the work of other replicas. The view may be late, incomplete or lost; the
pods hold the true state.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import ClassVar

from pydantic import ConfigDict

from loadtest.simulator.virtual_clock import VirtualClock
from router.admission.admission_queue import AdmissionQueue
from router.admission.tenant import NO_SLO, Slo
from router.config.index_schema import Index
from router.config.policy_files import load_classes
from router.config.schema import Limits
from router.decision import RouteDecision
from router.fleet.breaker import Breaker, Probes
from router.fleet.fleet import Fleet, PodEvent
from router.fleet.ledger import Ledger
from router.index.blockmap import PodCache
from router.index.layers import HitRule
from router.index.masks import HolderMasks
from router.observe.counters import Counters
from router.policy.calibration import Calibration
from router.policy.calibrator import Calibrator
from router.policy.classes import Classes
from router.policy.policy_set import PolicySet
from router.policy.retry import RetryBudget
from router.policy.spec import Policy
from router.request.attempt_rules import AttemptRules
from router.request.decisions import Routing
from router.request.effects import Turns
from router.request.fleet_state import Clock, FleetState
from router.request.life import Core, Observers
from router.request.queues import QueueSettings, RequestQueues
from router.stores.prefix_store import LocalStore
from router.types import BlockChange, Generation, Links, Pod, PodId, PodLoad, PrefixMatch, PromptPrefix, Scene

NEVER_EJECT = Probes(failures_to_eject=sys.maxsize, slow_ttfts_to_eject=0)
"""No probe readmits a simulated pod."""
_LIMITS, _INDEX = Limits(), Index()
_shipped_classes = cache(load_classes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Knowledge:
    """The information that reaches a router. The defaults are those of `config/router.yaml`.

    Without `events`, a router assumes that a prompt stays cached where it was sent, for `no_events_ttl_s`.
    """

    events: bool = True
    predicted_ttl_s: float = _INDEX.predicted_ttl_s
    no_events_ttl_s: float = _INDEX.no_events_ttl_s
    no_events_capacity_tokens: int = _INDEX.no_events_capacity_tokens
    store: bool = True
    """Whether the blocks of a store are published; else pods read there what the router does not expect."""
    kv_groups: bool = True
    """Whether it knows the groups of layers that the pods have, rather than assumes full attention."""
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


class Unrecorded:
    """Keeps no decisions and counts no speeds."""

    def record(
        self, scene: Scene, decision: RouteDecision, policy: Policy, at_s: float, workload: str = ""
    ) -> None: ...
    def observe_transfer(self, kind: str, kv_bytes: float, elapsed_ms: float, slowdown: float | None) -> None: ...
    def observe_ttft(self, model: str, expected_ms: float, actual_ms: float) -> None: ...
    def observe_regret(self, model: str, regret_ms: float) -> None: ...


UNOBSERVED = Observers(Unrecorded(), Counters())


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """What the routers of a simulation have in common, apart from their policy. `observers` record their requests."""

    knowledge: Knowledge = field(default_factory=Knowledge)
    observers: Observers = UNOBSERVED
    slo: Slo = NO_SLO
    rule: HitRule | None = None
    """What hits on the pods; None: what they hold without a gap."""


STORE = "store"
"""The holder whose blocks all pods can read."""


class HashStore(LocalStore):
    """A store of the blocks of `model`, whose `pods` announce hashes: simulated prompts have no tokens to hash. A hit
    on each of `ruled` is what `rule` says."""

    def __init__(
        self, model: str, ruled: Iterable[PodId] = (), rule: HitRule | None = None, pods: Iterable[PodId] = ()
    ) -> None:
        super().__init__()
        self._model = model
        self._pods = tuple(pods)
        self._rule = rule
        self._ruled = frozenset(ruled if rule else ())
        self._masks = HolderMasks()
        self._unruled = PodCache("", Generation(model=""), self._masks)
        self._caches = {pod: PodCache(pod, Generation(model=""), self._masks) for pod in self._ruled}
        for pod, known in self._caches.items():
            known.blocks.rule = rule
            self._masks.follow(pod, rule)

    @property
    def ruled(self) -> Collection[PodId]:
        return self._ruled

    def cache_of(self, pod: PodId) -> PodCache:
        return self._caches.get(pod, self._unruled)

    def forget(self, pod: PodId) -> None:
        super().forget(pod)
        self._masks.forget(pod)
        if pod in self._ruled:
            self._masks.follow(pod, self._rule)

    def apply_blocks(self, pod: PodId, change: BlockChange) -> None:
        self._masks.apply(pod, change)
        self.predicted.apply(pod, change)
        if not change.held and not change.layer and pod != STORE:
            self.evicted[self._model].evicted(pod, change, self._masks.held(pod))

    def match(self, prefix: PromptPrefix, now_s: float) -> PrefixMatch:
        known = self._masks.walk(prefix.hashes, (prefix.token_count, prefix.block_size_tokens))
        stored = sum(known.pop(STORE, ()))
        for pod in self._pods if stored else ():
            gpu, cpu, disk, _ = known.get(pod, (0, 0, 0, 0))
            known[pod] = gpu, cpu, disk, max(stored - gpu - cpu - disk, 0)
        return PrefixMatch(self.blocks(prefix, now_s, known))


class RouterView:
    """One replica. All pods serve one model. `refresh` is called before waiting requests are decided again; `streams`
    are its responses in progress, by pod."""

    def __init__(
        self,
        pods: Sequence[Pod],
        links: Links,
        policy: Policy,
        settings: RouterSettings,
        queue: QueueSettings | None,
        clock: VirtualClock,
        refresh: Callable[[RouterView], None],
    ) -> None:
        self._pods = pods
        self._links = links
        self._policies = PolicySet(policy)
        self._settings = settings
        self._queue = queue
        self.slo = settings.slo
        self._clock = clock
        self._refresh = refresh
        self._calls: dict[AdmissionQueue, int] = {}
        """The number of the only call that counts, by queue: requests in the queue of an earlier core still wait."""
        self.restart()

    def restart(self) -> None:
        """Start without state, as a new process does. Requests in flight stay with the core that they have."""
        self.streams = Counter[PodId]()
        fleet = _fleet_of(self._pods, self._links)
        rule = self._settings.rule if self._settings.knowledge.kv_groups else None
        pods = [pod.id for pod in self._pods]
        self.store = HashStore(self._pods[0].base_model, pods, rule, pods)
        state = FleetState(
            fleet=fleet,
            ledger=Ledger(),
            breaker=Breaker(fleet, NEVER_EJECT),
            store=self.store,
            calibrator=Calibrator(Calibration(), Unrecorded(), self._links),
        )
        clock = Clock(lambda: self._clock.now_s, lambda: self._clock.now_s)
        routing = Routing(lambda: self._policies, Classes(_shipped_classes(None)), lambda _model: self.slo)
        rules = _rules(self._settings.knowledge)
        self.core = Core(state, rules, routing, self._settings.observers, clock, queue=self._queue)

    @property
    def ledger(self) -> Ledger:
        return self.core.state.ledger

    def apply_blocks(self, pod: PodId, change: BlockChange) -> None:
        if pod != STORE or self._settings.knowledge.store:
            self.store.apply_blocks(pod, change)

    def apply_loads(self, loads: Mapping[PodId, PodLoad]) -> None:
        for pod_id, load in loads.items():
            ours = self.ledger.on(pod_id).prefill_requests
            scraped = replace(load, scraped_at_s=self._clock.now_s, our_prompts=ours)
            self.core.state.fleet.observe_load(pod_id, scraped)

    def send_waiting(self, queues: RequestQueues, queue: AdmissionQueue, turns: Turns, after_ms: float = 0.0) -> None:
        """Send requests of a queue after this time, which may be one of an earlier core."""
        number = self._calls[queue] = self._calls.get(queue, 0) + 1
        self._clock.call_in(after_ms, self._send, queues, queue, turns, number)

    def _send(self, queues: RequestQueues, queue: AdmissionQueue, turns: Turns, number: int) -> None:
        if number != self._calls[queue] or not queue:
            return
        self._refresh(self)
        wait_ms = queues.send_next(queue, self._clock.now_s, turns)
        if wait_ms < math.inf:
            self.send_waiting(queues, queue, turns, wait_ms)

    def apply_step(self, pod: PodId, began_s: float) -> None:
        """Tokens of requests in flight have arrived: the pod's current step began then."""
        self.ledger.stepped(pod, began_s)


def _rules(knowledge: Knowledge) -> AttemptRules:
    """Those of a new process: its retry budget is full."""
    index = Index(
        predicted_ttl_s=knowledge.predicted_ttl_s,
        no_events_ttl_s=knowledge.no_events_ttl_s,
        no_events_capacity_tokens=knowledge.no_events_capacity_tokens,
    )
    return AttemptRules(
        retries=_LIMITS.retries,
        route_headers=False,
        budget=RetryBudget(_LIMITS.retry_budget),
        index=index,
        publishes_events=lambda _pod: knowledge.events,
        handoff_facts=lambda _pod, _dialect: {},
    )


def _fleet_of(pods: Sequence[Pod], links: Links) -> Fleet:
    fleet = Fleet(links)
    fleet.sync(pods)
    for pod in pods:
        fleet.trust(pod.id, pod.trust, "")
        fleet.event(pod.id, PodEvent.PROBE_OK)
    return fleet
