"""Responses that no pod sent in this form."""

from __future__ import annotations

import json

import pytest

from router.frontends.http.connection import Ready, Sink
from router.frontends.http.relay import HandoffReply, WholeReply, read_all
from router.request.inbound import HeaderList

pytestmark = pytest.mark.anyio

JSON = [(b"content-type", b"application/json"), (b"content-length", b"99")]
EVENTS = [(b"content-type", b"text/event-stream")]


class Pieces:
    """A pod's response in pieces."""

    def __init__(self, headers: HeaderList, *pieces: bytes) -> None:
        self.pod, self.status, self.headers = "d", 200, headers
        self.closed = 0
        self._pieces = list(pieces)

    async def read(self) -> bytes:
        return self._pieces.pop(0) if self._pieces else b""

    async def pour(self, sink: Sink, ready: Ready) -> None:
        while piece := await self.read():
            if not sink(piece):
                await ready()

    def close(self) -> None:
        self.closed += 1


def body(cached_tokens: int) -> bytes:
    return json.dumps({"usage": {"prompt_tokens_details": {"cached_tokens": cached_tokens}}}).encode()


async def test_a_whole_reply_is_read_once() -> None:
    """Then it has ended."""
    reply = WholeReply("p", 400, JSON, b"no")
    assert [await reply.read(), await reply.read()] == [b"no", b""]
    reply.close()


@pytest.mark.parametrize("cut", [1, 20, len(body(48)) - 1])
async def test_cached_tokens_are_corrected_at_any_cut(cut: int) -> None:
    """The first piece was read before. The length differs from the content-length of the pod."""
    pod = Pieces(JSON, body(48)[cut:])
    reply = HandoffReply(pod, body(48)[:cut], 16)
    assert (reply.pod, reply.status, reply.headers) == ("d", 200, JSON[:1])
    assert await read_all(reply) == body(16)


async def test_a_stream_is_passed_on_by_line() -> None:
    """Only an unfinished line is held back; a piece without a line end does not end the response."""
    event = b"data: " + body(48) + b"\n\n"
    reply = HandoffReply(Pieces(EVENTS, event[:9], event[9:], b"data: [DONE]\n\n"), b"data: {}\n\n", 16)
    assert await reply.read() == b"data: {}\n\n"
    assert await reply.read() == b"data: " + body(16) + b"\n\n"
    assert await reply.read() == b"data: [DONE]\n\n"
    assert await reply.read() == b""


async def test_what_has_neither_events_nor_json_passes_as_it_comes() -> None:
    """It has no usage; a line end in it means nothing."""
    speech, kind = [b"ID3", b"\xff\n\xfb", b"\0"], [(b"content-type", b"audio/mpeg")]
    reply = HandoffReply(Pieces(kind, *speech[1:]), speech[0], 16)
    assert [await reply.read() for _ in range(4)] == [*speech, b""]


async def test_unknown_cached_tokens_are_not_corrected() -> None:
    """The decode pod's count passes."""
    assert await read_all(HandoffReply(Pieces(JSON), body(48))) == body(48)


async def test_closing_ends_both_requests() -> None:
    """The decode response and the prefill request."""
    pod, let_go = Pieces(JSON), []
    HandoffReply(pod, b"", None, lambda: let_go.append(True)).close()
    assert (pod.closed, let_go) == (1, [True])
