"""Replayed agent sessions have the recorded lengths, share the recorded blocks, and wait for answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from loadtest.commands.mock_engine_command import mock_tokenizer
from loadtest.fleets.replay_agents import AgentProse, AgentReplay, fitting
from loadtest.simulator.traffic import Session, TrafficRequest

DEADLINE_S = 60.0
BLOCK = 64
ANSWER = (
    b'data: {"choices": [{"text": "Yes"}]}\n\n'
    b'data: {"choices": [], "usage": {"prompt_tokens": 20, "completion_tokens": 1}}\n\ndata: [DONE]\n\n'
)


def request(tokens: int, *blocks: int, think_s: float = 0.0) -> TrafficRequest:
    return TrafficRequest(tokens, 5, blocks, tokens // BLOCK, think_s)


def test_prompts_have_the_recorded_lengths_and_share_the_recorded_blocks() -> None:
    """Different tokens right after the common blocks."""
    tokenizer, prose = mock_tokenizer(), AgentProse(BLOCK)
    one, two = (tokenizer.encode(prose.prompt(each)) for each in (request(200, 1, 2, 3), request(150, 1, 2)))
    assert (len(one), len(two)) == (200, 150)
    assert one[: 2 * BLOCK] == two[: 2 * BLOCK]
    assert one[2 * BLOCK : 2 * BLOCK + 8] != two[2 * BLOCK : 2 * BLOCK + 8]


def test_a_session_ends_before_the_first_request_that_fits_no_pod() -> None:
    """Prompt and answer together."""
    requests = [request(100, 1), request(196, 1, 2, 3), request(64, 1)]
    assert fitting(requests, 201) == requests
    assert fitting(requests, 200) == requests[:1]


@asynccontextmanager
async def engine(happened: list[str]) -> AsyncIterator[str]:
    """Answers the first requests when two have arrived, and records requests and answers."""
    two_arrived = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        await reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n")[0]))
        happened.append("request")
        if len(happened) == 2:
            two_arrived.set()
        await two_arrived.wait()
        happened.append("answer")
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(ANSWER), ANSWER))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with asyncio.timeout(DEADLINE_S), server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.net
@pytest.mark.anyio
async def test_the_next_request_follows_the_answer_and_its_pause() -> None:
    """Sessions do not wait for one another. The ideal counts repeated blocks, in whole blocks of the router."""
    first = Session(0.0, (request(200, 1, 2, 3), request(230, 1, 2, 4, think_s=0.2)))
    replay, happened = AgentReplay([first, Session(0.0, (request(70, 9),))], BLOCK, 8, 10_000), list[str]()
    workload = replay.workload(0.5)
    async with engine(happened) as url:
        results = await workload.play(url, "m", lambda _: None)
    assert happened == ["request", "request", "answer", "answer", "request", "answer"]
    assert (workload.planned, workload.rate_per_s) == (3, 0.5)
    assert [each.error for each in results.served] == ["", "", ""]
    before, _, after = results.served
    assert after.due_s == pytest.approx(before.due_s + before.e2e_s + 0.2)
    assert workload.ideal(results) == 2 * BLOCK
    assert replay.sticky_share == 1.0
