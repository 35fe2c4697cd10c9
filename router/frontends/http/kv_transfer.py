"""How do two pods serve one request, with KV that is transferred from one to the other?

In a split the prefill pod computes the prompt; the decode pod receives its KV and responds. The dialect says whether
the decode request follows the prefill response or both are sent at once. A failure of either ends both; the next
candidate is tried without this handoff. A leg that hangs has failed (`fleet/legs.py`); KV that nobody will fetch is
given back (`kv_returns.py`). A refusal of a body that the router changed is handled the same way: unless no candidate
is left, the client only receives errors about its own body.

A handoff is used once, soon after the prefill response, and only while its pod's process lives. An engine that receives
an old one responds 200 with the text of another prompt, so only the router can prevent it.

In a pull, one pod receives the request, and its body names the peer to fetch KV from, in the pod's dialect. If the pod
refuses that body or fails, the next candidate receives the client's own body.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar

from router.decision import Split
from router.engines.engine_catalog import DIALECTS
from router.engines.handoff.addresses import foreign_address
from router.engines.handoff.bodies import Opaque
from router.engines.handoff.dialect import Dialect, Handoff, Order, Pair
from router.errors import HandoffFailed, UpstreamBroken, UpstreamError, UpstreamTimeout
from router.fleet.fleet import Fleet
from router.fleet.legs import LegTimes
from router.frontends.fair_turns import FairTurns
from router.frontends.http.connection import Connection
from router.frontends.http.kv_returns import KvReturns
from router.frontends.http.relay import RESPONSE, AnyReply, HandoffReply, WholeReply, as_stream, read_all
from router.frontends.http.upstream import Reply, UpstreamSender
from router.observe.declared import of_pods
from router.observe.ended import CLIENT_GONE
from router.observe.metrics import Metrics
from router.policy.decide import compatible, expected_ttft_ms
from router.policy.retry import DOUBTFUL_STATUS, RETRY_STATUSES
from router.request.attempt_rules import FactsLookup
from router.request.context import RequestContext
from router.request.fleet_state import FleetState
from router.request.inbound import EVENT_STREAM, media_type
from router.request.response_reader import ResponseReader, has_early_error
from router.request.tracker import Tracker
from router.stores.logged_once import LoggedOnce
from router.types import Pod, PodId, PodState, Role

_T = TypeVar("_T")

PREFILL_GRACE_S = 0.5
"""The decode response waits at most this long for the cached-token count of the prefill response."""
MAX_TRANSFER_S = 20.0
"""Where no first token shows that the decode pod has the KV, the prefill pod is watched for this long."""
WATCH_INTERVAL_S = 0.25
PREFILL_LIMIT_S, DECODE_LIMIT_S = 2.0, 5.0
"""Before these times no leg hangs, however little was expected: the first transfer between two pods takes seconds."""
LAST_LIMIT_S = 30.0
"""The same for the last candidate: the request itself may be slow, for a grammar or a picture that the pod fetches."""
LEG_CHECK_S = 0.5
"""How often a leg is looked at that takes longer than its limit."""


def still_has_kv(fleet: Fleet, pod: Pod) -> bool:
    """Whether the pod is present, not ejected, and has not restarted since `pod` was read."""
    status = fleet.same_epoch(pod)
    return status is not None and status.state is not PodState.EJECTED


@dataclass(slots=True)
class SplitAttempt:
    """One attempt with two pods. `last`: no other candidate will be tried."""

    tracker: Tracker
    plan: Split
    dialect: Dialect
    pair: Pair
    last: bool
    began_s: float = field(default_factory=time.monotonic)
    """When the KV transfer may have begun; `Dialect.hold_s` counts from here."""
    sent_handoff: bool = False
    reply: Reply | None = None
    """The decode pod's response, owned here until `open` returns it: the task that received it may be done when its
    request is cancelled."""
    is_over: bool = False
    """No response of the decode pod is wanted any more."""
    result: str = "ok"
    leg: asyncio.Task[WholeReply] | None = None
    """The prefill request of PREFILL_FIRST, until its response is used."""
    connection: Connection | None = None
    """On which that request was sent."""
    unread: Handoff | None = None
    """The handoff while no decode pod has read its KV, which the prefill pod holds until then."""

    @property
    def expected_ms(self) -> float:
        """Until the first token, as priced."""
        return expected_ttft_ms(self.context.candidate.cost) if self.context.candidate else 0.0

    @property
    def context(self) -> RequestContext:
        return self.tracker.context

    def sent_prefill(self, connection: Connection) -> None:
        self.connection = connection

    def read(self, response: bytes) -> Handoff | None:
        """The handoff that the prefill pod offers."""
        handoff = self.dialect.read_handoff(response)
        if handoff is not None:
            self.context.handed_over_cached_tokens = handoff.cached_tokens
            self.unread = handoff
        return handoff

    def body_after(self, offered: Handoff | None) -> bytes:
        """The body for the decode pod with this handoff, if there is one."""
        request = self.context.request
        if offered is None:
            return request.body
        return self.dialect.decode_body(request.endpoint, request.body, self.pair, offered)

    def decode_body(self, offered: Handoff | None, fleet: Fleet, edited: bytes) -> bytes:
        """The body for the decode pod, to be sent now: `edited`, or the client's own where no handoff was offered, or
        where it was used or is too old, so that the decode pod computes the prompt."""
        request, in_time = self.context.request, time.monotonic() < self.began_s + self.dialect.hold_s
        if offered is None or self.sent_handoff or not in_time or not still_has_kv(fleet, self.pair.prefill):
            self.result = "dropped" if offered else "not_offered"
            self.context.handed_over_cached_tokens = None
            return request.body
        self.sent_handoff = True
        return edited

    def decode_failed(self, why: str, *, caused_by: PodId = "", doubtful: bool = False) -> None:
        """Record that the decode pod failed. Raises `HandoffFailed` if the handoff may be the cause and a candidate is
        left."""
        self.result = "decode_failed"
        if self.sent_handoff and not self.last:
            decode, prefill = self.pair.decode.id, self.pair.prefill.id
            why = f"pod {decode}: {why}, after a handoff by pod {prefill}"
            raise HandoffFailed(why, pod=caused_by, doubtful=doubtful)

    def count_cached_tokens(self, prefill: asyncio.Task[WholeReply]) -> None:
        if prefill.done() and not prefill.cancelled() and prefill.exception() is None:
            reader = ResponseReader()
            reader.feed(prefill.result().body)
            self.context.handed_over_cached_tokens = reader.cached_tokens

    def received(self, reply: Reply) -> Reply:
        """The decode pod's response. Raises `CancelledError` where it came after `close_reply`: a cancelled task may
        still run until its next wait."""
        self.reply = reply
        if self.is_over:
            reply.close()
            raise asyncio.CancelledError
        return reply

    def close_reply(self) -> None:
        self.is_over = True
        if self.reply is not None:
            self.reply.close()

    def failed_by(self, error: BaseException) -> str:
        if isinstance(error, asyncio.CancelledError):
            return CLIENT_GONE
        if self.result != "ok" or not isinstance(error, UpstreamError):
            return self.result
        return "prefill_failed" if error.pod == self.pair.prefill.id else "decode_failed"


class SplitExecutor:
    def __init__(self, state: FleetState, facts: FactsLookup, sender: UpstreamSender, metrics: Metrics) -> None:
        self._fleet = state.fleet
        self._ledger = state.ledger
        self._legs = LegTimes(state.fleet)
        self._breaker = state.breaker
        self._sender = sender
        self._facts = facts
        self._metrics = metrics
        self._calibrator = state.calibrator
        self._turns = FairTurns()
        self.returns = KvReturns(sender)
        self._logged = LoggedOnce()

    async def open(self, tracker: Tracker, plan: Split) -> AnyReply:
        """The client's response once it has begun. Raises `UpstreamError`; then both requests have ended."""
        attempt = self._begin(tracker, plan)
        prefill = asyncio.ensure_future(self._prefill(attempt))
        # After the decode response has begun its error does not matter.
        prefill.add_done_callback(_retrieve)
        try:
            together = attempt.dialect.order is Order.TOGETHER
            reply = await (self._together if together else self._in_turn)(attempt, prefill)
        except BaseException as error:
            prefill.cancel()
            attempt.close_reply()
            self._count(attempt, attempt.failed_by(error))
            self._give_up(attempt, error.pod if isinstance(error, UpstreamError) else "")
            raise
        self._count(attempt, attempt.result)
        self._return_unread(attempt)
        return reply

    async def open_prefill(self, tracker: Tracker, plan: Split) -> tuple[SplitAttempt, bytes | WholeReply]:
        """Serve the prefill request alone, where a gateway sends the decode request. Returns the body of that, or the
        client's whole response. Raises `UpstreamError`."""
        attempt = self._begin(tracker, plan)
        try:
            offered = self._offered(attempt, await self._prefill(attempt))
            if isinstance(offered, WholeReply):
                return attempt, offered
            edited = await self._edited(attempt, offered)
            return attempt, attempt.decode_body(offered, self._fleet, edited)
        except BaseException as error:
            self._count(attempt, attempt.failed_by(error))
            self._give_up(attempt)
            raise

    def close_prefill(self, attempt: SplitAttempt) -> None:
        """Record what came of the handoff of `open_prefill`, at the end of the response."""
        context = attempt.context
        if not context.status:
            attempt.result = CLIENT_GONE
        elif context.status >= 400:
            attempt.result = "decode_failed" if attempt.result == "ok" else attempt.result
        else:
            attempt.unread = None
            self._served(attempt)
            if context.first_token_s is not None:
                self._observe_handoff(attempt, context.phases.began_s + context.first_token_s)
        self._count(attempt, attempt.result)
        self._return_unread(attempt)

    def _begin(self, tracker: Tracker, plan: Split) -> SplitAttempt:
        name = plan.prefill.handoff
        facts, source = self._facts(plan.prefill, name) or {}, None
        if plan.pull and (holder := self._fleet.status(plan.pull.holder)):
            source = Pair(holder.pod, plan.prefill, secrets.randbits(63))
        pair = Pair(plan.prefill, plan.decode, secrets.randbits(63), facts, source)
        return SplitAttempt(tracker, plan, DIALECTS[name], pair, tracker.is_last)

    def _count(self, attempt: SplitAttempt, result: str) -> None:
        self._metrics[of_pods.HANDOFFS].labels(attempt.plan.prefill.handoff, result).inc()

    # --- the prefill request ---

    async def _edited(self, attempt: SplitAttempt, offered: Handoff | None) -> bytes:
        context = attempt.context
        return await self._turns.run(context.tenant, context.request.body, attempt.body_after, offered)

    async def _prefill(self, attempt: SplitAttempt) -> WholeReply:
        """The whole response: a 200, or a refusal of the request."""
        pod, context = attempt.pair.prefill, attempt.context
        head, request, edit = context.head, context.request, attempt.dialect.prefill_body
        body = await self._turns.run(context.tenant, request.body, edit, request.endpoint, request.body, attempt.pair)

        async def exchange() -> WholeReply:
            reply = await self._sender.send_once(head, pod, lambda: body, "prefill", attempt.sent_prefill)
            return WholeReply(pod.id, reply.status, reply.headers, await read_all(reply, RESPONSE))

        if attempt.dialect.order is Order.PREFILL_FIRST:
            attempt.leg = asyncio.ensure_future(exchange())
            attempt.leg.add_done_callback(_retrieve)
            response = await self._limited(attempt, pod, PREFILL_LIMIT_S, attempt.leg)
        else:  # the decode leg has the limit: some engines respond to this one when it has ended
            response = await exchange()
        if head.trace is not None:
            head.trace.prefill_ended()
        if response.status == 200:
            attempt.tracker.handed_over(time.monotonic())
            self._metrics.sent.labels(pod.id, "ok").inc()
        elif not 400 <= response.status < 500 and response.status != HTTPStatus.NOT_IMPLEMENTED:
            why, doubtful = f"status {response.status} to a prefill request", response.status == DOUBTFUL_STATUS
            raise UpstreamBroken(f"pod {pod.id}: {why}", pod=pod.id, doubtful=doubtful)
        return response

    async def _limited(
        self,
        attempt: SplitAttempt,
        pod: Pod,
        least_s: float,
        leg: asyncio.Task[_T],
        prefill: asyncio.Task[Any] | None = None,
    ) -> _T:
        """The result of a leg, or of a decode leg where there is a `prefill`. Raises `UpstreamError` once it hangs. The
        caller ends the leg."""
        legs, expected_ms, sent_s = self._legs, attempt.expected_ms, time.monotonic()
        least_s = LAST_LIMIT_S if attempt.last else least_s
        wait_s = legs.limit_s(pod.id, expected_ms, 0.0, least_s)
        while not (await asyncio.wait((leg,), timeout=wait_s))[0]:
            limit_s = legs.limit_s(pod.id, expected_ms, self._ledger.on(pod.id).prefill_ms, least_s)
            piece_at_s, now_s = self._ledger.received_at_s(pod.id), time.monotonic()
            if legs.hangs(pod.id, sent_s, limit_s, piece_at_s, now_s, is_last=attempt.last):
                raise self._hung(attempt, pod, now_s - sent_s, prefill)
            wait_s = LEG_CHECK_S
        found = leg.result()
        legs.answered(pod.id, expected_ms, sent_s, time.monotonic())
        return found

    def _hung(
        self, attempt: SplitAttempt, pod: Pod, after_s: float, prefill: asyncio.Task[Any] | None
    ) -> UpstreamTimeout | HandoffFailed:
        """A decode pod that answers others, or whose prefill pod has not responded, waits for KV that does not come."""
        why = f"pod {pod.id}: no response after {after_s:.1f} s"
        waits = prefill is not None and not (prefill.done() and self._ledger.received_at_s(pod.id) < attempt.began_s)
        if not waits:
            return UpstreamTimeout(why, pod=pod.id, doubtful=True)
        attempt.result = "decode_failed"
        return HandoffFailed(f"{why}: its KV did not come", pod=attempt.pair.prefill.id, doubtful=True)

    async def _in_turn(self, attempt: SplitAttempt, prefill: asyncio.Task[WholeReply]) -> AnyReply:
        offered = self._offered(attempt, await prefill)
        return offered if isinstance(offered, WholeReply) else await self._decode(attempt, offered, prefill)

    def _offered(self, attempt: SplitAttempt, response: WholeReply) -> Handoff | WholeReply | None:
        """The handoff of a prefill response, or the client's whole response. None: the decode pod computes the prompt.
        Raises `UpstreamError`."""
        attempt.leg = None
        if response.status != 200:
            return _refusal(attempt, response)
        attempt.began_s = time.monotonic()
        handoff = attempt.read(response.body)
        if handoff is not None and (address := foreign_address(handoff.params, attempt.pair.prefill)):
            hint = "if its peers may connect there, add the host to the pod's `handoff_hosts`"
            self._logged.warn("a handoff names another host", pod=attempt.pair.prefill.id, address=address, hint=hint)
            return None
        if handoff is not None and handoff.response is not None:
            return self._complete(attempt, handoff.response)
        return handoff

    async def _together(self, attempt: SplitAttempt, prefill: asyncio.Task[WholeReply]) -> AnyReply:
        """Both are sent at once. The failure of one ends both: the other would wait for minutes."""
        decode = asyncio.ensure_future(self._decode(attempt, Handoff(), prefill))
        try:
            await asyncio.wait((prefill, decode), return_when=asyncio.FIRST_COMPLETED)
            if not decode.done() and (response := prefill.result()).status != 200:
                return _refusal(attempt, response)
            await self._watch_prefill_pod(attempt, decode)
            return await decode
        finally:
            decode.cancel()

    async def _watch_prefill_pod(self, attempt: SplitAttempt, decode: asyncio.Future[Any]) -> None:
        """Raise `UpstreamBroken` if the prefill pod dies, or is ejected, before `decode` is done: its KV is lost, and
        engines wait for it for minutes. After `MAX_TRANSFER_S` the transfer is over."""
        pod, until_s = attempt.pair.prefill, time.monotonic() + MAX_TRANSFER_S
        while not decode.done() and time.monotonic() < until_s:
            await asyncio.wait((decode,), timeout=WATCH_INTERVAL_S)
            if not decode.done() and attempt.result == "ok" and not still_has_kv(self._fleet, pod):
                attempt.result = "prefill_failed"
                raise UpstreamBroken(f"pod {pod.id} died after its prefill response", pod=pod.id)

    def _give_up(self, attempt: SplitAttempt, failed: PodId = "") -> None:
        """End the prefill request, and let the pod release the KV that it holds for nobody: also if it had responded
        already, and the response has not been read."""
        if attempt.leg is None:
            self._return_unread(attempt, failed)
        else:
            self.returns.end(attempt.leg, attempt.connection, partial(self._return_late, attempt, failed))

    def _return_late(self, attempt: SplitAttempt, failed: PodId, response: WholeReply) -> None:
        attempt.unread = attempt.dialect.read_handoff(response.body) if response.status == 200 else None
        self._return_unread(attempt, failed)

    def _return_unread(self, attempt: SplitAttempt, failed: PodId = "") -> None:
        """Let a pod that has not just failed release the KV that the prefill pod holds for nobody."""
        handoff, attempt.unread, pair = attempt.unread, None, attempt.pair
        if handoff is None or not still_has_kv(self._fleet, pair.prefill):
            return
        ready = (status.pod for status in self._fleet.snapshot.pods if status.state is PodState.READY)
        able = [
            pod for pod in ready if pod.id != failed and pod.role is not Role.PREFILL and compatible(pair.prefill, pod)
        ]
        if able:
            peer = next((pod for pod in able if pod.id == pair.decode.id), able[0])
            self.returns.give_back(pair.prefill, peer, handoff.params)

    def return_offer(self, pair: Pair, params: Opaque) -> None:
        """The decode pod holds the KV of its answer for a next turn. The prefill pod releases it."""
        hint = "remove `bidirectional_kv_xfer` from its --kv-transfer-config (docs/handoff.md#offers)"
        self._logged.warn("a decode pod holds the KV of its answers", pod=pair.decode.id, hint=hint)
        self.returns.give_back(pair.decode, pair.prefill, params)

    def _complete(self, attempt: SplitAttempt, response: bytes) -> WholeReply:
        """The client's response, which the one token of the prefill response completed."""
        attempt.result = "answered"
        pod, request = attempt.pair.prefill.id, attempt.context.request
        if not request.stream:
            return WholeReply(pod, 200, [(b"content-type", b"application/json")], response)
        try:
            events = as_stream(request.endpoint, response, request.body)
        except ValueError as error:
            attempt.result = "prefill_failed"
            raise UpstreamBroken(f"pod {pod}: {error}", pod=pod) from error
        return WholeReply(pod, 200, [(b"content-type", b"text/event-stream; charset=utf-8")], events)

    # --- the decode request ---

    async def _decode(
        self, attempt: SplitAttempt, offered: Handoff | None, prefill: asyncio.Task[WholeReply]
    ) -> HandoffReply:
        """The decode pod's response from its first piece on. Raises `UpstreamError`; then `open` closes it."""
        head, pod = attempt.context.head, attempt.pair.decode
        edited = await self._edited(attempt, offered)
        body = partial(attempt.decode_body, offered, self._fleet, edited)

        async def begin() -> tuple[Reply, bytes]:
            reply = attempt.received(await self._sender.send_once(head, pod, body, "decode"))
            return reply, await self._first_piece(attempt, reply)

        # A response that is not streamed begins when it is complete, however long it is: its leg has no limit.
        is_streamed = attempt.context.request.stream
        leg = asyncio.ensure_future(begin())
        try:
            if not is_streamed:
                await self._watch_prefill_pod(attempt, leg)
            reply, first = await (self._limited(attempt, pod, DECODE_LIMIT_S, leg, prefill) if is_streamed else leg)
        finally:
            leg.cancel()
        if not prefill.done():
            await asyncio.wait((prefill,), timeout=PREFILL_GRACE_S)
        if attempt.dialect.order is Order.TOGETHER:
            attempt.count_cached_tokens(prefill)
        return_offer = partial(self.return_offer, attempt.pair)
        return HandoffReply(reply, first, attempt.context.handed_over_cached_tokens, prefill.cancel, return_offer)

    async def _first_piece(self, attempt: SplitAttempt, reply: Reply) -> bytes:
        """The first piece of body. Raises `HandoffFailed` where the handoff may have caused an error."""
        prefill = attempt.pair.prefill.id
        if reply.status in RETRY_STATUSES:
            attempt.decode_failed(f"status {reply.status}", caused_by=reply.pod)
        elif reply.status == DOUBTFUL_STATUS:
            attempt.decode_failed(f"status {reply.status}", caused_by=prefill, doubtful=True)
        elif reply.status >= 400:
            attempt.decode_failed(f"status {reply.status}")
        first = await reply.read()
        # vLLM reports a failed KV load with 500, or in a stream with an error event instead of the first token.
        if media_type(dict(reply.headers)) == EVENT_STREAM and has_early_error(first):
            attempt.decode_failed("the stream began with an error", caused_by=prefill, doubtful=True)
        elif reply.status < 400:
            if attempt.sent_handoff:
                attempt.unread = None
            self._served(attempt)
            self._observe_handoff(attempt, time.monotonic())
        return first

    def _served(self, attempt: SplitAttempt) -> None:
        """The prefill pod has done its part, which counts for it like any answer."""
        pod, breaker, now_s = attempt.pair.prefill.id, self._breaker, time.monotonic()
        if breaker.counts_success(now_s):
            breaker.ended(pod, attempt.context.owner, now_s, is_served=True)
        breaker.success(pod)

    def _observe_handoff(self, attempt: SplitAttempt, now_s: float) -> None:
        """Record the time of the handoff. An unstreamed response does not show when the KV arrived."""
        if not (attempt.context.request.stream and attempt.sent_handoff):
            return
        elapsed_s, plan = now_s - attempt.began_s, attempt.plan
        self._metrics[of_pods.HANDOFF_S].labels(plan.prefill.handoff).observe(elapsed_s)
        if attempt.dialect.order is Order.PREFILL_FIRST:
            concurrent = attempt.tracker.concurrent_transfers
            self._calibrator.observe_transfer(
                plan.prefill, plan.decode, plan.handoff_tokens, elapsed_s * 1000, concurrent
            )


