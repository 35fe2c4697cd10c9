"""How does a response pass from the pod to the client?

Byte for byte, one piece at a time; a slow client slows the pod down. Nothing is sent to the client before the request's
tracker gives the first piece, so that a pod that fails until then can be replaced. Some responses differ from what a
pod sent: whole ones, those with corrected usage, errors of another API.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any, Protocol

import msgspec

from router.engines.handoff.offers import Offered, OfferFilter
from router.engines.handoff.usage import UsageCorrection
from router.errors import UpstreamBroken, UpstreamError
from router.frontends.http.connection import LARGE_PIECE_BYTES, Ready, Sink
from router.guards import Bound, OutOfBounds
from router.request.continuation.kept_stream import KeptStream, StreamState
from router.request.effects import Downstream, Effects
from router.request.inbound import EVENT_STREAM, JSON, HeaderList, IncomingResponse, media_type
from router.request.tracker import Tracker
from router.types import Endpoint, PodId

RESPONSE = Bound("response", 16 * 1024 * 1024)
"""To requests of the router itself and prefill requests: it may have the tokens of a prompt, twice."""


class AnyReply(IncomingResponse, Protocol):
    """A response of a pod: its own (`upstream.Reply`), or one made of it."""

    pod: PodId
    """The pod that responded."""

    async def pour(self, sink: Sink, ready: Ready) -> None:
        """Pass the rest of the body to `sink`, each piece on arrival; where the sink returns False, wait for `ready`.
        Raises `UpstreamError`."""


async def relay(reply: AnyReply, client: Downstream, tracker: Tracker, headers: HeaderList) -> None:
    """Send one response with these headers to the client. Raises `UpstreamError`."""

    def pass_on(piece: bytes) -> bool:
        shown = tracker.piece(piece, monotonic())
        return not shown or client.put(shown)

    ready = b""
    while not ready and (piece := await reply.read()):
        if len(piece) > LARGE_PIECE_BYTES:
            await client.ready()
        ready = tracker.piece(piece, monotonic())
    is_whole = not ready
    if is_whole:
        ready = tracker.rest(monotonic())
    client.start(reply.status, headers)
    if ready and not client.put(ready):
        await client.ready()
    if not is_whole:
        await reply.pour(pass_on, client.ready)
        if left := tracker.rest(monotonic()):
            client.put(left)
    client.finish()
    tracker.complete(monotonic())


class _Ended(Exception):
    """Nothing that the pod still sends is for the client."""


async def relay_joined(
    reply: AnyReply, client: Downstream, tracker: Tracker, stream: KeptStream, headers: HeaderList, do: Effects
) -> None:
    """The same for a stream that other pods may continue, or one that continues it. Raises `UpstreamError`, also where
    the pod has ended a stream that is not whole."""

    def pass_on(piece: bytes) -> bool:
        is_ready, shown = True, tracker.piece(piece, monotonic())
        if shown:
            if not client.started:
                client.start(reply.status, headers)
            is_ready = client.put(shown)
        return is_ready and stream.state not in (StreamState.ENDED, StreamState.CALLED)

    async def ready() -> None:
        if stream.state is StreamState.ENDED:
            raise _Ended
        if stream.state is StreamState.CALLED and await stream.moves(monotonic, do):
            raise UpstreamBroken(f"pod {reply.pod} is drained", pod=reply.pod)
        await client.ready()

    try:
        await reply.pour(pass_on, ready)
    except _Ended:
        pass
    except UpstreamError:
        if not stream.is_whole:
            raise
    stream.pod_ended(reply.pod)
    if left := tracker.rest(monotonic()):
        client.put(left)
    client.finish()
    tracker.complete(monotonic())


def end_broken_stream(client: Downstream, body: bytes) -> None:
    """End an incomplete event stream with an event that has a name: Anthropic's SDK skips all others."""
    client.put(b"\n\nevent: error\ndata: " + body + b"\n\n")
    client.finish()


async def read_all(reply: AnyReply, bound: Bound = RESPONSE) -> bytes:
    """The whole body; closes the reply in any case. Raises `UpstreamError`, also from the `OutOfBounds` of a longer
    one."""
    pieces: list[bytes] = []
    size_bytes = 0
    try:
        while piece := await reply.read():
            pieces.append(piece)
            size_bytes += len(piece)
            bound.check_size(size_bytes)
        return b"".join(pieces)
    except OutOfBounds as error:
        raise UpstreamBroken(f"pod {reply.pod}: {error}", pod=reply.pod) from error
    finally:
        reply.close()


