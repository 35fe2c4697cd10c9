"""May a failed request be tried again, and where?

    failure                                    before the first byte                     after it
    ConnectFailed    nothing was sent          always, on the next candidate             never
    StaleConnection  a kept connection died    once, on the same pod, connected anew     never
    UpstreamBroken   reset, cut, garbled       within the budget, on the next candidate  never
    502, 503, 504    status of the pod         within the budget, on the next candidate  never
    500              whose engine is dead      within the budget, on the next candidate  never
    UpstreamTimeout  no answer in time         within the budget, on the next candidate  never
    HandoffFailed    a split failed            always, without that handoff              never
    NotServed        the pod lacks the path    always, on the next candidate             never
                     a field of the router's   once, on the same pod without it          never

A 500 of a dead engine is one that says so (`EngineAdapter.is_dead`). Any other may be due to the body, and is returned.
"The first byte" is the first byte sent to the client. A stream that breaks after it may go on at another pod, which is
not a retry (`request/continuation/`). Without budget the client gets the failure: if most requests fail, retrying all
of them would multiply the load on the remaining pods. A handoff can be used once: a request whose handoff failed has
not been answered by any pod yet, so the budget does not count its next attempt.

After every failure but ConnectFailed a pod may have received the request, so two more rules apply:

- At most `MAX_FAILED_ATTEMPTS` attempts fail. The request itself may be the cause: a body that crashes one engine would
  crash the whole fleet.
- A request to an endpoint that the router does not read (a path of `edge.extra_paths`) is repeated only if its method
  is idempotent (RFC 9110 9.2.2); a second POST could create a second object. It is sent over a new connection, because
  a kept one may die after it has transported the request. The same holds for a request to `/v1/responses` that sets
  `store` or `background`, follows a stored response, or has tools that the engine calls itself. Without these, no
  client knows the id of an earlier response, so nobody can find a second one.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from math import exp

from router.errors import (
    ConnectFailed,
    HandoffFailed,
    NotServed,
    StaleConnection,
    UpstreamBroken,
    UpstreamError,
    UpstreamTimeout,
)
from router.types import Endpoint, InferenceRequest

WINDOW_S = 60.0
"""Time constant of the decay of the counts: longer than most answers take, so that all requests of a dead pod can be
retried."""
FADE_EVERY_S = 0.1
"""Requests within this interval fade together."""
FLOOR = 20
"""Retries per window that are allowed even with few requests."""

RETRY_STATUSES = frozenset({502, 503, 504})
"""Response statuses after which another pod may be tried."""
BUSY_STATUS = 429
"""A pod that answers it refuses work that it could do later."""
DOUBTFUL_STATUS = 500
"""Response status of an engine that fails, or of one that cannot handle the body."""
MAX_FAILED_ATTEMPTS = 2
"""Attempts that may fail after a pod received the request."""
IDEMPOTENT_METHODS = frozenset({"GET", "HEAD", "PUT", "DELETE", "OPTIONS", "TRACE"})


_STATEFUL = ("previous_response_id", "background", "store")
_ENGINE_TOOLS = (b'"mcp"', b'"code_interpreter"', b'"web_search', b'"container"', b'"computer', b'"file_search"')
"""Types of tools that engines call themselves."""


class Retry(StrEnum):
    """Whether a failure may be retried."""

    ALWAYS = "always"
    IN_BUDGET = "within the budget"
    SAME_POD_ONCE = "once, on the same pod"
    NEVER = "never"


RETRY_RULES: Mapping[type[UpstreamError], Retry] = {
    UpstreamError: Retry.NEVER,
    ConnectFailed: Retry.ALWAYS,
    StaleConnection: Retry.SAME_POD_ONCE,
    UpstreamBroken: Retry.IN_BUDGET,
    UpstreamTimeout: Retry.IN_BUDGET,
    HandoffFailed: Retry.ALWAYS,
    NotServed: Retry.ALWAYS,
}


def retry_rule(error: UpstreamError, *, bytes_sent: bool) -> Retry:
    """The row of the table. `bytes_sent`: whether the client has received a byte."""
    return Retry.NEVER if bytes_sent else RETRY_RULES[type(error)]


def is_repeatable(request: InferenceRequest, method: str) -> bool:
    """Whether a request may be sent again after a pod received it. Inference changes nothing on a pod."""
    if request.endpoint.api.may_be_stored:
        fields = request.prompt
        tools = fields.get("tools")
        runs_tools = tools is not None and any(map(bytes(memoryview(tools)).__contains__, _ENGINE_TOOLS))
        return not (runs_tools or any(fields.get(name) for name in _STATEFUL))
    return request.endpoint is not Endpoint.OTHER or method in IDEMPOTENT_METHODS


class RetryBudget:
    """Allows `FLOOR` retries plus a share of the requests of about the last `WINDOW_S`; counts fade exponentially."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._requests = 0.0
        self._retries = 0.0
        self._at_s = 0.0

    def count_request(self, now_s: float) -> None:
        if now_s - self._at_s > FADE_EVERY_S:
            self._fade(now_s)
        self._requests += 1

    def has_retry(self, now_s: float) -> bool:
        self._fade(now_s)
        return self._retries + 1 <= FLOOR + self._share * self._requests

    def spend(self, now_s: float) -> bool:
        """Use a retry. False if none is left."""
        if not self.has_retry(now_s):
            return False
        self._retries += 1
        return True

    def _fade(self, now_s: float) -> None:
        kept = exp((self._at_s - now_s) / WINDOW_S) if now_s > self._at_s else 1.0
        self._requests *= kept
        self._retries *= kept
        self._at_s = max(self._at_s, now_s)
