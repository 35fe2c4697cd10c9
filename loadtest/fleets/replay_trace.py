"""Compares policies on a public trace of real traffic.

    python -m loadtest.fleets.replay_trace --trace conversation_trace.jsonl --requests 1000

Replays a Mooncake-format trace against routers over mock engines, once per policy, or against the router at --url.
Prompts share blocks exactly as in the trace. Each text is generated shortly before it is due, so that generating it
does not delay requests. Arrival times of the trace are spread: see --jitter-s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from loadtest.commands.child_processes import FleetPlan
from loadtest.commands.mock_engine_command import mock_tokenizer
from loadtest.fleets.record import Objective, Record, record_of
from loadtest.fleets.runs import Workload, command, replayed, run_script
from loadtest.html_page import OutOption, ReportOption
from loadtest.mock_engine.vocabulary import WORDS
from loadtest.traffic.load_driver import DriveResults, LoadDriver, OnProgress
from router.types import Endpoint

TRACE_BLOCK_TOKENS = 512
ROUTER_BLOCK_TOKENS = 16
KIND = "trace"
PREPARED_S = 1.0
"""Time before it is due at which a request's text is generated."""


class TraceRequest(msgspec.Struct, frozen=True):
    """One line of a Mooncake trace. `timestamp` is in ms; a hash id identifies its block and everything before it."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def read_trace(path: Path, requests: int) -> list[TraceRequest]:
    """The first `requests` lines."""
    with path.open("rb") as lines:
        return [msgspec.json.decode(line, type=TraceRequest) for line in islice(lines, requests)]


def one_token_words() -> list[str]:
    """Words, each with a leading space, that the mock engines' tokenizer encodes as one token."""
    tokenizer = mock_tokenizer()
    return [f" {word}" for word in WORDS if len(tokenizer.encode(f" {word}")) == 1]


class TraceProse:
    """Generates the text of each block: words of one token each, selected by the block's id."""

    def __init__(self) -> None:
        self._words = one_token_words()

    def prompt(self, request: TraceRequest) -> str:
        """A text of exactly `input_length` tokens; equal hash ids give equal text."""
        lengths = _block_lengths(request)
        return "".join(self._block(block, length) for block, length in zip(request.hash_ids, lengths, strict=False))

    def _block(self, block: int, tokens: int) -> str:
        return "".join(Random(block).choices(self._words, k=tokens))


def ideal_of_trace(trace: Sequence[TraceRequest]) -> int:
    """Tokens that an infinite cache would save: leading known ids, in whole router blocks, without the last token."""
    known: set[int] = set()
    saved = 0
    for request in trace:
        found = next((at for at, block in enumerate(request.hash_ids) if block not in known), len(request.hash_ids))
        tokens = min(found * TRACE_BLOCK_TOKENS, request.input_length - 1)
        saved += tokens // ROUTER_BLOCK_TOKENS * ROUTER_BLOCK_TOKENS
        known.update(request.hash_ids)
    return saved


async def replay(
    url: str,
    model: str,
    on_progress: OnProgress,
    trace: Sequence[TraceRequest],
    prose: TraceProse,
    due_s: Sequence[float],
    max_tokens: int,
) -> DriveResults:
    """Send every request when it is due, open loop."""
    driver = LoadDriver([url], on_progress)

    async def one(request: TraceRequest, at_s: float) -> None:
        await driver.until(at_s - PREPARED_S)
        asked = {
            "model": model,
            "prompt": prose.prompt(request),
            "add_special_tokens": False,
            "max_tokens": max(1, min(request.output_length, max_tokens)),
        }
        await driver.until(at_s)
        await driver.send(Endpoint.COMPLETIONS, asked, KIND, at_s)

    try:
        async with asyncio.TaskGroup() as group:
            for request, at_s in zip(trace, due_s, strict=True):
                group.create_task(one(request, at_s))
        return driver.results()
    finally:
        driver.close()


def due_times_s(trace: Sequence[TraceRequest], speedup: float, jitter_s: float) -> list[float]:
    """Send time of each request. Jitter spreads arrivals, which the public conversation trace rounds to 3 s."""
    random = Random(0)
    first_ms = trace[0].timestamp
    return [((one.timestamp - first_ms) / 1000 + random.uniform(0, jitter_s)) / speedup for one in trace]


def main(
    trace: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="Mooncake-format JSONL.")],
    requests: Annotated[int, typer.Option(min=1)] = 1000,
    url: Annotated[str, typer.Option(help="A running router; default: start a fleet and routers.")] = "",
    model: Annotated[str, typer.Option(help="Model of --url; it must use the DeepSeek tokenizer.")] = "demo",
    policies: Annotated[
        str, typer.Option(help="Policies to compare, without --url.")
    ] = "round_robin,ring_bounded_load,cost_aware",
    pods: Annotated[int, typer.Option(min=1, help="Number of mock engines.")] = 8,
    num_blocks: Annotated[
        int, typer.Option(help="KV blocks of 16 tokens per pod; 28,836 is Llama-70B on 4 H100.")
    ] = 28_836,
    speedup: Annotated[float, typer.Option(min=0.01, help="Factor on the arrival rate.")] = 2.0,
    jitter_s: Annotated[float, typer.Option(min=0.0, help="Spread of each arrival, in trace time.")] = 3.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens per response.")] = 64,
    ttft_ms: Annotated[float, typer.Option(help="TTFT objective.")] = 5000.0,
    out: OutOption = None,
    report: ReportOption = None,
) -> None:
    """Replay a trace. Exit code 1 if a request failed."""
    lines = read_trace(trace, requests)
    due_s = due_times_s(lines, speedup, jitter_s)
    plan = FleetPlan(pods=pods, num_blocks=num_blocks, block_size_tokens=ROUTER_BLOCK_TOKENS, model=model)
    settings = {"requests": len(lines), "speedup": speedup, "jitter_s": jitter_s, "max_tokens": max_tokens}
    about = f"{len(lines)} requests of {trace.name} at {speedup:g} times its rate."

    async def played(console: Console) -> Record:
        runs = await replayed(workload_of(lines, due_s, max_tokens), plan, url, policies, console)
        return record_of(trace.stem, about, command(), settings, Objective(ttft_ms=ttft_ms), runs)

    run_script(played, out, report)


def workload_of(trace: Sequence[TraceRequest], due_s: Sequence[float], max_tokens: int) -> Workload:
    """The trace as a workload, with its mean rate."""
    ordered = [request for _, request in sorted(zip(due_s, trace, strict=True), key=lambda pair: pair[0])]
    ideal = ideal_of_trace(ordered)
    play = partial(replay, trace=trace, prose=TraceProse(), due_s=due_s, max_tokens=max_tokens)
    rate_per_s = round(len(trace) / (max(due_s) or 1.0), 2)
    return Workload(rate_per_s, len(trace), play, lambda _: ideal)


def _block_lengths(request: TraceRequest) -> Iterator[int]:
    """Tokens per block; only the last may be shorter."""
    for start in range(0, request.input_length, TRACE_BLOCK_TOKENS):
        yield min(TRACE_BLOCK_TOKENS, request.input_length - start)


if __name__ == "__main__":
    typer.run(main)
