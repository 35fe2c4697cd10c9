"""How streams of an engine break: the bytes, and what the engine does afterwards."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any

import httpx
import pytest

from loadtest.mock_engine.mock_engine import MockEngine
from router.types import PodLoad

pytestmark = [pytest.mark.net, pytest.mark.anyio]
Running = Callable[..., AbstractAsyncContextManager[tuple[MockEngine, httpx.AsyncClient]]]
CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 20,
    "stream": True,
    "stream_options": {"include_usage": True},
    "return_token_ids": True,
}
DEADLINE_S = 30.0
SILENCE_S = 0.3
"""A running stream has an event every 10 ms."""


async def arm(client: httpx.AsyncClient, kind: str, **fields: Any) -> None:
    assert (await client.post("/_fault", json={"kind": kind, **fields})).status_code == 200


async def read(client: httpx.AsyncClient, ask: dict[str, Any] = ASK, path: str = CHAT) -> tuple[bytes, bool]:
    """The body of a stream, and whether it is complete."""
    got = b""
    try:
        async with client.stream("POST", path, json=ask) as answer:
            async for piece in answer.aiter_raw():
                got += piece
    except httpx.RemoteProtocolError:
        return got, False
    return got, True


async def test_speech_of_an_engine_that_dies_is_incomplete(running: Running) -> None:
    """Only events can say why."""
    async with running() as (_, client):
        for stream_format in ("audio", "sse"):
            await arm(client, "core_dies", after_chunks=2)
            asked = {"input": "hello", "response_format": "pcm", "stream_format": stream_format}
            got, is_complete = await read(client, asked, "/v1/audio/speech")
            assert is_complete == (stream_format == "sse") == (b"EngineCore encountered an issue." in got)
            assert got.count(b"speech.audio.delta") == 2 if is_complete else len(got) == 2 * 960
            assert (await client.delete("/_fault")).status_code == 200


def events(body: bytes) -> list[dict[str, Any]]:
    """The decoded events of a body, without its end marker."""
    lines = [line.removeprefix(b"data: ") for line in body.split(b"\n\n") if line]
    return [json.loads(line) for line in lines if line != b"[DONE]"]


def token_count(body: bytes) -> int:
    return sum(len(choice.get("token_ids") or ()) for event in events(body) for choice in event.get("choices", ()))


async def refuses(url: str) -> None:
    """Wait until connections are refused. One that waits while the listener closes is closed or reset."""
    async with httpx.AsyncClient(base_url=url) as client:
        with pytest.raises(httpx.ConnectError):
            while True:
                with suppress(httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
                    await client.get("/health", headers={"connection": "close"})


class Reader:
    """Reads a stream in the background."""

    def __init__(self, answer: httpx.Response) -> None:
        self.body = b""
        self._changed = asyncio.Event()
        self.task = asyncio.ensure_future(self._read(answer))

    async def _read(self, answer: httpx.Response) -> None:
        async for piece in answer.aiter_raw():
            self.body += piece
            self._changed.set()

    async def until(self, events: int) -> None:
        while self.body.count(b"\n\n") < events:
            self._changed.clear()
            await self._changed.wait()


async def falls_silent(reader: Reader) -> None:
    """Wait until nothing arrives for a while. The last events may arrive after connections are refused."""
    got = b""
    while got != reader.body:
        got = reader.body
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(reader.task), SILENCE_S)


@asynccontextmanager
async def reading(client: httpx.AsyncClient, ask: dict[str, Any] = ASK) -> AsyncIterator[Reader]:
    async with client.stream("POST", CHAT, json=ask) as answer:
        reader = Reader(answer)
        yield reader
        reader.task.cancel()


async def test_a_silent_stream_stays_open(running: Running) -> None:
    """Its engine goes on: health and other requests."""
    async with running() as (engine, client):
        await arm(client, "silence", after_chunks=3)
        async with reading(client) as reader:
            await reader.until(4)
            assert (await client.get("/health")).status_code == 200
            other, is_complete = await read(client)
            assert is_complete and token_count(other) == 20
            assert token_count(reader.body) == 3 and not reader.task.done()
        while engine.load != PodLoad():  # there is no event to wait for
            await asyncio.sleep(0)


async def test_an_aborted_stream_ends_completely(running: Running) -> None:
    """With its own finish reason, no more ids, usage of what was sent, and the end marker."""
    async with running() as (_, client):
        await arm(client, "abort", after_chunks=5)
        body, is_complete = await read(client)
        assert is_complete and body.endswith(b"data: [DONE]\n\n")
        *_, end, usage = events(body)
        choice = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "abort", "stop_reason": None}
        assert end["choices"] == [choice | {"token_ids": []}]
        assert usage["usage"]["completion_tokens"] == token_count(body) == 5


async def test_a_dead_core_ends_all_streams_with_an_error(running: Running) -> None:
    """Each with an event without a name, the end marker and a complete body. Then nothing works until it is cleared."""
    async with running(time_scale=1.0) as (_, client):
        async with reading(client, ASK | {"max_tokens": 2000}) as other:
            await other.until(2)
            await arm(client, "core_dies", after_chunks=3)
            body, is_complete = await read(client)
            await other.task
        for got in (body, other.body):
            *_, error, done = got.split(b"\n\n")[:-1]
            assert (done, is_complete) == (b"data: [DONE]", True)
            assert json.loads(error.removeprefix(b"data: ")) == {
                "error": {
                    "message": "EngineCore encountered an issue. See stack trace (above) for the root cause.",
                    "type": "InternalServerError",
                    "param": None,
                    "code": 500,
                }
            }
        assert (await client.get("/health")).status_code == 503
        refused = await client.post(CHAT, json=ASK)
        assert refused.status_code == 500 and "EngineCore encountered an issue." in refused.text
        await client.delete("/_fault")
        assert (await client.get("/health")).status_code == 200


async def test_a_pod_can_die_in_the_middle_of_a_stream(running: Running) -> None:
    """The body has no end, and connections are refused."""
    async with running(time_scale=1.0) as (_, client):
        await arm(client, "die", after_chunks=4)
        body, is_complete = await read(client)
        assert (token_count(body), is_complete) == (4, False)
        with pytest.raises(httpx.ConnectError):
            await client.get("/health")


async def test_a_terminated_pod_falls_silent(running: Running) -> None:
    """Its streams stay open without another event; connections are refused."""
    async with running(time_scale=1.0) as (engine, client):
        await arm(client, "terminate", after_chunks=4)
        async with reading(client, ASK | {"max_tokens": 2000}) as reader:
            await reader.until(5)
            await refuses(engine.url)
            assert token_count(reader.body) == 4 and not reader.task.done()


async def process_urls(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    url: str = json.loads(await process.stdout.readline())["url"]
    return url


@asynccontextmanager
async def own_process(*options: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, httpx.AsyncClient]]:
    """`warmroute mock-engine` with one engine, and a client of it."""
    command = [sys.executable, "-m", "router.cli", "mock-engine", "--port", "0", "--num-blocks", "512", *options]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    try:
        async with (
            asyncio.timeout(2 * DEADLINE_S),
            httpx.AsyncClient(base_url=await process_urls(process), timeout=DEADLINE_S) as client,
        ):
            yield process, client
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


LONG = ASK | {"max_tokens": 5000}


async def test_sigterm_leaves_streams_silent_until_their_client_closes_them() -> None:
    """Then the process ends by itself."""
    async with own_process() as (process, client):
        async with reading(client, LONG) as reader:
            await reader.until(5)
            process.send_signal(signal.SIGTERM)
            await refuses(str(client.base_url))
            await falls_silent(reader)
            assert process.returncode is None
        await client.aclose()
        assert await process.wait() == 0


async def test_sigkill_cuts_streams() -> None:
    async with own_process() as (process, client), reading(client, LONG) as reader:
        await reader.until(5)
        process.kill()
        with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
            await reader.task


async def test_sigstop_is_silence_and_sigcont_its_end() -> None:
    async with own_process() as (process, client), reading(client, LONG) as reader:
        await reader.until(5)
        process.send_signal(signal.SIGSTOP)
        await falls_silent(reader)
        sent = len(reader.body)
        with pytest.raises(httpx.ReadTimeout):
            await client.get("/health", timeout=httpx.Timeout(DEADLINE_S, read=SILENCE_S))
        process.send_signal(signal.SIGCONT)
        await reader.until(reader.body[:sent].count(b"\n\n") + 5)
