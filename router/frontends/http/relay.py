"""How does a response pass from the pod to the client?

Byte for byte, one piece at a time; a slow client slows the pod down. Nothing is sent to the client before the request's
tracker gives the first piece, so that a pod that fails until then can be replaced.
"""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Protocol

from router.errors import UpstreamBroken, UpstreamError
from router.frontends.http.connection import LARGE_PIECE_BYTES, Ready, Sink
from router.guards import Bound, OutOfBounds
from router.request.continuation.continuing_tracker import ContinuingTracker
from router.request.inbound import HeaderList, IncomingResponse
from router.request.tracker import Tracker
from router.types import PodId

RESPONSE = Bound("response", 16 * 1024 * 1024)
"""To requests of the router itself and prefill requests: it may have the tokens of a prompt, twice."""


class Downstream(Protocol):
    """The client's side of a response; `Exchange` is one. After `started` no retry is possible."""

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
        """Wait until the client can receive more, and a large piece may be next."""

    def finish(self) -> None:
        """End the response."""


class AnyReply(IncomingResponse, Protocol):
    """A response of a pod: its own (`upstream.Reply`), or one made of it (`replies.py`)."""

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


async def relay_joined(reply: AnyReply, client: Downstream, tracker: ContinuingTracker, headers: HeaderList) -> None:
    """The same for a stream that other pods may continue, or one that continues it. Raises `UpstreamError`, also where
    the pod has ended a stream that is not whole."""

    def pass_on(piece: bytes) -> bool:
        is_ready, shown = True, tracker.piece(piece, monotonic())
        if shown:
            if not client.started:
                client.start(reply.status, headers)
            is_ready = client.put(shown)
        return is_ready and not (tracker.has_ended or tracker.is_called)

    async def ready() -> None:
        if tracker.has_ended:
            raise _Ended
        if tracker.is_called and (planning := tracker.planning):
            tracker.planned = await asyncio.to_thread(planning)
            if tracker.moves(monotonic()):
                raise UpstreamBroken(f"pod {reply.pod} is drained", pod=reply.pod)
        await client.ready()

    try:
        await reply.pour(pass_on, ready)
    except _Ended:
        pass
    except UpstreamError:
        if not tracker.is_whole:
            raise
    tracker.ended()
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
