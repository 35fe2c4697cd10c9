"""The life of a request, without sockets.

A front reads bytes into a `RequestContext` (`reading.py`), then drives three things, which hold no socket, task or
clock: `prepare`, a generator of what it must do until the request may be sent; `tracker`, which receives the events of
its attempts; and `endings.end`, which settles it. `tests/request/memory_front.py` is a whole front in 150 lines.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from router.decision import RouteDecision
from router.observe.counters import Counters
from router.observe.receipts import RecordedDecision
from router.request.attempt_rules import AttemptRules
from router.request.context import RequestContext
from router.request.continuation.continuing_tracker import ContinuingTracker
from router.request.continuation.terms import REPEATED, WITH_IDS
from router.request.decisions import RequestDecisions
from router.request.endings import Endings
from router.request.fleet_state import FleetState
from router.request.inbound import HeaderList
from router.request.preparation import Preparation
from router.request.preparation_steps import Locate, Step, Tokens
from router.request.tracker import Tracker
from router.types import InferenceRequest, PromptPrefix

CONTINUED = WITH_IDS | REPEATED
"""Endpoints whose streams another pod may continue."""


class Requests:
    """Prepares and tracks the requests of any front."""

    def __init__(
        self,
        state: FleetState,
        decisions: RequestDecisions,
        preparation: Preparation,
        rules: AttemptRules,
        counters: Counters,
        endings: Endings,
    ) -> None:
        self._state = state
        self._decisions = decisions
        self._rules = rules
        self._counters = counters
        self.endings = endings
        self.prepare = preparation.prepare
        self.prepare_tunnel = preparation.prepare_tunnel

    def tracker(self, context: RequestContext) -> Tracker:
        """The attempts of a decided request."""
        options, request = self._rules.continuation, context.request
        if options is not None and not self._rules.hands_over and request.stream and request.endpoint in CONTINUED:
            return ContinuingTracker(context, self._state, self._rules, self._counters, options, self._decide_again)
        return Tracker(context, self._state, self._rules, self._counters)

    def _decide_again(self, context: RequestContext, now_s: float) -> RouteDecision:
        return self._decisions.decide_again(context, now_s)[1]

    def preview(self, request: InferenceRequest, headers: HeaderList) -> Generator[Step, Any, RecordedDecision]:
        """The decision that would be made now. Nothing is sent, booked or counted. Raises `RouterError`."""
        previous, stored_pod = request.prompt.get("previous_response_id"), ""
        if previous:
            stored_pod = (yield Locate(previous, "previous_response_id", None)).pod
        found = (yield Tokens(request)) if request.prompt else None
        prompt = found if isinstance(found, PromptPrefix) else None
        return self._decisions.preview(request, headers, prompt, stored_pod)
