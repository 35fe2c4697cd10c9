"""Where does a request go? The phases match and decide.

Collects what `policy.decide` needs: the pods that have the prompt's blocks, and a snapshot of the fleet. Books nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

from msgspec.structs import replace

from router.addresses import join_address, url_address, url_host
from router.admission.tenant import Slo
from router.decision import RouteDecision
from router.errors import NoReadyPod
from router.index.evicted import PRIOR_REUSE
from router.index.shared import HEAVY_SHARE, SharedPrefixes
from router.observe.counters import Counters
from router.observe.ended import RecordedDecision
from router.policy.classes import Classes
from router.policy.decide import decide
from router.policy.plans import prompt_token_count
from router.policy.policy_set import PolicySet
from router.policy.recording import record
from router.policy.spec import Policy
from router.request.context import RequestContext
from router.request.fleet_state import Clock, FleetState
from router.request.inbound import HeaderList
from router.types import FleetSnapshot, PodId, PodState, PodStatus, PrefixMatch, PromptPrefix, Role, Scene

_SNAPSHOTS = 256


class DecisionRecorder(Protocol):
    """Keeps decisions for explanations; `RecentDecisions` does."""

    def record(
        self, scene: Scene, decision: RouteDecision, policy: Policy, at_s: float, workload: str = ""
    ) -> RecordedDecision | None:
        """Record a decision at a Unix time; None where decisions are not kept. `workload` is the class of the
        request."""


@dataclass(frozen=True, slots=True)
class Routing:
    """What a decision follows from. `slo_of`: by model."""

    policies: Callable[[], PolicySet]
    classes: Classes
    slo_of: Callable[[str], Slo | None] = lambda _model: None


@dataclass(eq=False)
class RequestDecisions:
    state: FleetState
    routing: Routing
    recorder: DecisionRecorder
    counters: Counters
    clock: Clock
    _turns: Counter[str] = field(default_factory=Counter)
    _prefixes: defaultdict[str, SharedPrefixes] = field(default_factory=lambda: defaultdict(SharedPrefixes))
    """Leading blocks of prompts that are common in the traffic of a model."""

    def decide(self, context: RequestContext, now_s: float) -> Scene:
        """Match and decide: `context.decision` has all candidates, best first. Returns what it is based on. Raises
        `RouterError` where there is no candidate."""
        context.phases.enter("match", now_s)
        match = self._match(context.prompt, now_s)
        if match.degraded:
            self.counters.match_degraded(context.request.model)
        context.phases.enter("decide", self.clock.now_s())
        scene = self._scene(context, match, now_s)
        context.workload, context.policy = self._policy_for(scene, context.head.headers)
        decision = decide(scene, context.policy)
        self.keep_decision(context, scene, decision)
        if slo := context.tenant.slo or self.routing.slo_of(context.request.model):
            speed = decision.candidates[0].pod.speed
            context.ttft_limit_ms = slo.ttft_limit_ms(speed.prefill_ms(context.prompt_tokens))
        return scene

    def decide_again(self, context: RequestContext, now_s: float) -> tuple[Scene, RouteDecision]:
        """A later decision about a request that waits, by the same policy; not counted as traffic."""
        assert context.policy is not None
        scene = self._scene(context, self._match(context.prompt, now_s), now_s, counted=False)
        return scene, decide(scene, context.policy)

    def keep_decision(self, context: RequestContext, scene: Scene, decision: RouteDecision) -> None:
        """Make this decision, the first or a later one, that of the request, and record it."""
        assert context.policy is not None
        context.decision = decision
        at_s = self.clock.unix_s()
        context.recorded = self.recorder.record(scene, decision, context.policy, at_s, context.workload)

    def preview(self, context: RequestContext) -> RecordedDecision:
        """The decision that would be made now. Nothing is sent, booked or counted. Raises `RouterError`."""
        now_s = self.clock.now_s()
        scene = self._scene(context, self._match(context.prompt, now_s), now_s, counted=False)
        workload, policy = self._policy_for(scene, context.head.headers, counted=False)
        return RecordedDecision.of(record(scene, workload), decide(scene, policy), policy, self.clock.unix_s())

    def _scene(self, context: RequestContext, match: PrefixMatch, now_s: float, *, counted: bool = True) -> Scene:
        """What a decision is based on. `counted`: count the request as traffic."""
        request, prompt, allowed = context.request, context.prompt, context.head.pods_allowed
        state, model, fleet = self.state, request.adapter or request.model, self.state.fleet.snapshot
        ledger = state.ledger
        if (lacks := state.fleet.lacks) and (needed := lacks.intersection(context.needs)):
            fleet = having(fleet, model, needed)
        if context.stored_pod:
            fleet = only(fleet, context.stored_pod)
        if allowed is not None:
            fleet = within(fleet, allowed)
            if not any(status.pod.serves(model) for status in fleet.pods):
                raise NoReadyPod("None of the pods that the gateway allows serves the model.")
        turn, evicted = self._turns[model] + 1, state.store.evicted.get(request.model)
        if counted:
            self._turns[model] = turn
            if prompt and evicted is not None:  # a client may make up a model
                evicted.requested(prompt.hashes, match.blocks, now_s, prompt.generation.block_size_tokens)
        return Scene(
            request=request,
            prompt=prompt,
            match=match,
            fleet=fleet,
            inflight=ledger.inflight(),
            steps=ledger.steps(),
            now_s=now_s,
            turn=turn,
            shared_blocks=self._shared_blocks(request.model, prompt, counted=counted) if prompt else 0,
            congestion=ledger.congestion(fleet, model, now_s),
            pictures=state.pictures.seen(prompt.pictures, fleet) if prompt and prompt.pictures else (),
            learnt_reuse=PRIOR_REUSE if evicted is None else evicted.reuse,
            expected_output_tokens=state.output_lengths.expected_tokens(request, request.tenant),
        )

    def _shared_blocks(self, model: str, prompt: PromptPrefix, *, counted: bool) -> int:
        """Number of leading blocks of a prompt that every pod should hold."""
        prefixes, fleet = self._prefixes[model], self.state.fleet.snapshot
        number_of = prefixes.observe if counted else prefixes.shared
        return number_of(prompt.hashes, threshold=_heavy_share(fleet, model))

    def _match(self, prompt: PromptPrefix | None, now_s: float) -> PrefixMatch:
        if prompt is None:
            return PrefixMatch()
        found = self.state.store.match(prompt, now_s)
        return found if not prompt.others else self._by_front_end(prompt, found, now_s)

    def _by_front_end(self, prompt: PromptPrefix, found: PrefixMatch, now_s: float) -> PrefixMatch:
        """A match of each pod by its own reading of the prompt."""
        front_ends = {status.pod.id: status.pod.front_end for status in self.state.fleet.snapshot.pods}
        others = dict(prompt.others)
        blocks = {pod: held for pod, held in found.blocks.items() if front_ends.get(pod) not in others}
        for front_end, other in prompt.others:
            if other is not None:  # an engine computes at least the last token
                usable = other.hashes[: (len(other.tokens) - 1) // other.block_size_tokens]
                matched = self.state.store.match(replace(other, hashes=usable), now_s).blocks
                blocks |= {pod: held for pod, held in matched.items() if front_ends.get(pod) == front_end}
        return PrefixMatch(blocks, degraded=found.degraded)

    def _policy_for(self, scene: Scene, headers: HeaderList, *, counted: bool = True) -> tuple[str, Policy]:
        tokens = prompt_token_count(scene)
        workload = self.routing.classes.classify(scene, prompt_tokens=tokens, headers=headers, counted=counted)
        return workload, self.routing.policies().for_request(scene.request, workload, tokens, headers)


@lru_cache(64)
def _heavy_share(fleet: FleetSnapshot, model: str) -> float:
    """The share of a model's traffic from which a prefix is so common that every ready pod should hold it."""
    return HEAVY_SHARE / max(sum(one.state is PodState.READY and one.pod.serves(model) for one in fleet.pods), 1)


