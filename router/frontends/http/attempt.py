"""Serves one request over HTTP: carries out what `request/` asks for, sends the request to the pods that its tracker
names, until one responds, and moves the bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from time import monotonic

from router.decision import Candidate, Split
from router.errors import RouterError, UpstreamError, UpstreamTimeout
from router.frontends.http.kv_transfer import PullExecutor, SplitExecutor
from router.frontends.http.relay import AnyReply, Downstream, relay, relay_joined
from router.frontends.http.replies import message_error
from router.frontends.http.upstream import UpstreamSender
from router.frontends.step_executor import StepExecutor
from router.request.context import RequestContext
from router.request.continuation.continuing_tracker import ContinuingTracker
from router.request.continuation.later_pods import CHECK_S, MovePace
from router.request.requests import Requests
from router.request.tracker import Tracker


class LeavingStreams:
    """Closes the connections to pods that have fallen silent, and calls streams away from pods that are drained, so
    that other pods continue them. One timer serves all of them."""

    def __init__(self) -> None:
        self._streams: dict[ContinuingTracker, Callable[[], object]] = {}
        self._pace = MovePace()
        self._is_running = False

    @contextmanager
    def watched(self, tracker: ContinuingTracker, close: Callable[[], object]) -> Iterator[None]:
        self._streams[tracker] = close
        if not self._is_running:
            self._is_running = True
            asyncio.get_running_loop().call_later(CHECK_S, self._check)
        try:
            yield
        finally:
            del self._streams[tracker]

    def _check(self) -> None:
        now_s, moves = monotonic(), list[tuple[float, ContinuingTracker]]()
        for tracker, close in list(self._streams.items()):
            if tracker.is_silent(now_s):
                close()
            elif (cost_ms := tracker.move_ms()) is not None:
                moves.append((cost_ms, tracker))
        for tracker in self._pace.due(moves):
            tracker.is_called = True
        self._is_running = bool(self._streams)
        if self._is_running:
            asyncio.get_running_loop().call_later(CHECK_S, self._check)


def begin(tracker: Tracker, candidate: Candidate) -> None:
    """Book a candidate. A first token that does not show is assumed to exist when it is expected to."""
    delay_s = tracker.begin(candidate, monotonic())
    if delay_s is not None:
        assume = tracker.assumption
        asyncio.get_running_loop().call_later(delay_s, lambda: assume(monotonic()))


async def first_success(tracker: Tracker, attempt: Callable[[Candidate], Awaitable[None]]) -> None:
    """Try the candidates of a request until an attempt raises no `UpstreamError`. Raises that of the last one."""
    candidate = tracker.first(monotonic())
    while True:
        try:
            return await attempt(candidate)
        except UpstreamError as error:
            if isinstance(tracker, ContinuingTracker) and not tracker.planned and (planning := tracker.planning):
                tracker.planned = await asyncio.to_thread(planning)
            following = tracker.failed(error, monotonic())
            if following is None:
                raise
        candidate = following


@dataclass(eq=False)
class Forwarder:
    """Serves requests over HTTP."""

    _requests: Requests
    _steps: StepExecutor
    _sender: UpstreamSender
    _splits: SplitExecutor
    _pulls: PullExecutor
    _leaving: LeavingStreams = field(init=False, default_factory=LeavingStreams)

    async def forward(self, context: RequestContext, client: Downstream) -> None:
        """Serve one request, and settle it however it ends. Raises `RouterError` where no response could be sent, or
        not to its end."""
        endings = self._requests.endings
        endings.begin()
        try:
            await self._serve(context, client)
        except asyncio.CancelledError:
            endings.interrupted(context, by_client=client.disconnected)
            raise
        except RouterError as error:
            endings.failed(context, error, has_answered=client.started)
            raise
        finally:
            endings.end(context, was_slow=client.was_slow)

    async def _serve(self, context: RequestContext, client: Downstream) -> None:
        answer = await self._steps.run(self._requests.prepare(context))
        if answer is None:
            await self.serve_prepared(self._requests.tracker(context), client)
        else:
            await send_answer(answer, context, client)

    async def serve_prepared(self, tracker: Tracker, client: Downstream) -> None:
        """Try candidates until one has begun to respond. Raises the error of the last one."""
        try:
            await first_success(tracker, partial(self._attempt, tracker, client))
        except UpstreamError:
            if not tracker.last_events:
                raise
            client.put(tracker.last_events)
            client.finish()
        finally:
            tracker.end(monotonic())

    async def _attempt(self, tracker: Tracker, client: Downstream, candidate: Candidate) -> None:
        """Try one candidate. It is booked before the first await, and released in any case."""
        begin(tracker, candidate)
        try:
            if isinstance(tracker, ContinuingTracker) and tracker.joins:
                reply = await self._watched_open(tracker, candidate)
            else:
                reply = await self._open(tracker, candidate)
            try:
                tracker.head(reply.pod, reply.status, reply.headers, monotonic())
                if reply.status >= 400 and isinstance(tracker, ContinuingTracker) and tracker.asked.message is not None:
                    reply = await message_error(reply)
                headers = [*self._sender.rules.downstream(reply.headers), *tracker.headers()]
                if tracker.changes_length:
                    headers = [pair for pair in headers if pair[0] != b"content-length"]
                if isinstance(tracker, ContinuingTracker) and tracker.joins:
                    with self._leaving.watched(tracker, reply.close):
                        await relay_joined(reply, client, tracker, headers)
                else:
                    await relay(reply, client, tracker, headers)
            finally:
                reply.close()
        except asyncio.CancelledError:
            tracker.left(monotonic())
            raise
        finally:
            tracker.release(monotonic())

    async def _watched_open(self, tracker: ContinuingTracker, candidate: Candidate) -> AnyReply:
        """The same; a pod whose response does not begin while it fails health checks has failed."""
        try:
            async with asyncio.timeout(None) as limit:
                with self._leaving.watched(tracker, partial(limit.reschedule, 0.0)):
                    return await self._open(tracker, candidate)
        except TimeoutError as error:
            pod = candidate.pod.id
            raise UpstreamTimeout(f"pod {pod} fails its health checks and sends no response", pod=pod) from error

    def _open(self, tracker: Tracker, candidate: Candidate) -> Awaitable[AnyReply]:
        """Send the request; returns the response for the client. Raises `UpstreamError`."""
        plan, context = candidate.plan, tracker.context
        if isinstance(plan, Split):
            return self._splits.open(tracker, plan)
        if plan.pull is not None:
            return self._pulls.open(tracker, plan.pod, plan.pull.holder)
        body = tracker.body
        if not context.repeatable:
            return self._sender.send_once(context.head, plan.pod, lambda: body)
        head = tracker.asked.head if isinstance(tracker, ContinuingTracker) else context.head
        return self._sender.send(head, plan.pod, body)


async def send_answer(answer: Iterator[bytes], context: RequestContext, client: Downstream) -> None:
    context.status, context.result = 200, "ok"
    client.start(200, [(b"content-type", b"application/json"), (b"x-request-id", context.request.id.encode())])
    for piece in answer:
        if not client.put(piece):
            await client.ready()
        await asyncio.sleep(0)
    client.finish()
