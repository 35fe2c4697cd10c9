"""Answers that are made while they are sent reach clients as they are made: speech, NDJSON, text."""

from __future__ import annotations

import asyncio
import json
from base64 import b64decode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest

from loadtest.mock_engine.faults import Fault, FaultKind
from router.config.schema import Edge
from tests.stories.conftest import Deploy, Deployment
from tests.stories.test_fault_matrix import exchange, message, nothing_stays_behind

pytestmark = [pytest.mark.net, pytest.mark.anyio]
SPEECH = "/v1/audio/speech"
ASKED: dict[str, Any] = {"model": "demo", "input": "The tide comes in.", "voice": "alloy"}
FORMATS = ["pcm", "wav", "mp3"]
PIECE_BYTES = 960


def sdk_of(deployment: Deployment) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=0)


async def direct(deployment: Deployment, **fields: Any) -> bytes:
    """What the pod sends to a client of its own."""
    return (await deployment.client.post(deployment.engines[0].url + SPEECH, json=ASKED | fields)).content


@pytest.mark.parametrize("kind", FORMATS)
async def test_speech_arrives_before_all_of_it_is_spoken(deploy: Deploy, kind: Any) -> None:
    """Through OpenAI's SDK: the pod has sent two pieces, and never sends the rest."""
    async with deploy(pods=1) as deployment, sdk_of(deployment) as sdk:
        whole = await direct(deployment, response_format=kind)
        deployment.engines[0].inject(Fault(kind=FaultKind.SILENCE, after_chunks=2))
        speaking = sdk.audio.speech.with_streaming_response.create(**ASKED, response_format=kind)
        async with speaking as answer:
            received = b""
            async for piece in answer.iter_bytes():
                received += piece
                if len(received) >= 2 * PIECE_BYTES:
                    break
            assert whole.startswith(received) and len(received) < len(whole)
        await nothing_stays_behind(deployment)


@pytest.mark.parametrize("kind", FORMATS)
async def test_speech_is_what_the_pod_said(deploy: Deploy, kind: Any) -> None:
    """With its type, in chunks; the SDK reads it whole, too."""
    async with deploy(pods=1) as deployment, sdk_of(deployment) as sdk:
        whole = await direct(deployment, response_format=kind)
        answer = await sdk.audio.speech.with_raw_response.create(**ASKED, response_format=kind)
        assert answer.headers["content-type"] == {"mp3": "audio/mpeg"}.get(kind, f"audio/{kind}")
        assert answer.content == whole
        assert whole.startswith({"wav": b"RIFF"}.get(kind, b""))


async def test_events_of_speech_have_the_same_sound(deploy: Deploy) -> None:
    """And their usage at the end."""
    async with deploy(pods=1) as deployment, sdk_of(deployment) as sdk:
        whole = await direct(deployment, response_format="pcm")
        streaming = sdk.audio.speech.with_streaming_response
        async with streaming.create(**ASKED, response_format="pcm", stream_format="sse") as answer:
            events = [json.loads(line[6:]) async for line in answer.iter_lines() if line.startswith("data: ")]
        assert b"".join(b64decode(event["audio"]) for event in events[:-1]) == whole
        assert events[-1]["usage"]["output_tokens"] == len(whole) // PIECE_BYTES


async def test_speech_that_breaks_is_incomplete_and_nothing_is_appended(deploy: Deploy) -> None:
    """Also for clients of HTTP/1.0, to which the end of the connection is the end of a body. Events end with an
    error."""
    async with deploy(pods=1) as deployment, sdk_of(deployment) as sdk:
        engine, whole = deployment.engines[0], await direct(deployment, response_format="pcm")
        cut = Fault(kind=FaultKind.CUT, after_chunks=2)
        engine.inject(cut)
        received = b""
        with pytest.raises(Exception, match="incomplete chunked read"):  # of the SDK's own release of httpx
            async with sdk.audio.speech.with_streaming_response.create(**ASKED, response_format="pcm") as answer:
                async for piece in answer.iter_bytes():
                    received += piece
        assert whole.startswith(received) and len(received) == 2 * PIECE_BYTES
        body = json.dumps({**ASKED, "response_format": "pcm"}).encode()
        asked = message(body, version=b"1.0").replace(b"/v1/chat/completions", SPEECH.encode())
        engine.inject(cut)
        with pytest.raises(ConnectionResetError):
            await exchange(deployment, asked)
        assert (await exchange(deployment, asked)).endswith(b"\r\n\r\n" + whole)
        engine.inject(cut)
        events = await deployment.client.post(SPEECH, json=ASKED | {"stream_format": "sse"})
        assert events.text.count("speech.audio.delta") == 2 and "event: error\n" in events.text
        await nothing_stays_behind(deployment)


@dataclass
class SlowPod:
    """A pod whose answers have two parts; the second follows when the test allows it."""

    head: bytes = b""
    goes_on: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            asked = await reader.readuntil(b"\r\n\r\n")
            models = b'{"data":[{"id":"slow"}]}'
            if asked.startswith(b"GET "):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(models), models))
                return
            writer.write(b'HTTP/1.1 200 OK\r\n%btransfer-encoding: chunked\r\n\r\n6\r\n{"a":1\r\n' % self.head)
            await self.goes_on.wait()
            writer.write(b"1\r\n}\r\n0\r\n\r\n")


@asynccontextmanager
async def slow_pod(deploy: Deploy, *paths: str) -> AsyncIterator[tuple[Deployment, SlowPod]]:
    pod = SlowPod()
    async with (
        deploy(pods=1, edge=Edge(extra_paths=paths)) as deployment,
        await asyncio.start_server(pod.serve, "127.0.0.1", 0) as server,
    ):
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert (await deployment.admin.post("/admin/pods", json={"url": url})).status_code == 201
        await deployment.until(lambda: deployment.ready("slow") == 1)
        yield deployment, pod


@pytest.mark.parametrize("path", ["/api/generate", "/v1/chat/completions"])
@pytest.mark.parametrize("kind", ["application/x-ndjson", "text/plain; charset=utf-8", "", "application/json"])
async def test_what_may_be_made_while_it_is_sent_is_not_held(deploy: Deploy, path: str, kind: str) -> None:
    """On paths of the API and on added ones. A JSON object is held where the request of an API wants no stream."""
    async with slow_pod(deploy, "/api/generate") as (deployment, pod):
        pod.head = f"content-type: {kind}\r\n".encode() if kind else b""
        asked = {"model": "slow", "messages": [{"role": "user", "content": "x"}]}
        is_held = kind == "application/json" and path != "/api/generate"
        if is_held:
            pod.goes_on.set()
        async with deployment.client.stream("POST", path, json=asked) as answer:
            pieces = answer.aiter_raw()
            assert await anext(pieces) == (b'{"a":1}' if is_held else b'{"a":1')
            pod.goes_on.set()
            assert [piece async for piece in pieces] == ([] if is_held else [b"}"])
