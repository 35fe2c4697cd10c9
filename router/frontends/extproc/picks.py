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
from router.decision import Candidate, Direct, Plan, Split
from router.engines.handoff.dialect import Pair
from router.engines.handoff.offers import OfferFilter
from router.errors import ConnectFailed, NoReadyPod, Overloaded, RouterError
from router.frontends.extproc.gateway_exchange import GatewayExchange, set_headers
from router.frontends.extproc.messages import BUFFERED, NONE, ProcessingResponse
from router.frontends.extproc.metadata import POD_HEADER, served_in
from router.frontends.http.attempt import Forwarder
from router.frontends.http.relay import WholeReply, relay
from router.request.context import RequestContext
from router.request.decisions import addresses_of
from router.request.effects import Downstream
from router.request.inbound import HeaderList
from router.request.tracker import Tracker
from router.types import Pod

PREFILL_HEADER = b"x-prefiller-host-port"
_SHARE_OF_TIMEOUT = 0.9
_GATEWAYS = frozenset(
    {b"host", b"content-length", b"transfer-encoding", b"connection", b"te", b"expect", b"x-forwarded-proto"}
)
"""Headers that the gateway writes itself for the connection to the pod."""


@dataclass(eq=False, kw_only=True)
class PickForwarder(Forwarder):
    """Serves requests through a gateway. `sender`: of `warmroute serve`, which would send the same headers."""

    picker: PickerListen

    def __post_init__(self) -> None:
        self._runs_prefill = self.picker.prefill == "picker"
        self._timeout_s = self.picker.message_timeout_s * _SHARE_OF_TIMEOUT

    async def forward(self, context: RequestContext, client: Downstream) -> None:
        assert isinstance(client, GatewayExchange)
        context.is_unseen = client.modes.response == NONE
        is_buffered = client.modes.request == BUFFERED
        try:  # a gateway that buffers would give up without saying why to its client
            async with asyncio.timeout(self._timeout_s if is_buffered else None) as client.pick_limit:
                await self.core.serve(context, client, self)
        except TimeoutError as error:
            raise self._overdue() from error

    def overdue(self, client: Downstream) -> RouterError | None:
        assert isinstance(client, GatewayExchange) and client.pick_limit is not None
        return self._overdue() if client.pick_limit.expired() else None

    def _overdue(self) -> Overloaded:
        why = f"The gateway waits no longer than {self._timeout_s:g} s (picker.message_timeout_s)."
        return Overloaded(why, retry_after_s=1.0)

    async def attempt(self, tracker: Tracker, candidate: Candidate, client: Downstream) -> None:
        """Name the pod of a candidate, and follow the response."""
        assert isinstance(client, GatewayExchange) and client.pick_limit is not None
        plan, context, handoff = candidate.plan, tracker.context, None
        body: bytes | WholeReply | None = None
        try:
            if isinstance(plan, Split) and self._runs_prefill:
                handoff, body = await self.splits.open_prefill(tracker, plan)
            elif isinstance(plan, Direct) and plan.pull is not None:
                body = await self.pulls.body(context, plan.pod, plan.pull.holder)
            if isinstance(body, WholeReply):
                await self._answer(body, tracker, client)
                return
            await self._pick(tracker, candidate, client, body)
            client.pick_limit.reschedule(None)
            await self._follow(tracker, client, self._offers(plan, context.request.stream))
        finally:
            if handoff is not None:
                self.splits.close_prefill(handoff)

    async def _answer(self, reply: WholeReply, tracker: Tracker, client: GatewayExchange) -> None:
        """Answer in place of the pod: the prefill pod has refused the request, or completed it."""
        tracker.context.is_unseen = False
        tracker.head(reply.pod, reply.status, reply.headers, time.monotonic())
        headers = [*self.sender.rules.downstream(reply.headers), *tracker.headers()]
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
            for one in (tracker.fallbacks(self.picker.fallbacks) if may_repeat else ())
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
        head, pool = context.head, self.sender.pool(pod)
        wanted, given = self.sender.headers(head, pool), set(head.headers)
        kept = {name for name, _ in wanted}
        removed = {name for name, _ in given if name not in kept and not name.startswith(b"x-envoy-")}
        changed = [header for header in wanted if header not in given]
        if pool.path_prefix:
            changed.append((b":path", pool.path_prefix + head.target))
        return changed, sorted(removed - _GATEWAYS - {POD_HEADER})

    # --- the response ---

    def _offers(self, plan: Plan, stream: bool) -> OfferFilter | None:
        """What removes offers of KV from the response of a decode pod."""
        if not isinstance(plan, Split):
            return None
        return OfferFilter(stream, partial(self.splits.return_offer, Pair(plan.prefill, plan.decode, 0)))

    async def _follow(self, tracker: Tracker, client: GatewayExchange, offers: OfferFilter | None) -> None:
        """Follow the response to its end, or until the client leaves."""
        is_complete = False
        while not is_complete and (message := await client.read_response()) is not None:
            kind = message.WhichOneof("request")
            if kind == "response_headers":
                is_complete = await self._head(tracker, client, message)
            elif kind == "response_body":
                is_complete = await _piece(tracker, client, message.response_body, offers)
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
            self.core.endings.interrupted(context, by_client=True)
            tracker.left(now_s)

    async def _head(self, tracker: Tracker, client: GatewayExchange, message: Any) -> bool:
        """The response has begun. Returns whether it has no body."""
        pairs = [(one.key, one.raw_value or one.value) for one in message.response_headers.headers.headers]
        headers, status = [pair for pair in pairs if pair[0] != b":status"], int(dict(pairs)[b":status"])
        self._correct(tracker, served_in(message))
        candidate, is_unseen = tracker.context.candidate, tracker.context.is_unseen
        assert candidate is not None
        pod = candidate.pod.id
        tracker.head(pod, status, headers, time.monotonic())
        response = ProcessingResponse()
        mutation = response.response_headers.response.header_mutation
        set_headers(mutation, tracker.headers())
        kept = {name for name, _ in self.sender.rules.downstream(headers)}
        dropped = {name for name, _ in headers} - kept - _GATEWAYS - {b"server", b"x-request-id"}
        if tracker.changes_length or (isinstance(candidate.plan, Split) and not is_unseen):
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
                self.core.begin(tracker, other, self)
                return


async def _piece(tracker: Tracker, client: GatewayExchange, body: Any, offers: OfferFilter | None) -> bool:
    """Pass a piece of the response on. Returns whether it was the last one."""
    now_s = time.monotonic()
    shown = tracker.piece(body.body, now_s) if body.body else b""
    if body.body:
        tracker.says_lack(body.body)  # its client gets the error: a gateway sends each request once
    if body.end_of_stream:
        shown += tracker.rest(now_s)
    if offers is not None:
        shown = offers.feed(shown) + (offers.end() if body.end_of_stream else b"")
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
