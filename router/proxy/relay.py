"""How does an answer pass from the pod to the client?

Byte for byte, one piece at a time, with the client's pace pacing the pod. Nothing goes downstream before the first
piece of body is here, so that a pod that dies until then can still be replaced; an unstreamed answer is held until it
is whole for the same reason. This file never retries.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from time import monotonic
from typing import Protocol

from router.errors import UpstreamBroken
from router.proxy.answer import AnswerReader
from router.proxy.connection import Ready, Sink
from router.proxy.downstream import Downstream
from router.proxy.headers import HeaderList, downstream_headers
from router.types import PodId

HOLD_BYTES = 4 * 1024 * 1024
"""An unstreamed answer larger than this is not held."""


class AnyReply(Protocol):
    """One answer being read: a pod's own, as `proxy/upstream.py` has it, or what `proxy/replies.py` makes of it."""

    @property
    def pod(self) -> PodId:
        """Whose it is."""

    @property
    def status(self) -> int:
        """Of HTTP."""

    @property
    def headers(self) -> HeaderList:
        """As the pod sent them."""

    async def read(self) -> bytes:
        """The next piece of body; b"" at the end. Raises `UpstreamError`."""

    async def pour(self, sink: Sink, ready: Ready) -> None:
        """Hand the rest of the body to `sink`, each piece the moment that it is here; where that is False, no more
        until `ready` has returned. Raises `UpstreamError`."""

    def close(self) -> None:
        """No more of it is wanted. Again, it changes nothing."""


async def relay(
    reply: AnyReply,
    client: Downstream,
    reader: AnswerReader,
    extra_headers: HeaderList,
    first_token: Callable[[], None],
    stepped: Callable[[float], None],
) -> None:
    """Carry one answer over. `stepped` is told when each piece came, and before it `first_token` of the first that
    holds one.

    Raises `UpstreamError`; whether bytes went downstream stands in `client.started`."""
    piece = await reply.read()
    pieces, may_hold_bytes = [piece], 0 if is_stream(reply.headers) else HOLD_BYTES
    while piece and (may_hold_bytes := may_hold_bytes - len(piece)) > 0:
        piece = await reply.read()
        pieces.append(piece)
    feed, put = reader.feed, client.put

    def pass_on(piece: bytes) -> bool:
        if feed(piece):
            first_token()
        stepped(monotonic())
        return put(piece)

    client.start(reply.status, [*downstream_headers(reply.headers), *extra_headers])
    for piece in pieces:
        if piece and not pass_on(piece):
            await client.ready()
    if pieces[-1]:
        await reply.pour(pass_on, client.ready)
    client.finish()


def end_broken_stream(client: Downstream, body: bytes) -> None:
    """Tell the reader of an event stream that it is incomplete, in the shape that SDKs raise on."""
    client.put(b"\n\ndata: " + body + b"\n\n")
    client.finish()


def is_stream(headers: HeaderList) -> bool:
    """Is this answer an event stream?"""
    return dict(headers).get(b"content-type", b"").startswith(b"text/event-stream")


async def read_all(reply: AnyReply, max_bytes: float = inf) -> bytes:
    """The whole body at once, and the reply closed whatever happens. Raises `UpstreamError`, also where it is longer
    than `max_bytes`."""
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


async def pour_read(reply: AnyReply, sink: Sink, ready: Ready) -> None:
    """`pour` for a reply that can only be read."""
    while piece := await reply.read():
        if not sink(piece):
            await ready()