_SMALL = Bound("small response", 1024 * 1024, 20_000)
_ANY = msgspec.json.Decoder()
_DONE = b"data: [DONE]\n\n"


class _ReadReply:
    async def read(self) -> bytes:
        raise NotImplementedError

    async def pour(self, sink: Sink, ready: Ready) -> None:
        while piece := await self.read():
            if not sink(piece):
                await ready()


@dataclass(slots=True)
class WholeReply(_ReadReply):
    pod: PodId
    status: int
    headers: HeaderList
    body: bytes

    async def read(self) -> bytes:
        body, self.body = self.body, b""
        return body

    def close(self) -> None:
        """No connection is open."""


class HandoffReply(_ReadReply):
    """The response to a request with transfer parameters: without any in it, with `cached_tokens` in its usage where
    it has one. `first`: what was read of it; None: nothing yet. `closed` is called by `close`."""

    def __init__(
        self,
        reply: AnyReply,
        first: bytes | None = None,
        cached_tokens: int | None = None,
        closed: Callable[[], object] = lambda: None,
        offered: Offered = lambda _: None,
    ) -> None:
        self._reply = reply
        self._first = first
        kind = media_type(dict(reply.headers))
        self._is_text = kind in (EVENT_STREAM, JSON)
        self._offers = OfferFilter(kind == EVENT_STREAM, offered)
        self._correction = UsageCorrection(cached_tokens, kind == EVENT_STREAM)
        self._closed = closed
        self.pod = reply.pod
        self.status = reply.status
        self.headers = [(name, value) for name, value in reply.headers if name != b"content-length"]

    async def read(self) -> bytes:
        """The next corrected piece; b"" at the end."""
        while piece := await self._next():
            if not self._is_text:
                return piece
            if corrected := self._correction.feed(self._offers.feed(piece)):
                return corrected
        return self._correction.feed(self._offers.end()) + self._correction.end()

    async def _next(self) -> bytes:
        first, self._first = self._first, None
        return await self._reply.read() if first is None else first

    def close(self) -> None:
        """Close the decode response, and the prefill request with it."""
        self._reply.close()
        self._closed()


async def message_error(reply: AnyReply) -> WholeReply:
    """The error of a chat as `/v1/messages` of vLLM has it. Raises `UpstreamError`."""
    try:
        error = _SMALL.json(await read_all(reply), _ANY)["error"]
        said = {"type": error["type"], "message": error["message"]}
    except (ValueError, LookupError, TypeError):
        said = {"type": "api_error", "message": f"status {reply.status}"}
    headers = [pair for pair in reply.headers if not pair[0].startswith(b"content-")]
    body = msgspec.json.encode({"type": "error", "error": said})
    return WholeReply(reply.pod, reply.status, [*headers, (b"content-type", b"application/json")], body)


class _UsageOptions(msgspec.Struct):
    include_usage: bool = False


class _StreamRequest(msgspec.Struct):
    stream_options: _UsageOptions | None = None


def as_stream(endpoint: Endpoint, response: bytes, request: bytes) -> bytes:
    """The server-sent events with the content of an unstreamed `response`, for a client whose `request` wants a stream;
    with usage where it wants that.

    Raises `ValueError` where `response` is not one of that endpoint."""
    chat = endpoint is Endpoint.CHAT
    try:
        whole = _SMALL.json(response, _ANY)
        shared = {name: whole[name] for name in ("id", "created", "model") if name in whole}
        steps = [step for choice in whole["choices"] for step in (_chat_steps(choice) if chat else [dict(choice)])]
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a response of {endpoint.value}: {error!r}") from error
    shared["object"] = "chat.completion.chunk" if chat else "text_completion"
    events = [{**shared, "choices": [step]} for step in steps]
    options = msgspec.json.decode(request, type=_StreamRequest, strict=False).stream_options
    if options is not None and options.include_usage:
        events.append({**shared, "choices": [], "usage": whole.get("usage")})
    return b"".join(b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events) + _DONE


def _chat_steps(choice: dict[str, Any]) -> list[dict[str, Any]]:
    """A choice as two chunks: its message, and its finish reason."""
    message = {name: value for name, value in choice.get("message", {}).items() if value is not None}
    if "tool_calls" in message:
        message["tool_calls"] = [{"index": number, **call} for number, call in enumerate(message["tool_calls"])]
    rest = {name: value for name, value in choice.items() if name != "message"}
    return [{**rest, "delta": message, "finish_reason": None}, {**rest, "delta": {}, "logprobs": None}]
