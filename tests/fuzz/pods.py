"""Fuzzes answers of pods: the router and the client must read the same answer.

Covers reading from the connection, observing a stream, and rewriting an answer. The division into pieces must not
matter, and no bytes may reach another request.
"""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import suppress
from typing import TypeAlias

import h11
from msgspec.structs import astuple

from router.config.schema import Limits
from router.engines.adapter import prompt_token_count, prompt_token_ids
from router.engines.handoff import bodies
from router.engines.handoff.usage import UsageCorrection
from router.errors import RouterError
from router.frontends.http.connection import Connection
from router.frontends.http.relay import as_stream
from router.request.response_reader import ResponseReader
from router.types import Endpoint
from tests.fuzz.bodies import JSON
from tests.fuzz.pieces import in_pieces
from tests.fuzz.wire import Wire

TIMEOUTS = Limits(connect_timeout_s=5, first_byte_timeout_s=5, idle_timeout_s=5)
Answer: TypeAlias = tuple[int, list[tuple[bytes, bytes]], bytes]
NEXT = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nnext"
MOST_KEPT_BYTES = 8192
"""Limit of held bytes of an observed answer, without its last piece."""
TURNS = 10


async def _received(pieces: list[bytes], *, pours: bool = False) -> Answer | None:
    """The answer of a pod that sends these pieces and closes; None where it is invalid. The next request on the
    connection gets its own answer."""
    wire = Wire()
    connection = Connection(asyncio.get_running_loop(), TIMEOUTS)
    connection.connection_made(wire)
    reading = asyncio.create_task(_read(connection, pours=pours))
    for piece in pieces:
        await asyncio.sleep(0)
        if not wire.open:
            break
        connection.data_received(piece)
    for _ in range(TURNS):
        await asyncio.sleep(0)
    answer = await reading if reading.done() else None
    if answer is not None and connection.reusable:
        following = asyncio.create_task(_read(connection, pours=pours))
        await asyncio.sleep(0)
        connection.data_received(NEXT)
        found = await following
        assert found is not None and found[2] == b"next", "somebody else's answer"
    connection.connection_lost(None)
    return answer or await asyncio.wait_for(reading, 5)


async def _read(connection: Connection, *, pours: bool) -> Answer | None:
    """One exchange."""
    got: list[bytes] = []

    def take(piece: bytes) -> bool:
        got.append(piece)
        return len(got) % 2 == 0

    connection.send(b"a request")
    try:
        await connection.head()
        if pours:
            await connection.pour(take, lambda: asyncio.sleep(0))
        else:
            while piece := await connection.read():
                got.append(piece)
    except RouterError:
        return None
    return connection.status, connection.headers, b"".join(got)


def answers(data: bytes) -> None:
    """Bytes of a pod's connection."""
    whole = asyncio.run(_received([data]))
    assert whole is None or 200 <= whole[0] < 600
    assert asyncio.run(_received([data], pours=True)) == whole
    for number, pieces in enumerate(in_pieces(data)):
        assert asyncio.run(_received(pieces, pours=number == 1)) == whole, "another meaning in pieces"
    with suppress(h11.RemoteProtocolError):
        status, body = _by_h11(data)
        assert whole is None or (whole[0], whole[2]) == (status, body), "h11 reads something else"


def _by_h11(data: bytes) -> tuple[int, bytes]:
    """(status, body). Raises `h11.RemoteProtocolError`."""
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method="POST", target="/", headers=[("host", "h"), ("content-length", "0")]))
    client.send(h11.EndOfMessage())
    for received in (data, b""):
        with suppress(RuntimeError):  # after an answer that ends with the connection
            client.receive_data(received)
    while isinstance(head := client.next_event(), h11.InformationalResponse):
        pass
    body = b""
    if not isinstance(head, h11.Response):
        raise h11.RemoteProtocolError("no answer")
    while isinstance(event := client.next_event(), h11.Data):
        body += event.data
    return head.status_code, body


def streams(data: bytes) -> None:
    """The body of an answer."""
    observed = _observed([data])
    for pieces in in_pieces(data):
        assert _observed(pieces) == observed, "another meaning in pieces"
        for stream in (True, False):
            assert _corrected(pieces, stream=stream) == _corrected([data], stream=stream)
    for stream in (True, False):
        digits = re.compile(rb"\d+")
        assert digits.sub(b"0", _corrected([data], stream=stream)) == digits.sub(b"0", data), "more than a number"


