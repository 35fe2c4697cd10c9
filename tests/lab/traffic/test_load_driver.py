"""The driver sends the turns of sessions when they are due, and records the results."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from loadtest.traffic.chat_workload import ChatSession, Turn
from loadtest.traffic.load_driver import DriveResults, LoadDriver, RequestResult, drive
from router.types import Endpoint
from tests.kit.closed_port import closed_port

pytestmark = [pytest.mark.net, pytest.mark.anyio]

DEADLINE_S = 30.0
ROUTE = b"x-warmroute-pod: pod-1\r\nx-warmroute-cached-tokens: 16\r\n"


def session(name: str, turns: int) -> ChatSession:
    return ChatSession(name, "chat", 0.0, "Be kind.", tuple(Turn(f"{name} {n}?", 3) for n in range(turns)))


def stream(*words: str, end: bool = True, cached_tokens: int = 16) -> bytes:
    chunks: list[dict[str, Any]] = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}]
    chunks += [{"choices": [{"delta": {"content": word}}]} for word in words]
    details = {"cached_tokens": cached_tokens}
    chunks.append(
        {"choices": [], "usage": {"prompt_tokens": 20, "completion_tokens": 2, "prompt_tokens_details": details}}
    )
    text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
    return (text + ("data: [DONE]\n\n" if end else "")).encode()


class Canned:
    """A router that returns the given responses in turn and records the request bodies."""

    def __init__(self, answers: Sequence[tuple[int, bytes]]) -> None:
        self._answers = list(answers)
        self.bodies: list[dict[str, Any]] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                self.bodies.append(json.loads(await reader.readexactly(length)))
                status, body = self._answers.pop(0)
                writer.write(b"HTTP/1.1 %d X\r\n%bcontent-length: %d\r\n\r\n" % (status, ROUTE, len(body)))
                for at in range(0, len(body), 7):  # frames arrive in parts
                    writer.write(body[at : at + 7])
                    await writer.drain()
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()


@asynccontextmanager
async def canned(*answers: tuple[int, bytes]) -> AsyncIterator[tuple[str, Canned]]:
    router = Canned(answers)
    server = await asyncio.start_server(router, "127.0.0.1", 0)
    async with asyncio.timeout(DEADLINE_S), server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", router


async def driven(
    sessions: Sequence[ChatSession], *answers: tuple[int, bytes]
) -> tuple[DriveResults, Canned, list[RequestResult]]:
    seen: list[RequestResult] = []
    async with canned(*answers) as (url, router):
        results = await drive(url, "demo", sessions, seen.append)
    return results, router, seen


async def test_a_turn_contains_the_responses_before_it() -> None:
    """The second prompt contains the first response."""
    results, router, seen = await driven([session("a", 2)], (200, stream("Yes", " sir")), (200, stream("No")))
    assert [one.text for one in results.served] == ["Yes sir", "No"]
    assert seen == list(results.served)
    assert router.bodies[1]["messages"] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "a 0?"},
        {"role": "assistant", "content": "Yes sir"},
        {"role": "user", "content": "a 1?"},
    ]
    assert router.bodies[0]["stream_options"] == {"include_usage": True}
    assert router.bodies[0]["max_tokens"] == 3


async def test_results_are_read_from_headers_and_usage() -> None:
    """Pod and prediction are in the headers, the actual counts in the usage chunk."""
    results, _, _ = await driven([session("a", 1)], (200, stream("Yes", cached_tokens=12)))
    (one,) = results.served
    assert (one.status, one.kind, one.pod, one.error) == (200, "chat", "pod-1", "")
    assert (one.predicted_cached_tokens, one.cached_tokens) == (16, 12)
    assert (one.prompt_tokens, one.output_tokens) == (20, 2)
    assert one.ttft_s is not None
    assert 0 < one.ttft_s <= one.e2e_s <= results.wall_s


async def test_a_refused_request_is_an_error_and_ends_its_session() -> None:
    """No turn follows a failed one."""
    results, router, _ = await driven([session("a", 3)], (503, b'{"error": {"message": "busy"}}'))
    (one,) = results.served
    assert "503" in one.error
    assert "busy" in one.error
    assert one.ttft_s is None
    assert len(router.bodies) == 1


async def test_a_comment_in_the_stream_is_not_an_error() -> None:
    """Routers send one while a first token is late, so counting it as a failure would drop the slowest requests."""
    results, _, _ = await driven([session("a", 1)], (200, b": keep-alive\n\n" + stream("Yes")))
    assert (results.served[0].text, results.served[0].error) == ("Yes", "")


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (stream("Yes", end=False), "without [DONE]"),
        (b'data: {"error": {"message": "cut"}}\n\n', "error in the stream"),
        (b'event: error\ndata: {"type": "error", "error": {"message": "cut"}}\n\n', "error in the stream"),
        (b"data: {nothing\n\n", "invalid stream chunk"),
        (b'data: {"choices": [null]}\n\n', "invalid stream chunk"),
        (b'data: {"choices": [{"text": 7}]}\n\n', "invalid stream chunk"),
        (b'data: {"usage": 7}\n\n', "invalid stream chunk"),
    ],
)
async def test_a_broken_stream_is_an_error(body: bytes, complaint: str) -> None:
    """Status 200 is not enough: the stream must end with [DONE]."""
    results, _, _ = await driven([session("a", 1)], (200, body))
    assert complaint in results.served[0].error


async def test_a_missing_router_is_an_error_of_every_session() -> None:
    """Nothing is raised; each session has its own error."""
    with closed_port() as port:
        results = await drive(f"http://127.0.0.1:{port}", "demo", [session("a", 2), session("b", 2)])
    assert [one.error.split(":")[0] for one in results.served] == ["ConnectFailed", "ConnectFailed"]


class Stalled:
    """A router that accepts requests and responds only once `count` of them have arrived."""

    def __init__(self, until: int) -> None:
        self._waiting = until
        self._moved = asyncio.Event()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0]))
        self._waiting -= 1
        if self._waiting == 0:
            self._moved.set()
        await self._moved.wait()
        body = stream("Yes")
        writer.write(b"HTTP/1.1 200 X\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body))
        await writer.drain()
        writer.close()


async def test_requests_due_during_a_stall_include_it_in_their_times() -> None:
    """The router responds when the last of twenty requests has arrived, so each waited at least from its due time until
    then. A closed-loop driver would never send the second."""
    sessions = [ChatSession(f"s{n}", "chat", n * 0.005, "", (Turn("Why?", 3),)) for n in range(20)]
    server = await asyncio.start_server(Stalled(20), "127.0.0.1", 0)
    async with asyncio.timeout(DEADLINE_S), server:
        results = await drive(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "demo", sessions)
    assert [one.error for one in results.served] == [""] * 20
    moved_s = max(one.sent_s for one in results.served)
    for one in results.served:
        assert one.ttft_s is not None
        assert one.ttft_s >= moved_s - one.due_s > -1e-9


async def test_lateness_of_the_driver_is_reported_and_part_of_every_time() -> None:
    """Due an hour ago and sent now: the client has waited an hour."""
    async with canned((200, stream("Yes"))) as (url, _):
        driver = LoadDriver([url], lambda _: None)
        one = await driver.send(Endpoint.CHAT, {"model": "demo", "messages": []}, "chat", due_s=-3600.0)
        driver.close()
    assert one.late_s >= 3600
    assert one.ttft_s is not None
    assert one.ttft_s >= 3600
    assert one.e2e_s >= one.ttft_s
    assert one.due_s == pytest.approx(-3600.0)


async def test_a_turn_is_due_its_think_time_after_the_previous_response() -> None:
    """Think time is not lateness."""
    turns = (Turn("One?", 3), Turn("Two?", 3, think_s=0.05))
    results, _, _ = await driven([ChatSession("a", "chat", 0.0, "", turns)], (200, stream("Yes")), (200, stream("No")))
    first, second = results.served
    assert second.due_s == pytest.approx(first.due_s + first.e2e_s + 0.05)
