"""What one attempt takes of its pods: leases, and predictions of what will be in their caches.

Both begin with the attempt, before anything is awaited, and end with it, in any way. There are leases on the pod that
responds, on the prefill pod of a split, and on the sender of KV. Concurrent requests with the same prefix see the
predictions. One is confirmed once the pod has computed the prompt or received its KV, and withdrawn where nothing shows
that: the pod failed or refused the request, or the client disconnected before the first token. How much of the prompt
an aborted request leaves in the cache is unknown; a pod with KV events announces it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from router.apis.chat_rules import concern
from router.decision import Candidate, Lease, Plan, Split
from router.fleet.ledger import Ledger
from router.index.predicted import Prediction
from router.policy.prefill_clock import NO_DECODE, ConcurrentDecode, PrefillClock, PrefillObservation
from router.policy.term import tokens_to_encode
from router.request.attempt_rules import AttemptRules
from router.request.fleet_state import FleetState
from router.types import InferenceRequest, Pod, PodId, PromptPrefix, ScenePicture


class Booking:
    """The leases of one attempt. `handed_over`, `first_token` and `release` are idempotent."""

    def __init__(
        self,
        ledger: Ledger,
        candidate: Candidate,
        prompt_tokens: int,
        clock: Callable[[PodId], PrefillClock],
        now_s: float,
        pictures: Iterable[ScenePicture] = (),
    ) -> None:
        plan, cached_tokens = candidate.plan, candidate.cached_tokens
        self.observation: PrefillObservation | None = None
        """The measured speed of the pod that computed the prompt."""
        self.concurrent_transfers = 0
        """Other transfers of the sender of KV when this one began."""
        self.pulled_ms: float | None = None
        """Milliseconds that a pull and computing the rest of the prompt took, on an otherwise idle pod."""
        self.has_handed_over = False
        """Whether the prefill pod of a split has computed the prompt."""
        self._pull_began_s: float | None = None
        self._ledger = ledger
        self.prefill_done = self._released = False
        """Whether the first token exists, or is expected to exist by now."""
        self._prefill_lease: Lease | None = None
        self._sending: PodId | None = None
        if isinstance(plan, Split):
            encoded = tokens_to_encode(pictures, plan.prefill.id, cached_tokens)
            self._prefill_lease = ledger.book(plan.prefill, prompt_tokens, cached_tokens, now_s, encoded_tokens=encoded)
            self._response_lease = ledger.book(plan.decode, prompt_tokens, 0, now_s, prefills=False)
            if plan.pull is not None:
                self._begin_transfer(plan.pull.holder)
        else:
            encoded = tokens_to_encode(pictures, plan.pod.id, cached_tokens)
            self._response_lease = ledger.book(plan.pod, prompt_tokens, cached_tokens, now_s, encoded_tokens=encoded)
            if plan.pull is not None:
                self._begin_transfer(plan.pull.holder)
                self._pull_began_s = now_s if ledger.on(plan.pod.id).requests == 1 else None
        computing = self._computing_lease = self._prefill_lease or self._response_lease
        self._clock = clock(computing.pod)
        decoding, step_began_s = self._concurrent_decode(computing.pod)
        self._clock.sent(computing.id, prompt_tokens, cached_tokens, now_s, decoding, step_began_s)
        if plan.pull is not None or ledger.others_prefill(computing.pod):
            self._clock.disturbed()

    @property
    def prefill_ms(self) -> float:
        return self._computing_lease.prefill_ms

    def handed_over(self, now_s: float) -> None:
        """The prefill pod has responded: from now on it only sends KV."""
        if self.has_handed_over:
            return
        self.has_handed_over = True
        if self._prefill_lease is not None:
            self._observe(self._prefill_lease, now_s)
            self._ledger.release(self._prefill_lease, now_s)
            if not self.prefill_done:
                self._begin_transfer(self._prefill_lease.pod)

    def first_token(self, now_s: float) -> None:
        if self.prefill_done:
            return
        if self._prefill_lease is None:
            self._observe(self._response_lease, now_s)
        if self._pull_began_s is not None:
            self.pulled_ms, self._pull_began_s = (now_s - self._pull_began_s) * 1000, None
        self._end_prefill(now_s)

    def assume_first_token(self, now_s: float) -> None:
        """The first token of an unstreamed response is expected to exist by now."""
        if not self.prefill_done:
            self._clock.gone(self._response_lease.id)
            self._pull_began_s = None
            self._end_prefill(now_s)

    def release(self, now_s: float) -> None:
        """End all leases of the attempt. Idempotent."""
        if self._released:
            return
        self._released = True
        if self._prefill_lease is not None:
            self._clock.gone(self._prefill_lease.id)
            self._ledger.release(self._prefill_lease, now_s)
        elif not self.prefill_done:
            self._clock.gone(self._response_lease.id)
        self._ledger.release(self._response_lease, now_s)
        if not self.prefill_done:
            self._end_transfer()

    def _observe(self, lease: Lease, now_s: float) -> None:
        self.observation = self._clock.first_token(lease.id, now_s, self._concurrent_decode(lease.pod)[0])

    def _concurrent_decode(self, pod: PodId) -> tuple[ConcurrentDecode, float]:
        """The requests that decode on the pod, and when their current step began."""
        requests, context_tokens, step_began_s = self._ledger.decoding(pod)
        return ConcurrentDecode(requests, context_tokens) if requests else NO_DECODE, step_began_s

    def _end_prefill(self, now_s: float) -> None:
        self._ledger.first_token(self._response_lease, now_s)
        self._end_transfer()

    def _begin_transfer(self, holder: PodId) -> None:
        """The holder sends now; what a prefill pod pulled from another has come."""
        if self._sending is not None:
            self._ledger.pull_ended(self._sending)
        self._sending = holder
        self.concurrent_transfers = self._ledger.pull_began(holder)

    def _end_transfer(self) -> None:
        self.prefill_done = True
        if self._sending is not None:
            self._ledger.pull_ended(self._sending)
            self._sending = None


class AttemptPredictions:
    """The predictions of one attempt. `withdraw` must be called at its end."""

    def __init__(
        self,
        state: FleetState,
        rules: AttemptRules,
        plan: Plan,
        prompt: PromptPrefix | None,
        request: InferenceRequest,
    ) -> None:
        self._state = state
        self._rules = rules
        self._plan = plan
        self._pending: dict[PodId, Prediction] = {}
        self._pods = {pod.id: pod for pod in ([plan.pod, plan.prefill] if isinstance(plan, Split) else [plan.pod])}
        self._pictures = prompt.pictures if prompt else ()
        if prompt is not None:
            for pod in self._pods.values():
                own = prompt.read_by(pod.front_end)
                if own is not None and pod.converts_alike(request.endpoint) and not misreads(pod, request):
                    self._begin(pod, own)

    def _begin(self, pod: Pod, prompt: PromptPrefix) -> None:
        limits = self._rules.index
        if self._rules.publishes_events(pod.id) and pod.id not in self._state.store.unnamed:
            ttl_s, capacity_blocks = limits.predicted_ttl_s, None
        else:
            ttl_s, capacity_tokens = limits.no_events_ttl_s, pod.capacity_tokens or limits.no_events_capacity_tokens
            capacity_blocks = capacity_tokens // prompt.block_size_tokens
        prediction = self._state.store.predict(pod.id, prompt, ttl_s=ttl_s, capacity_blocks=capacity_blocks)
        self._pending[pod.id] = prediction

    def first_token(self, responding: PodId, now_s: float) -> None:
        """The prompt is computed: all pods of the plan have it, unless the prefill pod of a split responds itself."""
        self.computed(responding, now_s)
        while self._pending and responding == self._plan.pod.id:
            self.computed(next(iter(self._pending)), now_s)

    def computed(self, pod: PodId, now_s: float) -> None:
        """Confirm the prediction for one pod. Idempotent."""
        prediction = self._pending.pop(pod, None)
        if prediction is not None:
            self._state.store.confirm(prediction, now_s)
            if self._pictures:
                self._state.pictures.saw(self._pods[pod], self._pictures)

    def withdraw(self) -> None:
        while self._pending:
            self._state.store.withdraw(self._pending.popitem()[1])


def misreads(pod: Pod, request: InferenceRequest) -> bool:
    """Whether a test has shown that the pod may make another prompt of such a request: its events alone say which
    blocks it then has."""
    return bool(pod.misreads) and request.endpoint.api.is_chat and concern(pod.misreads, request.body)
