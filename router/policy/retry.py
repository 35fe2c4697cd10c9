"""May a request that failed be tried again, and where?

    failure                                    before the first byte                     after it
    ConnectFailed    nothing was sent          always, on the next candidate             never
    StaleConnection  a kept connection died    once, on the same pod, connected anew     never
    UpstreamBroken   reset, cut, garbled       within the budget, on the next candidate  never
    502, 503, 504    the pod says so itself    within the budget, on the next candidate  never
    UpstreamTimeout  no answer in time         within the budget, on the next candidate  never
    HandoffFailed    a split fell apart        always, without that handoff              never

"The first byte" is the first that went to the client. What a budget refuses is answered with the failure itself: where
most requests fail, trying each of them again would multiply the load on what is left. A handoff is of use once, so that
what follows one is never a second try of it, but a request that nobody has answered yet: budgets do not count it. How
many candidates there are to try is the policy's and the configuration's business. This file never tries anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from math import exp

from router.errors import (
    ConnectFailed,
    HandoffFailed,
    StaleConnection,
    UpstreamBroken,
    UpstreamError,
    UpstreamTimeout,
)

WINDOW_S = 60.0
"""How long a request counts, as a time constant: longer than most answers take, so that those that one dead pod leaves
behind can all be tried again."""
FADE_EVERY_S = 0.1
"""Requests that come sooner after one another count as if they had come together."""
FLOOR = 20
"""Retries in such a time that are allowed however few requests there are."""

RETRY_STATUSES = frozenset({502, 503, 504})
"""Answers with which a pod says that another one should try."""


class Retry(StrEnum):
    """What the law says of a failure."""

    ALWAYS = "always"
    IN_BUDGET = "within the budget"
    SAME_POD_ONCE = "once, on the same pod"
    NEVER = "never"


LAW: Mapping[type[UpstreamError], Retry] = {
    UpstreamError: Retry.NEVER,
    ConnectFailed: Retry.ALWAYS,
    StaleConnection: Retry.SAME_POD_ONCE,
    UpstreamBroken: Retry.IN_BUDGET,
    UpstreamTimeout: Retry.IN_BUDGET,
    HandoffFailed: Retry.ALWAYS,
}


def law_of(error: UpstreamError, *, bytes_sent: bool) -> Retry:
    """The row of the table. `bytes_sent`: has the client got anything?"""
    return Retry.NEVER if bytes_sent else LAW[type(error)]


class RetryBudget:
    """Retries may be `FLOOR` and a share of the requests of about the last `WINDOW_S`; both fade exponentially."""

    __slots__ = ("_at_s", "_requests", "_retries", "_share")

    def __init__(self, share: float) -> None:
        self._share = share
        self._requests = 0.0
        self._retries = 0.0
        self._at_s = 0.0

    def asked(self, now_s: float) -> None:
        """One more request came in."""
        if now_s - self._at_s > FADE_EVERY_S:
            self._fade(now_s)
        self._requests += 1

    def left(self, now_s: float) -> bool:
        """Is there a retry to be had?"""
        self._fade(now_s)
        return self._retries + 1 <= FLOOR + self._share * self._requests

    def spend(self, now_s: float) -> bool:
        """Take one. False where none is left."""
        if not self.left(now_s):
            return False
        self._retries += 1
        return True

    def _fade(self, now_s: float) -> None:
        kept = exp((self._at_s - now_s) / WINDOW_S) if now_s > self._at_s else 1.0
        self._requests *= kept
        self._retries *= kept
        self._at_s = max(self._at_s, now_s)
