"""Serves one request through a gateway: names a pod, and follows the response as far as the gateway shows it.

The gateway moves the bytes. Where it shows no body of the response, the end of the stream is the end of the response,
and its first token and its length are estimates.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from typing import Any

from router.addresses import join_address, url_address, url_host
from router.config.schema import PickerListen
from router.decision import Candidate, Split
from router.errors import ConnectFailed, NoReadyPod, Overloaded
from router.frontends.extproc.gateway_exchange import GatewayExchange, set_headers
from router.frontends.extproc.messages import BUFFERED, NONE, ProcessingResponse
from router.frontends.extproc.metadata import POD_HEADER, served_in
from router.frontends.http.attempt import Forwarder, begin, first_success, send_answer
from router.frontends.http.relay import Downstream, relay
from router.frontends.http.replies import WholeReply
from router.request.context import RequestContext
from router.request.decisions import addresses_of
from router.request.inbound import HeaderList
from router.request.tracker import Tracker
from router.types import Pod

PREFILL_HEADER = b"x-prefiller-host-port"
_SHARE_OF_TIMEOUT = 0.9
_GATEWAYS = frozenset(
    {b"host", b"content-length", b"transfer-encoding", b"connection", b"te", b"expect", b"x-forwarded-proto"}
)
"""Headers that the gateway writes itself for the connection to the pod."""


@dataclass(eq=False)
class PickForwarder(Forwarder):
    """Serves requests through a gateway. `_sender`: of `warmroute serve`, which would send the same headers."""

    _picker: PickerListen

    def __post_init__(self) -> None:
        self._runs_prefill = self._picker.prefill == "picker"
        self._timeout_s = self._picker.message_timeout_s * _SHARE_OF_TIMEOUT

    async def _serve(self, context: RequestContext, client: Downstream) -> None:
        assert isinstance(client, GatewayExchange)
        context.is_unseen = client.modes.response == NONE
        is_buffered = client.modes.request == BUFFERED
        try:  # a gateway that buffers would give up without saying why to its client
            async with asyncio.timeout(self._timeout_s if is_buffered else None) as limit:
                answer = await self._steps.run(self._requests.prepare(context))
                if answer is None:
                    await self._serve_candidates(context, client, limit)
                else:
                    await send_answer(answer, context, client)
        except TimeoutError as error:
            why = f"The gateway waits no longer than {self._timeout_s:g} s (picker.message_timeout_s)."
            raise Overloaded(why, retry_after_s=1.0) from error

    async def _serve_candidates(self, context: RequestContext, client: GatewayExchange, limit: asyncio.Timeout) -> None:
        tracker = self._requests.tracker(context)
        try:
            await first_success(tracker, partial(self._name_and_follow, tracker, client, limit))
        except asyncio.CancelledError:
            tracker.left(time.monotonic())
            raise
        finally:
            tracker.end(time.monotonic())

    async def _name_and_follow(
        self, tracker: Tracker, client: GatewayExchange, limit: asyncio.Timeout, candidate: Candidate
    ) -> None:
        """Name the pod of a candidate, which is booked first, and follow the response. `limit` ends with the pick."""
        begin(tracker, candidate)
        plan, context, handoff = candidate.plan, tracker.context, None
        body: bytes | WholeReply | None = None
        try:
            if isinstance(plan, Split) and self._runs_prefill:
                handoff, body = await self._splits.open_prefill(tracker, plan)
            elif plan.pull is not None:
                body = await self._pulls.body(context.request.body, plan.pod, plan.pull.holder)
            if isinstance(body, WholeReply):
                await self._answer(body, tracker, client)
                return
            await self._pick(tracker, candidate, client, body)
            limit.reschedule(None)
            await self._follow(tracker, client)
        finally:
            if handoff is not None:
                self._splits.close_prefill(handoff)

    async def _answer(self, reply: WholeReply, tracker: Tracker, client: GatewayExchange) -> None:
        """Answer in place of the pod: the prefill pod has refused the request, or completed it."""
        tracker.context.is_unseen = False
        tracker.head(reply.pod, reply.status, reply.headers, time.monotonic())
        headers = [*self._sender.rules.downstream(reply.headers), *tracker.headers()]
        await relay(reply, client, tracker, headers)

    async def _pick(
        self, tracker: Tracker, candidate: Candidate, client: GatewayExchange, changed: bytes | None
    ) -> None:
        """Name the pod of a candidate. `changed`: the body for it, if it is not the client's."""
        context, plan = tracker.context, candidate.plan
        may_repeat = context.repeatable and changed is None and not isinstance(plan, Split)
        headers, removed = self._changes(context, plan.pod)
        others = [
            one
            for one in (tracker.fallbacks(self._picker.fallbacks) if may_repeat else ())
            if not isinstance(one.plan, Split) and self._changes(context, one.pod) == (headers, removed)
        ]  # a gateway sends the same headers to all of them, the key of the first pod among them
        addresses = [gateway_address(one.pod) for one in (candidate, *others)]
        if isinstance(plan, Split) and not self._runs_prefill:
            headers.append((PREFILL_HEADER, gateway_address(plan.prefill).encode()))
        body, context.is_picked = changed or context.request.body, True
        is_changed = body != client.body
        await client.pick(",".join(dict.fromkeys(addresses)), headers, removed, body, is_changed=is_changed)
        context.drop_prompt()

    def _changes(self, context: RequestContext, pod: Pod) -> tuple[HeaderList, list[bytes]]:
        """Headers to set, and names to remove, so that the pod receives what `warmroute serve` would send."""
        head, pool = context.head, self._sender.pool(pod)
        wanted, given = self._sender.headers(head, pool), set(head.headers)
        kept = {name for name, _ in wanted}
        removed = {name for name, _ in given if name not in kept and not name.startswith(b"x-envoy-")}
        changed = [header for header in wanted if header not in given]
        if pool.path_prefix:
            changed.append((b":path", pool.path_prefix + head.target))
        return changed, sorted(removed - _GATEWAYS - {POD_HEADER})

    # --- the response ---

    async def _follow(self, tracker: Tracker, client: GatewayExchange) -> None:
        """Follow the response to its end, or until the client leaves."""
        is_complete = False
        while not is_complete and (message := await client.read_response()) is not None:
            kind = message.WhichOneof("request")
            if kind == "response_headers":
                is_complete = await self._head(tracker, client, message)
            elif kind == "response_body":
                is_complete = await _piece(tracker, client, message.response_body)
            elif kind == "request_trailers":
                await client.write(ProcessingResponse(request_trailers={}))
            elif kind == "response_trailers":
                await client.write(ProcessingResponse(response_trailers={}))
                is_complete = True
        context, now_s = tracker.context, time.monotonic()
        if context.is_unseen and context.status:
            tracker.unseen(now_s)
            is_complete = True
        client.response_complete = is_complete
        if is_complete:
            tracker.complete(now_s)
        else:
            self._requests.endings.interrupted(context, by_client=True)
            tracker.left(now_s)

    async def _head(self, tracker: Tracker, client: GatewayExchange, message: Any) -> bool:
        """The response has begun. Returns whether it has no body."""
        pairs = [(one.key, one.raw_value or one.value) for one in message.response_headers.headers.headers]
        headers, status = [pair for pair in pairs if pair[0] != b":status"], int(dict(pairs)[b":status"])
        self._correct(tracker, served_in(message))
        assert tracker.context.candidate is not None
        pod = tracker.context.candidate.pod.id
        tracker.head(pod, status, headers, time.monotonic())
        response = ProcessingResponse()
        mutation = response.response_headers.response.header_mutation
        set_headers(mutation, tracker.headers())
        kept = {name for name, _ in self._sender.rules.downstream(headers)}
        dropped = {name for name, _ in headers} - kept - _GATEWAYS - {b"server", b"x-request-id"}
        if tracker.changes_length:
            dropped.add(b"content-length")
        mutation.remove_headers.extend(sorted(dropped))
        await client.write(response)
        return bool(message.response_headers.end_of_stream)

    def _correct(self, tracker: Tracker, served: str) -> None:
        """Move the lease to the pod that the gateway has sent the request to, if that is another one."""
        candidate, decision = tracker.context.candidate, tracker.context.decision
        assert candidate is not None and decision is not None
        if not served or served in addresses_of(candidate.pod.url):
            return
        for other in decision.candidates:
            if served in addresses_of(other.pod.url):
                pod = candidate.pod.id
                tracker.failed(ConnectFailed(f"pod {pod}: the gateway used {other.pod.id}", pod=pod), time.monotonic())
                begin(tracker, other)
                return


async def _piece(tracker: Tracker, client: GatewayExchange, body: Any) -> bool:
    """Pass a piece of the response on. Returns whether it was the last one."""
    now_s = time.monotonic()
    shown = tracker.piece(body.body, now_s) if body.body else b""
    if tracker.refuses_usage(body.body):  # its client gets the error: a gateway sends each request once
        tracker.learn_refusal()
    if body.end_of_stream:
        shown += tracker.rest(now_s)
    if shown or body.end_of_stream:
        response = ProcessingResponse()
        chunk = response.response_body.response.body_mutation.streamed_response
        chunk.body, chunk.end_of_stream = shown, body.end_of_stream
        await client.write(response)
    return bool(body.end_of_stream)


def gateway_address(pod: Pod) -> str:
    """The address by which a gateway sends to a pod. Raises `NoReadyPod` where it has none."""
    try:
        ip_address(url_host(pod.url))
    except ValueError:
        raise NoReadyPod(f"Pod {pod.id} has no IP address in its URL; a gateway needs one.") from None
    return join_address(*url_address(pod.url))
