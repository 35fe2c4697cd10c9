"""Predicts which pods will have the prompt of one attempt, and its pictures, in their caches.

A prediction begins with the attempt, so that concurrent requests with the same prefix see it. It is confirmed once the
pod has computed the prompt or received its KV, and withdrawn where nothing shows that: the pod failed or refused the
request, or the client disconnected before the first token. How much of the prompt an aborted request leaves in the
cache is unknown; a pod with KV events announces it.
"""

from __future__ import annotations

from router.decision import Plan, Split
from router.index.predicted import Prediction
from router.request.attempt_rules import AttemptRules
from router.request.fleet_state import FleetState
from router.types import Endpoint, Pod, PodId, PromptPrefix


class AttemptPredictions:
    """The predictions of one attempt. `withdraw` must be called at its end."""

    def __init__(
        self, state: FleetState, rules: AttemptRules, plan: Plan, prompt: PromptPrefix | None, endpoint: Endpoint
    ) -> None:
        self._state = state
        self._rules = rules
        self._plan = plan
        self._pending: dict[PodId, Prediction] = {}
        self._pods = {pod.id: pod for pod in ([plan.pod, plan.prefill] if isinstance(plan, Split) else [plan.pod])}
        self._pictures = prompt.pictures if prompt else ()
        if prompt is not None:
            for pod in self._pods.values():
                if pod.converts_alike(endpoint):
                    self._begin(pod, prompt)

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
