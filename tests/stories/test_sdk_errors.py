"""The official SDKs of OpenAI and Anthropic raise on every response that is not complete."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, replace
from typing import Any

import anthropic
import openai
import pytest

from router.config.schema import Edge, Limits
from tests.stories.conftest import Chat, Deploy, Deployment

pytestmark = [pytest.mark.net, pytest.mark.anyio]

MODEL = "recorded"
ASKED: Chat = [{"role": "user", "content": "Hi"}]


def events(*datas: dict[str, Any]) -> list[bytes]:
    """Server-sent events, with a name where the data has a type."""
    names = [f"event: {data['type']}\n" if "type" in data else "" for data in datas]
    return [f"{name}data: {json.dumps(data)}\n\n".encode() for name, data in zip(names, datas, strict=True)]


def _chunk(**choice: Any) -> dict[str, Any]:
    return {"id": "c", "created": 1, "model": MODEL, "choices": [{"index": 0, "finish_reason": None, **choice}]}


_RESPONSE: dict[str, Any] = {
    "id": "resp_1",
    "object": "response",
    "model": MODEL,
    "output": [],
    "status": "in_progress",
}
_TEXT = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
_MESSAGE: dict[str, Any] = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": MODEL,
    "content": [],
    "stop_reason": None,
}
_USAGE = {"input_tokens": 1, "output_tokens": 2}

CHAT = [*events(_chunk(delta={"role": "assistant"}), _chunk(delta={"content": "a"})), b"data: [DONE]\n\n"]
COMPLETION = [*events(_chunk(text="a"), _chunk(text="b")), b"data: [DONE]\n\n"]
RESPONSES = events(
    {"type": "response.created", "sequence_number": 0, "response": _RESPONSE},
    {"type": "response.in_progress", "sequence_number": 1, "response": _RESPONSE},
    {"type": "response.output_text.delta", "sequence_number": 2, "delta": "a", "logprobs": [], **_TEXT},
    {"type": "response.completed", "sequence_number": 3, "response": _RESPONSE | {"status": "completed"}},
)
MESSAGES = events(
    {"type": "message_start", "message": _MESSAGE | {"usage": _USAGE}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}},
    {"type": "content_block_stop", "index": 0},
    {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": _USAGE},
    {"type": "message_stop"},
)


class RecordedPod:
    """Answers each inference request with `answer`, then closes the connection; without an answer, never."""

    def __init__(self) -> None:
        self.answer: bytes | None = b""
        self.asked = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection with one request."""
        with closing(writer), suppress(asyncio.IncompleteReadError):  # a router that stops hangs up
            await self._serve(reader, writer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        lengths = [int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
        await reader.readexactly(sum(lengths))
        models = b'{"data":[{"id":"recorded"}]}'
        listed = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (len(models), models)
        if not head.startswith(b"GET "):
            self.asked += 1
        if (answer := listed if head.startswith(b"GET ") else self.answer) is None:
            await reader.read()  # until the router hangs up
        else:
            writer.write(answer)
            await writer.drain()

    def plays(self, pieces: list[bytes], *, cut: bool) -> None:
        """Stream these pieces; `cut`: without the end of the body."""
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        self.answer = head + chunks + (b"" if cut else b"0\r\n\r\n")


@dataclass
class Sdks:
    """Both SDKs against one router, whose only pod of `MODEL` plays recorded answers."""

    pod: RecordedPod
    openai: Any
    anthropic: Any
    deployment: Deployment


@asynccontextmanager
async def sdks(deploy: Deploy, **options: Any) -> AsyncIterator[Sdks]:
    pod = RecordedPod()
    async with deploy(pods=1, **options) as deployment, await asyncio.start_server(pod.serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert (await deployment.admin.post("/admin/pods", json={"url": url})).status_code == 201
        await deployment.until(lambda: deployment.ready(MODEL) == 1)
        async with (
            openai.AsyncOpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=0) as of_openai,
            anthropic.AsyncAnthropic(base_url=deployment.url, api_key="none", max_retries=0) as of_anthropic,
        ):
            yield Sdks(pod, of_openai, of_anthropic, deployment)


async def _chat(at: Sdks, **more: Any) -> Any:
    return await at.openai.chat.completions.create(model=MODEL, messages=ASKED, **more)


async def _completion(at: Sdks, **more: Any) -> Any:
    return await at.openai.completions.create(model=MODEL, prompt="Hi", **more)


async def _response(at: Sdks, **more: Any) -> Any:
    return await at.openai.responses.create(model=MODEL, input="Hi", **more)


async def _message(at: Sdks, **more: Any) -> Any:
    return await at.anthropic.messages.create(**({"model": MODEL, "messages": ASKED, "max_tokens": 9} | more))


Call = Callable[..., Awaitable[Any]]
CALLS: dict[str, tuple[Call, list[bytes], type[Exception]]] = {
    "chat": (_chat, CHAT, openai.APIError),
    "completions": (_completion, COMPLETION, openai.APIError),
    "responses": (_response, RESPONSES, openai.APIError),
    "messages": (_message, MESSAGES, anthropic.APIStatusError),
}


async def test_sdks_raise_on_a_stream_that_is_cut_behind_any_event(deploy: Deploy) -> None:
    """With the router's error code. A whole stream in front of each cut one shows that SDKs accept it uncut."""
    async with sdks(deploy) as at:
        for call, stream, raised in CALLS.values():
            for count in range(1, len(stream)):
                at.pod.plays(stream, cut=False)
                whole = [event async for event in await call(at, stream=True)]
                at.pod.plays(stream[:count], cut=True)
                read = []
                with pytest.raises(raised, match=r"pod .* (closed|sent|connection)") as error:
                    async for event in await call(at, stream=True):
                        read.append(event)
                assert len(read) <= count <= len(whole)
                assert "upstream_broken" in str(error.value.body)  # type: ignore[attr-defined]


async def test_sdks_raise_on_a_stream_that_is_cut_inside_an_event(deploy: Deploy) -> None:
    """The router cannot take back half an event: it may be the JSON decoder that raises."""
    async with sdks(deploy) as at:
        for call, stream, raised in CALLS.values():
            for cut_bytes in range(1, len(stream[1]), 7):
                at.pod.plays(stream, cut=False)
                assert [event async for event in await call(at, stream=True)]
                at.pod.plays([stream[0], stream[1][:cut_bytes]], cut=True)
                with pytest.raises((raised, json.JSONDecodeError)):
                    assert [event async for event in await call(at, stream=True)]


CUT = (b'content-length: 99\r\n\r\n{"id"', b'transfer-encoding: chunked\r\n\r\n5\r\n{"id"\r\n', b"")


async def test_sdks_raise_on_an_unstreamed_answer_that_is_cut(deploy: Deploy) -> None:
    """Also where its length is known only at its end."""
    json_head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
    async with sdks(deploy) as at:
        for call, stream, raised in CALLS.values():
            for answer in CUT:
                at.pod.plays(stream, cut=False)
                assert [event async for event in await call(at, stream=True)]
                at.pod.answer = json_head + answer
                with pytest.raises(raised, match="upstream_broken"):
                    await call(at)


@pytest.mark.parametrize("sdk", ["openai", "anthropic"])
async def test_sdks_do_not_have_an_answer_that_timed_out_computed_again(deploy: Deploy, sdk: str) -> None:
    """They would send the request three times by themselves, and each time it could only time out again."""
    async with sdks(deploy, limits=Limits(first_byte_timeout_s=0.2, retries=0)) as at:
        at.pod.answer = None
        call = _chat if sdk == "openai" else _message
        clients = {name: getattr(at, name).with_options(max_retries=2) for name in ("openai", "anthropic")}
        with pytest.raises((openai.InternalServerError, anthropic.InternalServerError), match="upstream_timeout"):
            await call(replace(at, **clients))
        assert at.pod.asked == 1


async def test_errors_before_the_stream_have_the_shape_of_the_api_that_was_called(deploy: Deploy) -> None:
    """The words of Anthropic on `/v1/messages` and below it, those of OpenAI elsewhere."""
    async with sdks(deploy) as at:
        with pytest.raises(anthropic.NotFoundError) as unknown:
            await _message(at, model="gone", stream=True)
        assert unknown.value.body == {
            "type": "error",
            "error": {
                "type": "not_found_error",
                "message": "The model `gone` does not exist. Models: demo, recorded. To add one, start a pod that"
                " serves it under this name.",
                "param": "model",
                "code": "model_not_found",
            },
        }
        with pytest.raises(
            anthropic.NotFoundError, match=r"Unknown path.*not_found_error|not_found_error.*Unknown path"
        ):
            await at.anthropic.messages.batches.list()
        with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
            await at.anthropic.messages.count_tokens(model="gone", messages=[{"role": "user", "content": "Hi"}])
        with pytest.raises(openai.NotFoundError) as other:
            await at.openai.responses.create(model="gone", input="Hi")
        assert (other.value.type, other.value.code) == ("invalid_request_error", "model_not_found")


async def test_a_client_that_may_not_know_pods_reads_no_address_in_a_cut_stream(deploy: Deploy) -> None:
    """`edge.route_headers: false` holds for both copies of the message."""
    async with sdks(deploy, edge=Edge(route_headers=False)) as at:
        at.pod.plays(MESSAGES[:2], cut=True)
        body = {"model": MODEL, "messages": ASKED, "max_tokens": 9, "stream": True}
        answer = await at.deployment.client.post("/v1/messages", json=body)
        assert answer.text.count("The pod sent an invalid or incomplete response.") == 2
        assert "127.0.0.1" not in answer.text
        assert not [name for name in answer.headers if "warmroute" in name]