def _observed(pieces: list[bytes]) -> tuple[object, ...]:
    reader = ResponseReader()
    first = [reader.feed(piece) for piece in pieces]
    assert sum(first) == reader.has_token
    kept = sum(len(value) for value in astuple(reader) if isinstance(value, bytes))
    assert kept <= MOST_KEPT_BYTES + max(map(len, pieces), default=0)
    return reader.has_token, reader.prompt_tokens, reader.cached_tokens, reader.output_tokens


def _corrected(pieces: list[bytes], *, stream: bool) -> bytes:
    correction = UsageCorrection(7, stream)
    return b"".join([*map(correction.feed, pieces), correction.end()])


def replies(data: bytes) -> None:
    """A whole answer in JSON."""
    prompt_token_ids(data)
    prompt_token_count(data)
    for endpoint in (Endpoint.CHAT, Endpoint.COMPLETIONS):
        with suppress(ValueError):
            *events, done = as_stream(endpoint, data, b'{"stream_options": {"include_usage": true}}').split(b"\n\n")[
                :-1
            ]
            assert done == b"data: [DONE]"
            for event in events:
                assert event.startswith(b"data: ") and json.loads(event[6:])["object"]
    answer = bodies.read_prefill(data)
    if answer is not None:
        answer.token_ids()
        assert bodies.read_prefill(bodies.whole_response(data)) is not None


_USAGE = b'"usage":{"prompt_tokens":16,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens": 12}}'
STREAM = (
    b'data: {"choices":[{"delta":{"role":"assistant","content":""}}],"usage":null}\n\n'
    b'data: {"choices":[{"delta":{"content":"h\\"usage\\": {"}}]}\n\ndata: {"choices":[],%b}\n\ndata: [DONE]\n\n'
    % _USAGE
)
WHOLE = (
    b'{"id":"x","choices":[{"message":{"content":"hi","tool_calls":[{"id":"t"}]},"finish_reason":"stop"}],%b}' % _USAGE
)
_OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
ANSWERS = (
    _OK + b"content-length: 8\r\n\r\ndata: 1\n",
    _OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\ndata:\r\n3;x=y\r\n 1\n\r\n0\r\nx: y\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n" + _OK + b"content-length: 1\r\n\r\nx",
    b"HTTP/1.0 200 OK\r\nx: y\r\n\r\ndata: 1\n",
    _OK + b"connection: close\r\ncontent-length: 0\r\n\r\n" + _OK,
    b"HTTP/1.1 204 No Content\r\n\r\n",
    _OK + b"content-length: 1\r\n\r\nx" + _OK + b"content-length: 1\r\n\r\ny",
    b"HTTP/1.1 103 Early Hints\r\ncontent-length: 0\r\n\r\n" + _OK + b"\r\nuntil the end",
)
HTTP = (
    *(
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.0 ",
        b"101 ",
        b"103 ",
        b"204 ",
        b"304 ",
        b"\r\n\r\n",
        b"\r\n ",
        b"0\r\n\r\n",
        b"\xff",
    ),
    *(
        b"content-length: ",
        b"transfer-encoding: ",
        b"chunked",
        b"connection: ",
        b"keep-alive",
        b"close",
        b"upgrade: x\r\n",
    ),
)
STREAMS = (STREAM, WHOLE, b"data:" + WHOLE + b"\r\n\r\n: ping\n\n" + b"data:" + WHOLE.replace(b"12", b"120"))
STREAM_WORDS = (
    *JSON,
    *(
        b'"usage"',
        b'"usage":null',
        b'"usage": {',
        b'"cached_tokens"',
        b'"prompt_tokens":',
        b'"prompt_tokens_details":{',
    ),
    *(b"data: ", b"\n\n", b"\r\n", b'"content":"', b'"text": "x"', b'"choices":', b"[DONE]"),
)
REPLIES = (
    WHOLE,
    b'{"choices":[{"text":"hi","prompt_token_ids":[1,2],"disaggregated_params":{"ctx_request_id":1},"index":0}],"usage":null}',
    b'{"choices":[{"finish_reason":"length"}],"prompt_token_ids":[[1,2]],"kv_transfer_params":{"do_remote_prefill":true}}',
)
