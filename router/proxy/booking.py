"""Which places does an attempt take up, and for how long?

Booked before the attempt first awaits anything, given back whatever happens: on the pod that answers, on the one that
computes the prompt for it, and on the one that sends KV. This file never sends anything.
"""

from __future__ import annotations

import time

from router.fleet.ledger import Ledger
from router.types import Candidate, Lease, PodId, Split


class Booking:
    """The places of one attempt. `first_token` and `release` may be called again, or late, and then change nothing."""

    __slots__ = ("_answering", "_arrived", "_ledger", "_prefilling", "_sending")

    def __init__(self, ledger: Ledger, candidate: Candidate, prompt_tokens: int) -> None:
        plan, cached_tokens, now_s = candidate.plan, candidate.cached_tokens, time.monotonic()
        self._ledger = ledger
        self._arrived = False
        self._prefilling: Lease | None = None
        self._sending: PodId | None = None
        if isinstance(plan, Split):
            self._prefilling = ledger.book(plan.prefill, prompt_tokens, cached_tokens, now_s)
            self._answering = ledger.book(plan.decode, prompt_tokens, 0, now_s, prefills=False)
            return
        self._answering = ledger.book(plan.pod, prompt_tokens, cached_tokens, now_s)
        if plan.pull is not None:
            self._send(plan.pull.holder)

    @property
    def prefill_ms(self) -> float:
        """The prefill that was booked, wherever."""
        return (self._prefilling or self._answering).prefill_ms

    def handed_over(self) -> None:
        """The prefill pod has answered: from now on it only sends KV."""
        if self._prefilling is not None:
            self._ledger.release(self._prefilling, time.monotonic())
            if not self._arrived:
                self._send(self._prefilling.pod)

    def first_token(self) -> None:
        """The prompt is computed, and all KV is where it is needed."""
        self._ledger.first_token(self._answering, time.monotonic())
        self._sent()

    def release(self) -> None:
        """The attempt is over."""
        now_s = time.monotonic()
        if self._prefilling is not None:
            self._ledger.release(self._prefilling, now_s)
        self._ledger.release(self._answering, now_s)
        self._sent()

    def _send(self, holder: PodId) -> None:
        self._sending = holder
        self._ledger.pull_began(holder)

    def _sent(self) -> None:
        self._arrived = True
        if self._sending is not None:
            self._ledger.pull_ended(self._sending)
            self._sending = None
