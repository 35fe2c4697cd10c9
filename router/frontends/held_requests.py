"""Requests that wait until a pod serves their model: for a fleet that scales from zero.

They pass in fair order as soon as a pod is ready, one in each turn of the event loop. Their bodies count in
`limits.max_held_bytes`, they themselves in `limits.max_in_flight`. How long a model's last start took is the
`Retry-After` of those that cannot wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

from router.admission.fair_bound import FairBound
from router.admission.tenant import Admitted
from router.errors import NoReadyPod
from router.feeds.supervise import pause
from router.fleet.fleet import Fleet
from router.frontends.fair_turns import FairTurns
from router.policy.eligible import ready_pods
from router.request.context import RequestContext
from router.request.fallbacks import fallbacks_of, with_reasons
from router.request.hosted import Hosted, NotAsked

CHECK_S = 1.0
"""Time between two looks at the fleet: models and adapters of pods change without a change of state."""
MIN_RETRY_S = 1.0
WANTED_S = 10.0
"""A pod is wanted for this time after a fallback has served a request in its place."""
_KEY = "limits.max_waiting_for_pods"


@dataclass(slots=True, eq=False)
class HeldRequests:
    """`hold_s`: the longest wait; `max_requests`: of one model, shared by tenants by their weights. `on_change`: called
    with a model and how many wait."""

    fleet: Fleet
    hold_s: float
    max_requests: int
    on_change: Callable[[str, int], None] = lambda _model, _count: None
    _turns: dict[str, FairTurns] = field(default_factory=dict)
    _bounds: dict[str, FairBound] = field(default_factory=dict)
    _since_s: dict[str, float] = field(default_factory=dict)
    """When the first request of each model began to wait."""
    _wanted_until_s: dict[str, float] = field(default_factory=dict)
    _starts_s: dict[str, float] = field(default_factory=dict)
    """How long the last start of a pod took, by model. All models are those of files, never of clients alone."""

    def is_wanted(self, model: str) -> bool:
        """Whether requests wait for a pod of the model, or a fallback has served one in its place lately."""
        return model in self._bounds or monotonic() < self._wanted_until_s.get(model, 0.0)

    def unserved(self, context: RequestContext, hosted: Hosted) -> NoReadyPod | None:
        """Why a request should wait although pods have its model: none of them is ready, and no fallback can serve."""
        model = context.request.adapter or context.request.model
        if context.stored_pod or self._is_served(model):
            return None
        found = [one for _, one in fallbacks_of(context, self.fleet, hosted, 0, monotonic())]
        not_asked = [one for one in found if isinstance(one, NotAsked)]
        if len(not_asked) < len(found):
            self._wanted_until_s[model] = monotonic() + WANTED_S
            return None
        error = NoReadyPod(
            f"No pod that serves `{model}` is ready; retry later.", model=model, stream=context.request.stream
        )
        with_reasons(error, not_asked)
        return error

    async def wait(
        self, error: NoReadyPod, admitted: Admitted, size_bytes: int, until_s: float, pause_s: float = 0.0
    ) -> None:
        """Returns when a pod serves the model of the error, after this pause. Raises the error where the request cannot
        wait."""
        model, now_s, tenant = error.model, asyncio.get_running_loop().time(), admitted.tenant
        bound = self._bounds.setdefault(model, FairBound(self.max_requests, "waiting requests", _KEY))
        if not bound.take(admitted.owner, tenant.weight, 1):
            raise self._refused(error, now_s)
        turns = self._turns.setdefault(model, FairTurns())
        self._since_s.setdefault(model, now_s)
        self.on_change(model, bound.used)
        try:
            async with asyncio.timeout_at(until_s):
                await asyncio.sleep(pause_s)
                async with turns.turn(tenant, 0, size_bytes):
                    await self._ready(model)
        except TimeoutError:
            raise self._refused(error, asyncio.get_running_loop().time()) from None
        finally:
            bound.give_back(admitted.owner, 1)
            if not bound.used:
                for kept in (self._turns, self._since_s, self._bounds):
                    kept.pop(model, None)
            self.on_change(model, bound.used)

    async def _ready(self, model: str) -> None:
        changed, has_waited = asyncio.Event(), False
        unlisten = self.fleet.listen(lambda *_: changed.set())
        try:
            while not self._is_served(model):
                await pause(changed, CHECK_S)
                has_waited = True
        finally:
            unlisten()
        since_s = self._since_s.pop(model, None)
        if has_waited and since_s is not None:
            self._starts_s[model] = asyncio.get_running_loop().time() - since_s

    def _is_served(self, model: str) -> bool:
        return ready_pods(self.fleet.snapshot, model).can_serve

    def _refused(self, error: NoReadyPod, now_s: float) -> NoReadyPod:
        """The error with the time after which a pod is expected."""
        elapsed_s = now_s - self._since_s.get(error.model, now_s)
        error.retry_after_s = max(self._starts_s.get(error.model, 0.0) - elapsed_s, MIN_RETRY_S)
        return error
