"""Attempts over HTTP: sends a request to the pods of a candidate, and moves the bytes of the response."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

from router.admission.tenant import Admitted, Tenant
from router.decision import Candidate, Split
from router.errors import NoReadyPod, UpstreamTimeout
from router.frontends.http.kv_transfer import PullExecutor, SplitExecutor
from router.frontends.http.provider import ProviderSender
from router.frontends.http.relay import AnyReply, message_error, relay, relay_joined
from router.frontends.http.upstream import UpstreamSender
from router.frontends.waits import Waits
from router.request.context import RequestContext
from router.request.continuation.kept_stream import KeptStream
from router.request.continuation.later_pods import CHECK_S, MovePace
from router.request.effects import Downstream
from router.request.tracker import Tracker
from router.types import InferenceRequest, PodId

if TYPE_CHECKING:
    from router.frontends.held_requests import HeldRequests
GONE_S = 1.0
"""Until the router may know that a pod is gone, its next requests wait."""


class LeavingStreams:
    """Recorded streams that another pod may have to continue: closes the connections of those whose pod has fallen
    silent, and starts the move of those whose pod is drained. One timer serves all of them."""

    def __init__(self) -> None:
        self._streams: dict[KeptStream, Callable[[], object]] = {}
        self._pace = MovePace()
        self._is_running = False

    @contextmanager
    def watched(self, stream: KeptStream, close: Callable[[], object]) -> Iterator[None]:
        self._streams[stream] = close
        if not self._is_running:
            self._is_running = True
            asyncio.get_running_loop().call_later(CHECK_S, self._check)
        try:
            yield
        finally:
            del self._streams[stream]

    def _check(self) -> None:
        now_s, moves = monotonic(), list[tuple[float, KeptStream]]()
        for stream, close in list(self._streams.items()):
            if stream.is_silent(now_s):
                close()
            elif (cost_ms := stream.move_ms()) is not None:
                moves.append((cost_ms, stream))
        for stream in self._pace.due(moves):
            stream.call()
        self._is_running = bool(self._streams)
        if self._is_running:
            asyncio.get_running_loop().call_later(CHECK_S, self._check)


@dataclass(eq=False, kw_only=True)
class Forwarder(Waits):
    """Serves requests over HTTP."""

    sender: UpstreamSender
    splits: SplitExecutor
    pulls: PullExecutor
    providers: Mapping[PodId, ProviderSender] = field(default_factory=dict)
    held: HeldRequests | None = None
    """Where a request waits again whose pod has gone before it had it."""
    _leaving: LeavingStreams = field(init=False, default_factory=LeavingStreams)

    def forward(self, context: RequestContext, client: Downstream) -> Awaitable[None]:
        """Serve one request, and settle it however it ends. Raises `RouterError` where no response could be sent, or
        not to its end."""
        return self.core.serve(context, client, self)

    async def attempt(self, tracker: Tracker, candidate: Candidate, client: Downstream) -> None:
        if candidate.money is not None:
            return await self.providers[candidate.pod.id].send(tracker, client)
        stream = tracker.stream
        if stream is not None and stream.is_recorded:
            reply = await self._watched_open(tracker, stream, candidate)
        else:
            reply = await self._open(tracker, candidate)
        try:
            tracker.head(reply.pod, reply.status, reply.headers, monotonic())
            if reply.status >= 400 and stream is not None and stream.asked.message is not None:
                reply = await message_error(reply)
            headers = [*self.sender.rules.downstream(reply.headers), *tracker.headers()]
            if tracker.changes_length:
                headers = [pair for pair in headers if pair[0] != b"content-length"]
            if stream is not None and stream.is_recorded:
                with self._leaving.watched(stream, reply.close):
                    await relay_joined(reply, client, tracker, stream, headers, self)
            else:
                await relay(reply, client, tracker, headers)
        finally:
            reply.close()

    async def pod_again(self, request: InferenceRequest, owner: str, tenant: Tenant, until_s: float) -> None:
        assert self.held is not None
        model = request.adapter or request.model
        error = NoReadyPod(f"No pod that serves `{model}` is ready; retry later.", model=model)
        await self.held.wait(error, Admitted(owner, tenant), len(request.body), until_s, GONE_S)

    async def _watched_open(self, tracker: Tracker, stream: KeptStream, candidate: Candidate) -> AnyReply:
        """As `_open`. Raises `UpstreamTimeout` where the pod fails its health checks before its response begins."""
        try:
            async with asyncio.timeout(None) as limit:
                with self._leaving.watched(stream, partial(limit.reschedule, 0.0)):
                    return await self._open(tracker, candidate)
        except TimeoutError as error:
            pod = candidate.pod.id
            raise UpstreamTimeout(f"pod {pod} fails its health checks and sends no response", pod=pod) from error

    def _open(self, tracker: Tracker, candidate: Candidate) -> Awaitable[AnyReply]:
        """Send the request; returns the response for the client. Raises `UpstreamError`."""
        plan, context = candidate.plan, tracker.context
        if isinstance(plan, Split):
            return self.splits.open(tracker, plan)
        if plan.pull is not None:
            return self.pulls.open(tracker, plan.pod, plan.pull.holder)
        body = tracker.body
        if not context.repeatable:
            return self.sender.send_once(context.head, plan.pod, lambda: body)
        head = context.head if tracker.stream is None else tracker.stream.asked.head
        return self.sender.send(head, plan.pod, body)
