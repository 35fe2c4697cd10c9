"""How do two pods serve one request?

The prefill leg computes the prompt on one pod; the decode leg gets its KV on another, and answers. One follows the
other or both are sent at once, as the dialect has it. A failure of either ends both and is held against the pod whose
fault it is; what comes next is the next candidate, without this handoff. The same where a pod refuses a body that is
not the client's own: a client is told of errors in its own words only, unless no candidate is left to be asked with
them. This file never retries.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from router.decision import Plan, Split
from router.engines.engine_catalog import DIALECTS
from router.engines.handoff.dialect import Handoff, Order, Pair
from router.errors import HandoffFailed, MalformedRequest, NoReadyPod, RouterError, UpstreamBroken
from router.fleet.breaker import Breaker
from router.fleet.fleet import Fleet
from router.observe.calibrator import Calibrator
from router.observe.metrics import Metrics
from router.policy.retry import RETRY_STATUSES
from router.proxy.booking import Booking
from router.proxy.handover import PendingHandoff, SplitAttempt, is_same_epoch
from router.proxy.relay import AnyReply, is_stream, read_all
from router.proxy.replies import DecodeReply, WholeReply
from router.proxy.request_context import RequestContext
from router.proxy.upstream import Reply, UpstreamSender
from router.proxy.whole_stream import as_stream
from router.types import Pod

PREFILL_PATIENCE_S = 0.5
"""Where both legs are sent at once, the prefill leg has answered by the time that the decode leg begins to, or is about
to: its account of cached tokens is not waited for longer."""

Facts: TypeAlias = Callable[[Pod, str], Mapping[str, Any] | None]
"""(prefill pod, dialect) to what the dialect must know of the pod's present life; None while it is not known."""

# vLLM answers a load that failed with 500, or in a stream with an event in place of the first token.
_ERROR_EVENT = re.compile(rb'data: ?\{"error"')

TRANSFER_PATIENCE_S = 20.0
"""How long after both legs were sent the prefill pod is watched, where the KV follows its answer."""
LOOK_EVERY_S = 0.25


