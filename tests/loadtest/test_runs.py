"""A workload is sent to the given URL and becomes a run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from rich.console import Console

from loadtest.commands.child_processes import ChildError
from loadtest.fleets.run import workload_of
from loadtest.fleets.runs import Workload, first_model, run_on_url
from loadtest.fleets.scenario import load_scenario
from loadtest.traffic.load_driver import DriveResults, OnProgress

pytestmark = [pytest.mark.net, pytest.mark.anyio]

DEADLINE_S = 60.0
MODELS = b'{"data": [{"id": "tiny"}]}'
ANSWER = (
    b'data: {"choices": [{"delta": {"content": "Yes"}}]}\n\n'
    b'data: {"choices": [], "usage": {"prompt_tokens": 20, "completion_tokens": 1}}\n\ndata: [DONE]\n\n'
)


async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A server with one model that responds to everything with one word."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if head.startswith(b"post"):
        await reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n")[0]))
    body = ANSWER if head.startswith(b"post") else MODELS
    writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
    await writer.drain()
    writer.close()


@asynccontextmanager
async def served() -> AsyncIterator[str]:
    server = await asyncio.start_server(engine, "127.0.0.1", 0)
    async with asyncio.timeout(DEADLINE_S), server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_a_scenario_runs_against_a_url() -> None:
    """All planned requests are sent to the model of the URL; the ideal is unknown."""
    load = workload_of(load_scenario("few-shot").at(rate_per_s=60, duration_s=0.5))
    async with served() as url:
        (run,) = await run_on_url([load], url, await first_model(url), Console(quiet=True), ideal_known=False)
    assert (run.name, run.rate_per_s, run.ideal_cached_tokens) == ("as it is", 60, None)
    assert len(run.requests) == run.planned > 10
    assert {row.error for row in run.requests} == {""}
    assert {row.kind for row in run.requests} == {"task"}


async def test_the_ideal_is_computed_only_with_our_tokenizer() -> None:
    """This needs the model's tokenizer."""

    async def play(url: str, model: str, on_progress: OnProgress) -> DriveResults:
        return DriveResults((), 1.0)

    load = Workload(1.0, 0, play, lambda _: 17)
    (run,) = await run_on_url([load], "http://127.0.0.1:1", "tiny", Console(quiet=True), ideal_known=True)
    assert run.ideal_cached_tokens == 17


async def test_a_url_without_a_model_is_an_error() -> None:
    """No server is listening."""
    async with served() as url:
        pass
    with pytest.raises(ChildError, match="--model"):
        await first_model(url)
