"""How does a response pass from the pod to the client?

Byte for byte, one piece at a time; a slow client slows the pod down. Nothing is sent to the client before the first
piece of body is here, so that a pod that fails until then can be replaced. An unstreamed response is held until it is
complete, and events that a pod sends before the prefill until the next event, for the same reason.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from time import monotonic
from typing import Protocol

from router.errors import UpstreamBroken
from router.proxy.connection import Ready, Sink
from router.proxy.headers import HeaderList
from router.proxy.response_reader import ResponseReader
from router.types import PodId

MAX_HELD_BYTES = 4 * 1024 * 1024
"""A larger unstreamed response is sent before it is complete."""


class Downstream(Protocol):
    """The client's side of a response; `api` implements it over ASGI. After `started` no retry is possible."""

    @property
    def started(self) -> bool:
        """Whether anything was sent to the client."""

    @property
    def disconnected(self) -> bool:
        """Whether the client has closed the connection."""

    @property
    def was_slow(self) -> bool:
        """Whether the response had to wait for the client."""

    def start(self, status: int, headers: HeaderList) -> None:
        """Send status and headers."""

    def put(self, piece: bytes) -> bool:
        """Send a piece of body. False: do not send more before `ready` has returned."""

    async def ready(self) -> None:
        """Wait until the client can receive more."""

    def finish(self) -> None:
        """End the response."""


class AnyReply(Protocol):
    """A response that is being read: a pod's own (`upstream.Reply`), or one made of it (`proxy/replies.py`)."""

    pod: PodId
    """The pod that responded."""
    status: int
    headers: HeaderList

    async def read(self) -> bytes:
        """The next piece of body; b"" at the end. Raises `UpstreamError`."""

    async def pour(self, sink: Sink, ready: Ready) -> None:
        """Pass the rest of the body to `sink`, each piece on arrival; where the sink returns False, wait for `ready`.
        Raises `UpstreamError`."""

    def close(self) -> None:
        """Stop reading. Idempotent."""


async def relay(
    reply: AnyReply,
    client: Downstream,
    reader: ResponseReader,
    headers: HeaderList,
    first_token: Callable[[], None],
    stepped: Callable[[float], None],
) -> None:
    """Send one response with these headers to the client. Calls `first_token` once, for the piece with the first token,
    and `stepped` with the arrival time of each piece.

    Raises `UpstreamError`; `client.started` says whether bytes were sent."""
    feed, put = reader.feed, client.put
    piece = await reply.read()
    begun = feed(piece) if piece else False
    is_whole, pieces, held_bytes = not is_stream(reply.headers), [piece], len(piece)
    while piece and (is_whole or reader.in_preamble) and held_bytes < MAX_HELD_BYTES:
        piece = await reply.read()
        begun = (feed(piece) if piece else False) or begun
        held_bytes += len(piece)
        pieces.append(piece)

    def pass_on(piece: bytes) -> bool:
        if feed(piece):
            first_token()
        stepped(monotonic())
        return put(piece)

    client.start(reply.status, headers)
    if begun:
        first_token()
    for piece in filter(None, pieces):
        stepped(monotonic())
        if not put(piece):
            await client.ready()
    if pieces[-1]:
        await reply.pour(pass_on, client.ready)
    client.finish()


def end_broken_stream(client: Downstream, body: bytes) -> None:
    """End an incomplete event stream with an event that has a name: Anthropic's SDK skips all others."""
    client.put(b"\n\nevent: error\ndata: " + body + b"\n\n")
    client.finish()


def is_stream(headers: HeaderList) -> bool:
    return dict(headers).get(b"content-type", b"").startswith(b"text/event-stream")


async def read_all(reply: AnyReply, max_bytes: float = inf) -> bytes:
    """The whole body; closes the reply in any case. Raises `UpstreamError`, also where the body exceeds `max_bytes`."""
    pieces: list[bytes] = []
    try:
        while piece := await reply.read():
            pieces.append(piece)
            max_bytes -= len(piece)
            if max_bytes < 0:
                raise UpstreamBroken(f"pod {reply.pod}: response is larger than the limit", pod=reply.pod)
        return b"".join(pieces)
    finally:
        reply.close()