def _retrieve(ended: asyncio.Task[Any]) -> None:
    """Let nobody log that nobody has read its error."""
    if not ended.cancelled():
        ended.exception()


def _refusal(attempt: SplitAttempt, response: WholeReply) -> WholeReply:
    """The prefill pod's 4xx response, for the client. Raises `HandoffFailed` if another candidate is left."""
    attempt.result = "prefill_refused"
    attempt.close_reply()
    if not attempt.last:
        raise HandoffFailed(f"pod {response.pod}: status {response.status} to a prefill request")
    return response


# --- pulls ---


class PullExecutor:
    """Carries out `Direct` plans that have a `pull`: the pod pulls KV from a peer instead of computing it."""

    def __init__(self, fleet: Fleet, facts: FactsLookup, sender: UpstreamSender) -> None:
        self._fleet = fleet
        self._facts = facts
        self._sender = sender
        self._turns = FairTurns()

    async def open(self, tracker: Tracker, pod: Pod, holder: PodId) -> AnyReply:
        """The pod's response. Raises `UpstreamError`."""
        context, is_last = tracker.context, tracker.is_last
        if (body := await self.body(context, pod, holder)) is None:
            return await self._sender.send(context.head, pod, context.request.body)
        pull_body = body
        reply = await self._sender.send_once(context.head, pod, lambda: pull_body)
        if reply.status >= 400 and reply.status not in RETRY_STATUSES and not is_last:
            reply.close()
            raise HandoffFailed(f"pod {pod.id}: status {reply.status} to a pull from pod {holder}")
        return HandoffReply(reply)

    async def body(self, context: RequestContext, pod: Pod, holder: PodId) -> bytes | None:
        """The client's body with the request to pull; None if the holder is gone or its facts are unknown."""
        status, body = self._fleet.status(holder), context.request.body
        facts = self._facts(status.pod, pod.pulls) if status else None
        if status is None or facts is None:
            return None
        pair = Pair(status.pod, pod, secrets.randbits(63), facts)
        return await self._turns.run(context.tenant, body, DIALECTS[pod.pulls].pull_body, body, pair)
