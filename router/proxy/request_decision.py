"""Where does a request go? The phases fingerprint, match and decide.

Collects what `policy.decide` needs: the prompt's block hashes, the pods that have them, and a snapshot of the fleet.
Nothing is sent to a pod, except by readers that tokenize with an engine.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator

from router.decision import RouteDecision
from router.fleet.fleet import Fleet
from router.index.shared import HEAVY_SHARE, SharedPrefixes
from router.observe.receipts import RecordedDecision, record_decision
from router.policy.decide import decide, prompt_token_count
from router.policy.recording import record
from router.policy.spec import Policy
from router.proxy.dependencies import ProxyDependencies
from router.proxy.headers import HeaderList
from router.proxy.request_context import RequestContext
from router.proxy.response_locator import only
from router.proxy.token_answers import token_answer
from router.types import InferenceRequest, PodId, PodState, PrefixMatch, PromptPrefix, Scene


class RequestDecisions:
    """Decides requests."""

    def __init__(self, needs: ProxyDependencies) -> None:
        self._needs = needs
        self._turns: Counter[str] = Counter()
        self._traffic = TrafficPrefixes(needs.fleet)

    async def stored_pod(self, request: InferenceRequest, owner: str | None) -> PodId:
        """The pod that has the response which the request follows; empty if it follows none. `owner`: see
        `ResponseLocator.locate`. Raises `UnknownResponse`."""
        previous = request.prompt.get("previous_response_id")
        return (await self._needs.responses.locate(previous, "previous_response_id", owner)).pod if previous else ""

    async def fingerprint(self, context: RequestContext) -> PromptPrefix | None:
        """Tokens and block hashes of the prompt; None where they cannot be known."""
        context.phases.enter("fingerprint")
        return await self._read(context.request)

    def answer_about_tokens(self, context: RequestContext) -> Iterator[bytes] | None:
        """The body of the router's own answer, in pieces; None: a pod has to answer."""
        return token_answer(context.request, context.prompt, self._needs.fleet.snapshot)

    async def match(self, context: RequestContext) -> PrefixMatch:
        """Which holders have how many leading blocks of the prompt."""
        context.phases.enter("match")
        if context.prompt is None:
            return PrefixMatch()
        match = await self._needs.store.match(context.prompt, time.monotonic())
        if match.degraded:
            self._needs.metrics.degraded_matches.labels(context.request.model).inc()
        return match

    def decide(self, context: RequestContext, match: PrefixMatch) -> RouteDecision:
        """All candidates, best first. Raises `RouterError` where there is none."""
        context.phases.enter("decide")
        scene = self._scene(context.request, context.prompt, match, stored_pod=context.stored_pod)
        context.workload, context.policy = self._policy_for(scene, context.inbound.headers)
        decision = decide(scene, context.policy)
        context.recorded = self._needs.journal.record(scene, decision, context.policy, context.workload)
        return decision

    def decide_again(self, context: RequestContext, match: PrefixMatch) -> tuple[Scene, RouteDecision]:
        """A later decision about a request that waits, by the same policy; not counted as traffic."""
        assert context.policy is not None
        scene = self._scene(context.request, context.prompt, match, counted=False, stored_pod=context.stored_pod)
        return scene, decide(scene, context.policy)

    def redecided(self, context: RequestContext, scene: Scene, decision: RouteDecision) -> None:
        """Record the decision by which the request is sent."""
        assert context.policy is not None
        context.decision = decision
        context.recorded = self._needs.journal.record(scene, decision, context.policy, context.workload)

    async def preview(self, request: InferenceRequest, headers: HeaderList) -> RecordedDecision:
        """The decision that would be made now. Nothing is sent, booked or counted. Raises `RouterError`."""
        stored_pod, prompt = await self.stored_pod(request, None), await self._read(request)
        match = await self._needs.store.match(prompt, time.monotonic()) if prompt else PrefixMatch()
        scene = self._scene(request, prompt, match, counted=False, stored_pod=stored_pod)
        workload, policy = self._policy_for(scene, headers, counted=False)
        return record_decision(record(scene, workload), decide(scene, policy), policy, time.time())

    async def _read(self, request: InferenceRequest) -> PromptPrefix | None:
        reader = self._needs.readers.get(request.model)
        return await reader.read(request) if reader and request.prompt else None

    def _scene(
        self,
        request: InferenceRequest,
        prompt: PromptPrefix | None,
        match: PrefixMatch,
        *,
        counted: bool = True,
        stored_pod: PodId = "",
    ) -> Scene:
        """What a decision is based on. `counted`: count the request as traffic. `stored_pod`: the only pod that has a
        stored response which the request needs."""
        ledger, model, fleet = self._needs.ledger, request.adapter or request.model, self._needs.fleet.snapshot
        now_s = time.monotonic()
        if stored_pod:
            fleet = only(fleet, stored_pod)
        turn, evicted = self._turns[model] + 1, self._needs.store.evicted
        if counted:
            self._turns[model] = turn
            if prompt:
                evicted.requested(request.model, prompt, match.blocks, now_s)
        return Scene(
            request=request,
            prompt=prompt,
            match=match,
            fleet=fleet,
            inflight=ledger.inflight(),
            steps=ledger.steps(),
            now_s=now_s,
            turn=turn,
            shared_blocks=self._traffic.shared_blocks(request.model, prompt, counted=counted) if prompt else 0,
            congestion=ledger.congestion(fleet, model, now_s),
            pictures=self._needs.pictures.seen(prompt.pictures, fleet) if prompt and prompt.pictures else (),
            learnt_reuse=evicted.reuse_of(request.model),
            expected_output_tokens=self._needs.output_lengths.expected_tokens(request),
        )

    def _policy_for(self, scene: Scene, headers: HeaderList, *, counted: bool = True) -> tuple[str, Policy]:
        """Workload class of the request, and the policy for it."""
        needs, tokens = self._needs, prompt_token_count(scene)
        workload = needs.classes.classify(scene, prompt_tokens=tokens, headers=headers, counted=counted)
        return workload, needs.policies().for_request(scene.request, workload, tokens, headers)


class TrafficPrefixes:
    """Leading blocks of prompts that are so common in the traffic of a model that every pod should hold them."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._by_model: defaultdict[str, SharedPrefixes] = defaultdict(SharedPrefixes)
        self._snapshot = fleet.snapshot
        self._thresholds: dict[str, float] = {}
        """By model, for `_snapshot`."""

    def shared_blocks(self, model: str, prompt: PromptPrefix, *, counted: bool) -> int:
        """Number of such blocks of a prompt. `counted`: count it as traffic."""
        prefixes = self._by_model[model]
        number_of = prefixes.observe if counted else prefixes.shared
        return number_of(prompt.hashes, threshold=self._threshold(model))

    def _threshold(self, model: str) -> float:
        """Depends on the number of ready pods, which are counted once a snapshot."""
        if self._fleet.snapshot is not self._snapshot:
            self._snapshot, self._thresholds = self._fleet.snapshot, {}
        threshold = self._thresholds.get(model)
        if threshold is None:
            ready = sum(s.state is PodState.READY and s.pod.serves(model) for s in self._snapshot.pods)
            threshold = self._thresholds[model] = HEAVY_SHARE / max(ready, 1)
        return threshold
