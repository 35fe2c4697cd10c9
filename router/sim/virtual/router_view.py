"""One replica of the router in the simulation: its view of the pods, and its decisions.

It uses the router's own parts (index, predicted index, ledger, shared prefixes, `decide()`), fed by the simulation
instead of by sockets. Its view may be late, incomplete or lost; the pods hold the true state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from pydantic import ConfigDict

from router.decision import Lease, RouteDecision
from router.fleet.ledger import Ledger
from router.fleet.output_lengths import OutputLengths
from router.index.evicted import EvictedBlocks
from router.index.masks import HolderMasks
from router.index.predicted import PredictedIndex
from router.index.shared import HEAVY_SHARE, SharedPrefixes
from router.policy.decide import decide
from router.policy.spec import Policy
from router.sim.virtual.traffic import TrafficRequest
from router.types import (
    BlockChange,
    BlockHash,
    BlocksByTier,
    Endpoint,
    FleetSnapshot,
    Generation,
    InferenceRequest,
    InFlight,
    Links,
    Pod,
    PodId,
    PodLoad,
    PodState,
    PodStatus,
    PrefixMatch,
    PromptPrefix,
    Scene,
    StepBegan,
    Tier,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Knowledge:
    """The information that reaches a router. The defaults are those of `config/router.yaml`.

    Without `events`, a router assumes that a prompt stays cached where it was sent, for `no_events_ttl_s`.
    """

    events: bool = True
    predicted_ttl_s: float = 30.0
    no_events_ttl_s: float = 1200.0
    no_events_capacity_tokens: int = 400_000
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


class RouterView:
    """One replica. All pods serve the model of `generation`."""

    def __init__(
        self, pods: Sequence[Pod], generation: Generation, policy: Policy, knowledge: Knowledge, links: Links
    ) -> None:
        self._generation = generation
        self._policy = policy
        self._knowledge = knowledge
        self._links = links
        self.pods = {pod.id: pod for pod in pods}
        self._turn = 0
        self.restart()
        self._snapshot = FleetSnapshot()
        self.apply_loads({}, 0.0)

    def apply_blocks(self, pod: PodId, tier: Tier, held: bool, blocks: list[BlockHash]) -> None:
        """Apply a KV event of a pod."""
        change = BlockChange(tier, held, blocks)
        self._announced.apply(pod, change)
        if not held:
            self.evicted.evicted(pod, change, self._announced.held(pod))

    def apply_loads(self, loads: Mapping[PodId, PodLoad], now_s: float) -> None:
        """Apply a scrape of the pods. A missing pod counts as idle."""
        statuses = []
        for pod_id, pod in sorted(self.pods.items()):
            load = replace(loads.get(pod_id, PodLoad()), our_prompts=self.ledger.on(pod_id).prefill_requests)
            statuses.append(PodStatus(pod, PodState.READY, load))
        self._snapshot = FleetSnapshot(self._snapshot.version + 1, tuple(statuses), self._links)

    def restart(self) -> None:
        """Start without state, as a new process does."""
        self._announced, self._predicted, self._shared = HolderMasks(), PredictedIndex(), SharedPrefixes()
        self.evicted = EvictedBlocks()
        self._predicted.on_evict = self._on_evict
        self.ledger = Ledger()
        self.output_lengths = OutputLengths()

    def decide(self, scene: Scene) -> RouteDecision:
        """All plans for a scene, best first. Raises as `decide()` does."""
        return decide(scene, self._policy)

    def scene(
        self,
        request_id: str,
        traffic: TrafficRequest,
        now_s: float,
        steps: Mapping[PodId, StepBegan],
        session: str = "",
        *,
        counted: bool = True,
    ) -> Scene:
        """What the router knows now. `counted`: count the prompt as requested."""
        self._turn += counted
        hashes = traffic.prompt_hashes
        prompt = PromptPrefix(self._generation, range(traffic.prompt_tokens), hashes)
        match = self._held(hashes, now_s)
        if counted:
            self.evicted.requested(hashes, match)
        shared_blocks = self._shared.observe if counted else self._shared.shared
        request = InferenceRequest(
            id=request_id,
            endpoint=Endpoint.COMPLETIONS,
            model=self._generation.model,
            body=b"",
            session=session,
        )
        return Scene(
            request=request,
            prompt=prompt,
            match=PrefixMatch(match),
            fleet=self._snapshot,
            inflight=self.ledger.inflight(),
            congestion=self.ledger.congestion(self._snapshot, self._generation.model, now_s),
            learnt_reuse=self.evicted.reuse,
            expected_output_tokens=self.output_lengths.expected_tokens(request),
            steps=steps,
            now_s=now_s,
            turn=self._turn,
            shared_blocks=shared_blocks(hashes, threshold=HEAVY_SHARE / len(self.pods)),
        )

    def record_send(
        self, pod: PodId, traffic: TrafficRequest, cached_tokens: int, now_s: float, *, prefills: bool = True
    ) -> Lease:
        """Book a prompt that is sent to a pod. `prefills` is False if only its KV is sent."""
        knowledge = self._knowledge
        capacity = (
            None if knowledge.events else knowledge.no_events_capacity_tokens // self._generation.block_size_tokens
        )
        ttl_s = knowledge.predicted_ttl_s if knowledge.events else knowledge.no_events_ttl_s
        self._predicted.record(pod, traffic.prompt_hashes, now_s, ttl_s=ttl_s, capacity_blocks=capacity)
        return self.ledger.book(self.pods[pod], traffic.prompt_tokens, cached_tokens, now_s, prefills=prefills)

    def answered(self, output_tokens: int) -> None:
        """Learn from a finished answer."""
        self.output_lengths.answered(self._generation.model, output_tokens)

    def apply_replicas(self, replicas: Iterable[Mapping[PodId, InFlight]], now_s: float) -> None:
        """Apply the work in flight of the other replicas."""
        self.ledger.apply_replicas(replicas, now_s)

    def _on_evict(self, pod: PodId, blocks: list[BlockHash], held: int) -> None:
        self.evicted.evicted(pod, BlockChange(Tier.GPU, False, blocks), held)

    def _held(self, hashes: Sequence[BlockHash], now_s: float) -> dict[PodId, BlocksByTier]:
        """By pod, the longer of the announced and the predicted match, as in `stores/prefix_store.py`."""
        blocks = self._announced.walk(hashes)
        for pod, found in self._predicted.match(hashes, now_s).items():
            if sum(found) > sum(blocks.get(pod, (0,))):
                blocks[pod] = found
        return blocks
