"""Answers that no pod has sent in this form."""

from __future__ import annotations

import json

import pytest

from router.proxy.connection import Ready, Sink
from router.proxy.headers import HeaderList
from router.proxy.relay import pour_read, read_all
from router.proxy.replies import DecodeReply, WholeReply

pytestmark = pytest.mark.anyio

JSON = [(b"content-type", b"application/json"), (b"content-length", b"99")]
EVENTS = [(b"content-type", b"text/event-stream")]


class Pieces:
    """A pod's answer, piece by piece."""

    def __init__(self, headers: HeaderList, *pieces: bytes) -> None:
        self.pod, self.status, self.headers = "d", 200, headers
        self.closed = 0
        self._pieces = list(pieces)

    async def read(self) -> bytes:
        return self._pieces.pop(0) if self._pieces else b""

    async def pour(self, sink: Sink, ready: Ready) -> None:
        await pour_read(self, sink, ready)

    def close(self) -> None:
        self.closed += 1


def body(cached_tokens: int) -> bytes:
    return json.dumps({"usage": {"prompt_tokens_details": {"cached_tokens": cached_tokens}}}).encode()


async def test_a_whole_answer_is_read_once() -> None:
    """Then it is at its end."""
    reply = WholeReply("p", 400, JSON, b"no")
    assert [await reply.read(), await reply.read()] == [b"no", b""]
    reply.close()


@pytest.mark.parametrize("cut", [1, 20, len(body(48)) - 1])
async def test_cached_tokens_are_put_right_wherever_the_answer_is_cut(cut: int) -> None:
    """The first piece has been read by whoever made this reply; the length is not what the pod said it was."""
    pod = Pieces(JSON, body(48)[cut:])
    reply = DecodeReply(pod, body(48)[:cut], 16, lambda: None)
    assert (reply.pod, reply.status, reply.headers) == ("d", 200, JSON[:1])
    assert await read_all(reply) == body(16)


async def test_a_stream_goes_on_line_by_line() -> None:
    """Nothing but an unfinished line is kept back, and a piece without an end of line is not an end of the answer."""
    event = b"data: " + body(48) + b"\n\n"
    reply = DecodeReply(Pieces(EVENTS, event[:9], event[9:], b"data: [DONE]\n\n"), b"data: {}\n\n", 16, lambda: None)
    assert await reply.read() == b"data: {}\n\n"
    assert await reply.read() == b"data: " + body(16) + b"\n\n"
    assert await reply.read() == b"data: [DONE]\n\n"
    assert await reply.read() == b""


async def test_what_is_not_known_is_not_put_right() -> None:
    """The decode pod's own account passes."""
    assert await read_all(DecodeReply(Pieces(JSON), body(48), None, lambda: None)) == body(48)


async def test_closing_lets_go_of_everything() -> None:
    """Of the pod's answer, and of the other leg."""
    pod, let_go = Pieces(JSON), []
    DecodeReply(pod, b"", None, lambda: let_go.append(True)).close()
    assert (pod.closed, let_go) == (1, [True])
