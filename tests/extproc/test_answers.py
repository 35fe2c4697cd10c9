"""A picker that sends requests to pods itself, and whose responses the gateway passes on."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

grpc: Any = pytest.importorskip("grpc")

from loadtest.mock_engine.faults import Fault, FaultKind  # noqa: E402
from router.admission.fair_bound import body_memory  # noqa: E402
from router.config.schema import Limits  # noqa: E402
from router.frontends.extproc.gateway_exchange import CHUNK_BYTES, AnsweringExchange, GatewayTerms  # noqa: E402
from router.frontends.extproc.messages import BUFFERED, NONE  # noqa: E402
from router.frontends.extproc.picker_server import SERVICE  # noqa: E402
from router.frontends.http.exchange import BodyMemory  # noqa: E402
from tests.extproc.conftest import Pick, Picking, Stream, chat  # noqa: E402

pytestmark = [pytest.mark.net, pytest.mark.anyio]
ANSWERS = {"requests": "picker"}


async def response_of(stream: Stream, body: bytes | None = None, **head: Any) -> tuple[dict[str, str], bytes]:
    """Send a whole request. Returns the headers of the response, and its body."""
    await stream.head(**head)
    await stream.send(request_body={"body": chat() if body is None else body, "end_of_stream": True})
    return await rest_of(stream)


async def rest_of(stream: Stream) -> tuple[dict[str, str], bytes]:
    first = (await stream.receive()).streamed_immediate_response
    headers = {one.key.decode(): one.raw_value.decode() for one in first.headers_response.headers.headers}
    body = b""
    while (message := await stream.receive()) is not None:
        piece = message.streamed_immediate_response.body_response
        assert len(piece.body) < 64 * 1024, "Envoy takes no more"
        body += piece.body
        if piece.end_of_stream:
            assert await stream.receive() is None
            return headers, body
    raise AssertionError(f"{await stream.call.code()} {await stream.call.details()}")


async def test_the_response_of_the_pod_passes(picker: Pick) -> None:
    async with picker(picker=ANSWERS) as picking:
        headers, body = await response_of(picking.stream())
        assert headers[":status"] == "200" and headers["x-warmroute-pod"] in picking.pods
        assert len(body) == int(headers["content-length"])
        assert msgspec.json.decode(body)["usage"]["completion_tokens"] == 4
        await picking.until(lambda: picking.results() == {"ok": 1})
        assert picking.leases == 0 and picking.program.edge.body_memory.bytes == 0


async def test_events_pass_as_they_come(picker: Pick) -> None:
    async with picker(picker=ANSWERS) as picking:
        headers, body = await response_of(picking.stream(), chat(stream=True, max_tokens=200))
        assert headers["content-type"].startswith("text/event-stream")
        assert body.count(b"data: ") > 100 and body.endswith(b"data: [DONE]\n\n")


async def test_a_large_response_is_cut_into_pieces_that_envoy_takes(picker: Pick) -> None:
    async with picker(picker=ANSWERS) as picking:
        text = "Hello " * 60_000
        headers, body = await response_of(picking.stream(), chat(text, echo=True), path="/tokenize")
        assert headers[":status"] == "200" and len(body) > 100_000


async def test_pods_that_die_before_they_answer_cost_no_request(picker: Pick) -> None:
    """The gateway would have the address of one pod, and fail. Two of three pods die."""
    async with picker(3, picker=ANSWERS) as picking:
        for engine in picking.engines[:2]:
            engine.inject(Fault(kind=FaultKind.DIE_BEFORE_ANSWER))
        for number in range(6):
            headers, _ = await response_of(picking.stream(), chat(f"question {number}"))
            assert headers[":status"] == "200"


async def test_errors_have_the_shape_of_their_api(picker: Pick) -> None:
    async with picker(picker=ANSWERS, limits={"max_body_bytes": 1000}) as picking:
        headers, body = await response_of(picking.stream(), chat(model="nope"), path="/v1/messages")
        assert (headers[":status"], headers["content-type"]) == ("404", "application/json")
        assert msgspec.json.decode(body)["type"] == "error"
        headers, _ = await response_of(picking.stream(), chat("Hello " * 1000))
        assert headers[":status"] == "413"


async def test_the_pages_of_the_router_itself_are_answered(picker: Pick) -> None:
    async with picker(picker=ANSWERS) as picking:
        stream = picking.stream()
        await stream.head("/v1/models", "GET")
        headers, body = await rest_of(stream)
        assert headers[":status"] == "200"
        assert msgspec.json.decode(body)["data"][0]["id"] == "demo"


async def test_clients_that_leave_at_any_moment_leave_nothing(picker: Pick, caplog: pytest.LogCaptureFixture) -> None:
    chance = random.Random(1)
    async with picker(picker=ANSWERS) as picking:

        async def leave(number: int) -> None:
            stream = picking.stream()
            await stream.head()
            body = chat(f"question {number}", stream=True, max_tokens=2000)
            await stream.send(request_body={"body": body, "end_of_stream": True})
            for _ in range(chance.randrange(20)):
                await stream.receive()
            stream.call.cancel()

        for _ in range(10):
            await asyncio.gather(*map(leave, range(10)))
        await picking.until(lambda: picking.leases == 0 and picking.program.edge.body_memory.bytes == 0)
        assert picking.results()["client_gone"] > 0
        gc.collect()  # which reports tasks whose errors nobody has seen
    assert not [record for record in caplog.records if record.name == "asyncio"]


@pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions"])
@pytest.mark.parametrize("words", [15_000, 60_000])
async def test_a_gateway_that_never_reads_gets_a_status_and_holds_nothing(picker: Pick, words: int, path: str) -> None:
    """Whether the response is complete by then or not."""
    body = chat("Hello " * words, echo=True) if path == "/tokenize" else chat(stream=True, max_tokens=words // 10)
    async with picker(picker=ANSWERS, limits={"slow_read_timeout_s": 0.5}) as picking, slow(picking) as stream:
        await stream.head(path)
        await stream.send(request_body={"body": body, "end_of_stream": True})
        await picking.until(lambda: picking.server.streams)
        await picking.until(lambda: not picking.server.streams and not writers())
        assert picking.leases == 0 and picking.program.edge.body_memory.bytes == 0
        with pytest.raises(grpc.aio.AioRpcError) as left:
            await rest_of(stream)
        assert left.value.code() == grpc.StatusCode.UNAVAILABLE


class SlowCall:
    """The stream of a gateway that takes a message after `pause_s`."""

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s
        self.size_bytes, self.status = 0, grpc.StatusCode.OK

    async def write(self, message: bytes) -> None:
        await asyncio.sleep(self._pause_s)
        self.size_bytes += len(message)

    async def abort(self, status: Any, _why: str) -> None:
        self.status = status


@pytest.mark.virtual
@pytest.mark.parametrize(("pause_s", "gets_all"), [(9.9, True), (20.1, False)])
async def test_a_gateway_that_reads_slowly_gets_all(pause_s: float, gets_all: bool) -> None:
    """A response of many messages, each in time; together they take longer."""
    edge: Any = SimpleNamespace(body_memory=BodyMemory(body_memory(1)), limits=Limits(slow_read_timeout_s=10.0))
    call, body = SlowCall(pause_s), b"x" * 40 * CHUNK_BYTES
    exchange = AnsweringExchange(call, GatewayTerms(edge, {}, lambda _name: 0))
    exchange.start(200, [])
    assert not exchange.put(body), "the pod waits meanwhile"
    exchange.finish()
    await exchange.end()
    assert (call.size_bytes > len(body)) is gets_all
    assert call.status is (grpc.StatusCode.OK if gets_all else grpc.StatusCode.UNAVAILABLE)
    assert exchange.was_reset is not gets_all


@contextlib.asynccontextmanager
async def slow(picking: Picking) -> AsyncIterator[Stream]:
    """A request of a gateway that takes no byte which it does not read."""
    window = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{picking.port}", options=window) as channel:
        yield Stream(channel.stream_stream(f"/{SERVICE}/Process")())


def writers() -> list[asyncio.Task[Any]]:
    """Tasks that wait until a gateway reads."""
    return [task for task in asyncio.all_tasks() if "AnsweringExchange._write" in str(task.get_coro())]


async def test_events_of_a_picker_that_stops_end_with_an_error(picker: Pick) -> None:
    async with picker(picker=ANSWERS) as picking:
        for engine in picking.engines:
            engine.inject(Fault(kind=FaultKind.SILENCE, after_chunks=5))
        stream = picking.stream()
        await stream.head()
        await stream.send(request_body={"body": chat(stream=True, max_tokens=100), "end_of_stream": True})
        waiting = asyncio.create_task(rest_of(stream))
        await picking.until(lambda: picking.leases)
        await picking.server.close(0.0, 0.5)
        _, body = await waiting
        assert b"event: error" in body and body.endswith(b"\n\n")


async def test_a_response_that_breaks_does_not_look_whole(picker: Pick) -> None:
    raw = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 99999999\r\n\r\n" + "1, " * 3_000_000
    async with picker(picker=ANSWERS) as picking:
        for engine in picking.engines:
            engine.inject(Fault(kind=FaultKind.RAW, raw=raw))
        with pytest.raises(grpc.aio.AioRpcError) as broken:
            await response_of(picking.stream())
        assert broken.value.code() == grpc.StatusCode.UNAVAILABLE
        assert picking.leases == 0


@pytest.mark.parametrize("kind", [FaultKind.SILENCE, FaultKind.CUT])
async def test_speech_passes_as_it_is_made_and_does_not_look_whole_where_it_breaks(
    picker: Pick, kind: FaultKind
) -> None:
    """Two pieces of 960 bytes are passed on while the pod is silent, or before it breaks off."""
    speech = msgspec.json.encode({"model": "demo", "input": "Hello", "voice": "a", "response_format": "pcm"})
    async with picker(picker=ANSWERS) as picking:
        for engine in picking.engines:
            engine.inject(Fault(kind=kind, after_chunks=2))
        stream = picking.stream()
        await stream.head(path="/v1/audio/speech")
        await stream.send(request_body={"body": speech, "end_of_stream": True})
        assert (await stream.receive()).streamed_immediate_response.headers_response.headers.headers
        size_bytes = 0
        while size_bytes < 2 * 960:
            size_bytes += len((await stream.receive()).streamed_immediate_response.body_response.body)
        assert size_bytes == 2 * 960
        if kind is FaultKind.CUT:
            with pytest.raises(grpc.aio.AioRpcError) as broken:
                await stream.receive()
            assert broken.value.code() == grpc.StatusCode.UNAVAILABLE
        else:
            stream.call.cancel()
        await picking.until(lambda: picking.leases == 0)


async def test_a_piece_a_little_above_the_buffer_of_a_gateway_is_read(picker: Pick) -> None:
    """Envoy under load sends all that it has buffered at once: more than its limit of 1 MiB, by up to one read."""
    async with picker(picker=ANSWERS) as picking:
        stream = picking.stream()
        await stream.head()
        await stream.send(request_body={"body": chat("word " * 400_000), "end_of_stream": True})
        headers, body = await rest_of(stream)
        assert headers[":status"] == "400" and b"context" in body


async def test_a_message_as_large_as_a_whole_body_is_not_buffered(picker: Pick) -> None:
    """Bodies come in pieces, and only these count in `limits.max_held_bytes`."""
    async with picker(picker=ANSWERS) as picking:
        stream = picking.stream()
        await stream.head()
        await stream.send(request_body={"body": b" " * (5 << 20)})
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stream.receive()
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_gateway_that_buffers_is_told_what_to_set(picker: Pick) -> None:
    async with picker(picker=ANSWERS) as picking:
        stream = picking.stream()
        await stream.head(modes=(BUFFERED, NONE))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stream.receive()
        assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert "FULL_DUPLEX_STREAMED" in str(refused.value.details())