class SplitExecutor:
    """Carries out `Split` plans."""

    def __init__(
        self,
        fleet: Fleet,
        breaker: Breaker,
        sender: UpstreamSender,
        facts: Facts,
        metrics: Metrics,
        calibrator: Calibrator,
    ) -> None:
        self._fleet = fleet
        self._breaker = breaker
        self._sender = sender
        self._facts = facts
        self._metrics = metrics
        self._calibrator = calibrator

    def unusable_reason(self, context: RequestContext, plan: Plan) -> RouterError | None:
        """What keeps this request from being served so; None where nothing does."""
        if not isinstance(plan, Split):
            return NoReadyPod(f"Pod {plan.pod.id} serves no request on its own.") if not plan.pod.serves_alone else None
        if why := context.refused_by(plan.prefill.handoff):
            return MalformedRequest(why)
        if self._facts(plan.prefill, plan.prefill.handoff) is None:
            return NoReadyPod(f"Pod {plan.prefill.id} has not said yet where its KV is to be had.")
        return None

    async def open(self, context: RequestContext, plan: Split, booking: Booking, *, last: bool) -> AnyReply:
        """The client's answer, as soon as it has begun. Raises `UpstreamError`; both legs have ended then."""
        name = plan.prefill.handoff
        facts = self._facts(plan.prefill, name) or {}
        pair = Pair(plan.prefill, plan.decode, secrets.randbits(63), facts)
        handover = SplitAttempt(context, plan, DIALECTS[name], pair, booking, last)
        prefill = asyncio.ensure_future(self._prefill(handover))
        prefill.add_done_callback(_retrieved)
        try:
            together = handover.dialect.order is Order.TOGETHER
            reply = await (self._together if together else self._in_turn)(handover, prefill)
        except BaseException as error:
            prefill.cancel()
            self._metrics.handoffs.labels(name, handover.failed_by(error)).inc()
            raise
        self._metrics.handoffs.labels(name, handover.result).inc()
        return reply

    # --- the prefill leg ---

    async def _prefill(self, handover: SplitAttempt) -> WholeReply:
        """Its whole answer: a 200, or a refusal of the request."""
        pod = handover.pair.prefill
        reply = await self._sender.send_once(handover.context.inbound, pod, handover.prefill_body)
        answer = WholeReply(pod.id, reply.status, reply.headers, await read_all(reply))
        if answer.status == 200:
            handover.booking.handed_over()
            self._metrics.sent.labels(pod.id, "ok").inc()
        elif not 400 <= answer.status < 500:
            raise UpstreamBroken(f"pod {pod.id} answered {answer.status} to a prefill leg", pod=pod.id)
        return answer

    async def _in_turn(self, handover: SplitAttempt, prefill: asyncio.Task[WholeReply]) -> AnyReply:
        answer = await prefill
        if answer.status != 200:
            return _refusal(handover, answer)
        handover.began_s = time.monotonic()
        handoff = handover.read(answer.body)
        if handoff is not None and handoff.answer is not None:
            return self._answered(handover, handoff.answer)
        held = PendingHandoff(handoff, handover.pair.prefill, handover.began_s + handover.dialect.hold_s)
        return await self._decode(handover, held, prefill)

    async def _together(self, handover: SplitAttempt, prefill: asyncio.Task[WholeReply]) -> AnyReply:
        """Either leg alone would wait for the other for minutes: the failure of one ends both."""
        held = PendingHandoff(Handoff(), handover.pair.prefill, handover.began_s + handover.dialect.hold_s)
        decode = asyncio.ensure_future(self._decode(handover, held, prefill))
        try:
            await asyncio.wait((prefill, decode), return_when=asyncio.FIRST_COMPLETED)
            if not decode.done() and (answer := prefill.result()).status != 200:
                return _refusal(handover, answer)
            await self._while_it_lives(handover, decode)
            return await decode
        finally:
            decode.cancel()

    async def _while_it_lives(self, handover: SplitAttempt, decode: asyncio.Future[DecodeReply]) -> None:
        """A prefill pod that dies right after its answer takes the KV along, and engines wait minutes for that. Raises
        `UpstreamBroken`. Later than a transfer can take, its life no longer matters."""
        pod, until_s = handover.pair.prefill, time.monotonic() + TRANSFER_PATIENCE_S
        while not decode.done() and time.monotonic() < until_s:
            await asyncio.wait((decode,), timeout=LOOK_EVERY_S)
            if not decode.done() and not is_same_epoch(self._fleet, pod):
                handover.result = "prefill_failed"
                raise UpstreamBroken(f"pod {pod.id} died after its answer to a prefill leg", pod=pod.id)

    def _answered(self, handover: SplitAttempt, answer: bytes) -> WholeReply:
        """The prefill leg's one token was all there is to say."""
        handover.result = "answered"
        pod, request = handover.pair.prefill.id, handover.context.request
        if not request.stream:
            self._breaker.success(pod)
            return WholeReply(pod, 200, [(b"content-type", b"application/json")], answer)
        try:
            events = as_stream(request.endpoint, answer, request.body)
        except ValueError as error:
            handover.result = "prefill_failed"
            raise UpstreamBroken(f"pod {pod}: {error}", pod=pod) from error
        self._breaker.success(pod)
        return WholeReply(pod, 200, [(b"content-type", b"text/event-stream; charset=utf-8")], events)

    # --- the decode leg ---

    async def _decode(
        self, handover: SplitAttempt, held: PendingHandoff, prefill: asyncio.Task[WholeReply]
    ) -> DecodeReply:
        """The decode pod's answer from its first piece on. Raises `UpstreamError`."""
        inbound, pod = handover.context.inbound, handover.pair.decode
        reply = await self._sender.send_once(inbound, pod, lambda: handover.decode_body(held, self._fleet))
        try:
            first = await self._first_piece(handover, reply)
            if not prefill.done():
                await asyncio.wait((prefill,), timeout=PREFILL_PATIENCE_S)
        except BaseException:
            reply.close()
            raise
        if handover.dialect.order is Order.TOGETHER:
            handover.count_cached_tokens(prefill)
        return DecodeReply(reply, first, handover.context.handed_over_cached_tokens, prefill.cancel)

    async def _first_piece(self, handover: SplitAttempt, reply: Reply) -> bytes:
        """Raises where what was handed over may be the reason that there is no answer."""
        prefill = handover.pair.prefill.id
        if reply.status >= 500:
            blamed = reply.pod if reply.status in RETRY_STATUSES else prefill
            handover.decode_failed(f"answered {reply.status}", blamed=blamed)
        elif reply.status >= 400:
            handover.decode_failed(f"answered {reply.status}")
        first = await reply.read()
        if is_stream(reply.headers) and _ERROR_EVENT.match(first):
            handover.decode_failed("began with an error", blamed=prefill)
        elif reply.status < 400:
            self._breaker.success(prefill)
            self._observe_handoff(handover)
        return first

    def _observe_handoff(self, handover: SplitAttempt) -> None:
        """An unstreamed answer does not show when the KV was there."""
        if not (handover.context.request.stream and handover.took_over):
            return
        elapsed_s, plan = time.monotonic() - handover.began_s, handover.plan
        self._metrics.handoff_s.labels(plan.prefill.handoff).observe(elapsed_s)
        if handover.dialect.order is Order.PREFILL_FIRST:
            self._calibrator.observe_transfer(
                plan.prefill, plan.decode, plan.handoff_tokens, elapsed_s * 1000, handover.booking.sent_beside
            )


def _refusal(handover: SplitAttempt, answer: WholeReply) -> WholeReply:
    """The prefill pod's 4xx reaches the client only where nobody else is left to judge the client's own body."""
    handover.result = "prefill_refused"
    if not handover.last:
        raise HandoffFailed(f"pod {answer.pod} answered {answer.status} to a prefill leg")
    return answer


def _retrieved(prefill: asyncio.Task[WholeReply]) -> None:
    """Once the decode pod answers, nobody asks any longer how the prefill leg ended."""
    if not prefill.cancelled():
        prefill.exception()
