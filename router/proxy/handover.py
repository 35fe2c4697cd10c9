"""What is being handed over, and may it still be used?

One attempt to serve with two pods: what its legs are told, and what came of it. A handoff is used once, soon after the
prefill leg's answer, and only in the life in which its pod gave it: an engine that gets an old one answers 200 with
another prompt's text and keeps that in its cache, and no counter moves, so that nobody but the router can prevent it.
This file never asks a pod.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from router.decision import Split
from router.engines.handoff.dialect import Dialect, Handoff, Pair
from router.errors import HandoffFailed, UpstreamError
from router.fleet.fleet import Fleet
from router.proxy.answer import AnswerReader
from router.proxy.booking import Booking
from router.proxy.replies import WholeReply
from router.proxy.request_context import RequestContext
from router.types import Pod, PodId, PodState


def is_same_epoch(fleet: Fleet, pod: Pod) -> bool:
    """Whether it is there, not ejected, and has not restarted since `pod` was read: it still has the KV it had."""
    status = fleet.status(pod.id)
    return status is not None and status.pod.epoch == pod.epoch and status.state is not PodState.EJECTED


class PendingHandoff:
    """What `prefill`, as the decision saw it, has offered; of use until `expires_at_s`."""

    def __init__(self, handoff: Handoff | None, prefill: Pod, expires_at_s: float) -> None:
        self._handoff = handoff
        self._prefill = prefill
        self._expires_at_s = expires_at_s
        self.offered = handoff is not None

    def take(self, fleet: Fleet, now_s: float) -> Handoff | None:
        """The handoff, to be sent this very moment; None where it is too late for that, and ever after."""
        handoff, self._handoff = self._handoff, None
        return handoff if is_same_epoch(fleet, self._prefill) and now_s < self._expires_at_s else None


@dataclass(slots=True)
class SplitAttempt:
    """One attempt. `last`: no other candidate will be tried."""

    context: RequestContext
    plan: Split
    dialect: Dialect
    pair: Pair
    booking: Booking
    last: bool
    began_s: float = field(default_factory=time.monotonic)
    """Since when the KV may be on its way."""
    took_over: bool = False
    """Was the decode pod told of any KV?"""
    result: str = "ok"

    def prefill_body(self) -> bytes:
        """For the prefill pod."""
        request = self.context.request
        return self.dialect.prefill_body(request.endpoint, request.body, self.pair)

    def read(self, answer: bytes) -> Handoff | None:
        """What the prefill pod offers."""
        request = self.context.request
        handoff = self.dialect.read_handoff(request.endpoint, answer, self.pair)
        if handoff is None:
            return None
        self.context.handed_over_cached_tokens = handoff.cached_tokens
        return handoff

    def decode_body(self, held: PendingHandoff, fleet: Fleet) -> bytes:
        """For the decode pod, now: the client's own where nothing can be handed over; it then computes the prompt."""
        request = self.context.request
        handoff = held.take(fleet, time.monotonic())
        self.took_over = handoff is not None
        if handoff is None:
            self.result = "dropped" if held.offered else "not_offered"
            self.context.handed_over_cached_tokens = None
            return request.body
        return self.dialect.decode_body(request.endpoint, request.body, self.pair, handoff)

    def decode_failed(self, why: str, *, blamed: PodId = "") -> None:
        """The decode pod has no answer. Raises `HandoffFailed` where what it was handed may be the reason, and another
        candidate does without."""
        self.result = "decode_failed"
        if self.took_over and not self.last:
            raise HandoffFailed(
                f"pod {self.pair.decode.id} {why} after a handoff by {self.pair.prefill.id}", pod=blamed
            )

    def count_cached_tokens(self, prefill: asyncio.Task[WholeReply]) -> None:
        """What the prefill leg's answer, if it is there, tells of its own cache."""
        if prefill.done() and not prefill.cancelled() and prefill.exception() is None:
            reader = AnswerReader()
            reader.feed(prefill.result().body)
            self.context.handed_over_cached_tokens = reader.cached_tokens

    def failed_by(self, error: BaseException) -> str:
        """How a failure is counted."""
        if isinstance(error, asyncio.CancelledError):
            return "client_gone"
        if self.result != "ok" or not isinstance(error, UpstreamError):
            return self.result
        return "prefill_failed" if error.pod == self.pair.prefill.id else "decode_failed"