@lru_cache(_SNAPSHOTS)
def only(fleet: FleetSnapshot, pod: PodId) -> FleetSnapshot:
    """The fleet with this pod alone. It also serves while it drains: no other pod has its responses."""
    status = fleet.find(pod)
    if status is None:
        return FleetSnapshot(fleet.version, (), fleet.links)
    is_draining = status.state is PodState.DRAINING
    usable = PodStatus(status.pod, PodState.READY, status.load) if is_draining else status
    return FleetSnapshot(fleet.version, (usable,), fleet.links)


@lru_cache(_SNAPSHOTS)
def having(fleet: FleetSnapshot, model: str, needed: frozenset[str]) -> FleetSnapshot:
    """The fleet without the pods that lack what a request needs; all of it if no other pod answers: then the client
    gets the answer of one that lacks it."""
    pods = tuple(status for status in fleet.pods if needed.isdisjoint(status.pod.lacks))
    answering = (s for s in pods if s.state in (PodState.READY, PodState.EJECTED) and s.pod.role is not Role.PREFILL)
    is_served = any(status.pod.serves(model) for status in answering)
    return FleetSnapshot(fleet.version, pods, fleet.links) if is_served else fleet


@lru_cache(_SNAPSHOTS)
def within(fleet: FleetSnapshot, addresses: frozenset[str]) -> FleetSnapshot:
    """The fleet with the pods that have one of these addresses: host and port, or the host alone for all its ports."""
    pods = tuple(status for status in fleet.pods if not addresses.isdisjoint(addresses_of(status.pod.url)))
    return FleetSnapshot(fleet.version, pods, fleet.links)


@lru_cache(4096)
def addresses_of(url: str) -> tuple[str, str]:
    """Host and port of a pod, and its host."""
    return join_address(*url_address(url)), url_host(url)
