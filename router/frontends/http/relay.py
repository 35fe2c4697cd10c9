"""How does a response pass from the pod to the client?

Byte for byte, one piece at a time; a slow client slows the pod down. Nothing is sent to the client before the request's
tracker gives the first piece, so that a pod that fails until then can be replaced.
"""

from __future__ import annotations

from time import monotonic
from typing import Protocol

from router.errors import UpstreamBroken, UpstreamError
from router.frontends.http.connection import Ready, Sink
from router.guards import Bound, OutOfBounds
from router.request.continuation.kept_stream import KeptStream, StreamState
from router.request.effects import Downstream, Effects
from router.request.inbound import HeaderList, IncomingResponse
from router.request.tracker import Tracker
from router.types import PodId

RESPONSE = Bound("response", 16 * 1024 * 1024)
"""To requests of the router itself and prefill requests: it may have the tokens of a prompt, twice."""
LARGE_PIECE_BYTES = 32 * 1024
"""Larger pieces of responses are read in turns, one each time the loop runs: it takes a millisecond to read the tokens
in 256 KiB, and many pods may send as much at once."""


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
