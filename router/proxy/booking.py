"""Which places does an attempt take up, and for how long?

Booked before the attempt first awaits anything, given back whatever happens: on the pod that answers, on the one that
computes the prompt for it, and on the one that sends KV. This file never sends anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from router.decision import Candidate, Lease, Split
from router.fleet.ledger import Ledger
from router.policy.calibration import ALONE, Beside, PrefillClock, PrefillObservation
from router.types import PodId


class Booking:
    """The places of one attempt. `first_token` and `release` may be called again, or late, and then change nothing."""

    __slots__ = (
        *("_answering", "_arrived", "_clock", "_computing", "_ledger", "_prefilling", "_pull_began_s", "_sending"),
        *("observation", "pulled_ms", "concurrent_transfers"),
    )

    def __init__(
        self, ledger: Ledger, candidate: Candidate, prompt_tokens: int, clock: Callable[[PodId], PrefillClock]
    ) -> None:
        plan, cached_tokens, now_s = candidate.plan, candidate.cached_tokens, time.monotonic()
        self.observation: PrefillObservation | None = None
        """What the pod that computed the prompt has shown of its speed."""
        self.concurrent_transfers = 0
        """How many transfers the sender of KV was busy with when ours began."""
        self.pulled_ms: float | None = None
        """How long a pull and what was left to compute took, on a pod that had nothing else to do."""
        self._pull_began_s: float | None = None
        self._ledger = ledger
        self._arrived = False
        self._prefilling: Lease | None = None
        self._sending: PodId | None = None
        if isinstance(plan, Split):
            self._prefilling = ledger.book(plan.prefill, prompt_tokens, cached_tokens, now_s)
            self._answering = ledger.book(plan.decode, prompt_tokens, 0, now_s, prefills=False)
        else:
            self._answering = ledger.book(plan.pod, prompt_tokens, cached_tokens, now_s)
            if plan.pull is not None:
                self._send(plan.pull.holder)
                self._pull_began_s = now_s if ledger.on(plan.pod.id).requests == 1 else None
        computing = self._computing = self._prefilling or self._answering
        self._clock = clock(computing.pod)
        beside, step_began_s = self._beside(computing.pod)
        self._clock.sent(computing.id, prompt_tokens, cached_tokens, now_s, beside, step_began_s)
        if plan.pull is not None or ledger.others_prefill(computing.pod):
            self._clock.disturbed()

    @property
    def prefill_ms(self) -> float:
        """The prefill that was booked, wherever."""
        return self._computing.prefill_ms

    def handed_over(self) -> None:
        """The prefill pod has answered: from now on it only sends KV."""
        if self._prefilling is not None:
            now_s = time.monotonic()
            self._learn(self._prefilling, now_s)
            self._ledger.release(self._prefilling, now_s)
            if not self._arrived:
                self._send(self._prefilling.pod)

    def first_token(self) -> None:
        """The prompt is computed, and all KV is where it is needed."""
        if self._arrived:
            return
        now_s = time.monotonic()
        if self._prefilling is None:
            self._learn(self._answering, now_s)
        if self._pull_began_s is not None:
            self.pulled_ms, self._pull_began_s = (now_s - self._pull_began_s) * 1000, None
        self._arrives(now_s)

    def first_token_is_due(self) -> None:
        """It should be there by now; nobody sees it."""
        if not self._arrived:
            self._clock.gone(self._answering.id)
            self._pull_began_s = None
            self._arrives(time.monotonic())

    def release(self) -> None:
        """The attempt is over."""
        now_s = time.monotonic()
        if self._prefilling is not None:
            self._clock.gone(self._prefilling.id)
            self._ledger.release(self._prefilling, now_s)
        elif not self._arrived:
            self._clock.gone(self._answering.id)
        self._ledger.release(self._answering, now_s)
        if not self._arrived:
            self._sent()

    def _learn(self, lease: Lease, now_s: float) -> None:
        self.observation = self._clock.first_token(lease.id, now_s, self._beside(lease.pod)[0])

    def _beside(self, pod: PodId) -> tuple[Beside, float]:
        """Who decodes there, and when the step began in which they do."""
        requests, context_tokens, step_began_s = self._ledger.decoding(pod)
        return Beside(requests, context_tokens) if requests else ALONE, step_began_s

    def _arrives(self, now_s: float) -> None:
        self._ledger.first_token(self._answering, now_s)
        self._sent()

    def _send(self, holder: PodId) -> None:
        self._sending = holder
        self.concurrent_transfers = self._ledger.pull_began(holder)

    def _sent(self) -> None:
        self._arrived = True
        if self._sending is not None:
            self._ledger.pull_ended(self._sending)
            self._sending = None
