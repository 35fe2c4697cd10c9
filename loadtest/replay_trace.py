"""How do policies compare on a public trace of real traffic?

    python loadtest/replay_trace.py --trace conversation_trace.jsonl --requests 1000

Plays requests of a Mooncake-format trace against a router: its own, over mock engines, once for each policy; or the one
at --url. Texts are made so that prompts share blocks exactly as the trace says. This file never reads a clock of the
trace as truth: see --jitter-s.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Annotated

import msgspec
import typer
import uvloop
from rich.console import Console

from router.cli.drive import Driver, Results
from router.cli.figures import Figures, figures, table
from router.cli.mock_engine import TOKENIZER, need_tokenizer
from router.cli.stage import FleetPlan, StageError, clear_caches, end_on_sigterm, mock_fleet, running_router
from router.errors import ConfigError
from router.prompt.tokenizer import load_tokenizer
from router.sim.mock.words import WORDS
from router.types import Endpoint

TRACE_BLOCK_TOKENS = 512
ROUTER_BLOCK_TOKENS = 16
KIND = "trace"


class TraceRequest(msgspec.Struct, frozen=True):
    """One line of a Mooncake trace. `timestamp` is in ms; a hash id stands for its block and everything before it."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def read_trace(path: Path, requests: int) -> list[TraceRequest]:
    """The first so many lines."""
    with path.open("rb") as lines:
        return [msgspec.json.decode(line, type=TraceRequest) for line in islice(lines, requests)]


class Prose:
    """The text of each block: words of one token each, drawn by the block's id."""

    def __init__(self) -> None:
        tokenizer = load_tokenizer(TOKENIZER)
        self._words = [f" {word}" for word in WORDS if len(tokenizer.encode(f" {word}")) == 1]

    def prompt(self, request: TraceRequest) -> str:
        """Exactly `input_length` tokens, equal up to where the trace's ids are equal."""
        lengths = _block_lengths(request)
        return "".join(self._block(block, length) for block, length in zip(request.hash_ids, lengths, strict=False))

    def _block(self, block: int, tokens: int) -> str:
        return "".join(Random(block).choices(self._words, k=tokens))


def ideal_cached_tokens(trace: Sequence[TraceRequest]) -> int:
    """What an infinite cache would save: leading known ids, in whole router blocks, never the last token."""
    known: set[int] = set()
    saved = 0
    for request in trace:
        found = next((at for at, block in enumerate(request.hash_ids) if block not in known), len(request.hash_ids))
        tokens = min(found * TRACE_BLOCK_TOKENS, request.input_length - 1)
        saved += tokens // ROUTER_BLOCK_TOKENS * ROUTER_BLOCK_TOKENS
        known.update(request.hash_ids)
    return saved


async def replay(
    url: str, model: str, trace: Sequence[TraceRequest], prose: Prose, due_s: Sequence[float], max_tokens: int
) -> Results:
    """Every request when it is due, whether the router keeps up or not."""
    driver = Driver([url], _Ticker(len(trace)))

    async def one(request: TraceRequest, at_s: float) -> None:
        await driver.until(at_s)
        asked = {
            "model": model,
            "prompt": prose.prompt(request),
            "add_special_tokens": False,
            "max_tokens": max(1, min(request.output_length, max_tokens)),
        }
        await driver.send(Endpoint.COMPLETIONS, asked, KIND)

    try:
        async with asyncio.TaskGroup() as group:
            for request, at_s in zip(trace, due_s, strict=True):
                group.create_task(one(request, at_s))
        return driver.results()
    finally:
        driver.close()


class _Ticker:
    """A line on stderr for every tenth of the requests."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0

    def __call__(self, _: object) -> None:
        self._done += 1
        if self._done % max(self._total // 10, 1) == 0:
            print(f"  {self._done} of {self._total}", file=sys.stderr)


def due_times_s(trace: Sequence[TraceRequest], speedup: float, jitter_s: float) -> list[float]:
    """When each is sent. The public conversation trace has its arrivals rounded to 3 s: jitter spreads them again."""
    random = Random(0)
    first_ms = trace[0].timestamp
    return [((one.timestamp - first_ms) / 1000 + random.uniform(0, jitter_s)) / speedup for one in trace]


def main(
    trace: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="Mooncake-format JSONL.")],
    requests: Annotated[int, typer.Option(min=1)] = 1000,
    url: Annotated[str, typer.Option(help="A router that is up; else fleet and routers of our own.")] = "",
    model: Annotated[str, typer.Option(help="The model behind --url; it must use the DeepSeek tokenizer.")] = "demo",
    policies: Annotated[str, typer.Option(help="Of our own routers.")] = "round_robin,ring_bounded_load,cost_aware",
    pods: Annotated[int, typer.Option(min=1, help="Of our own fleet.")] = 8,
    num_blocks: Annotated[
        int, typer.Option(help="KV blocks of 16 tokens a pod; 28,836 is Llama-70B on 4 H100.")
    ] = 28_836,
    speedup: Annotated[float, typer.Option(min=0.01, help="Arrivals so many times faster.")] = 2.0,
    jitter_s: Annotated[float, typer.Option(min=0.0, help="Spread of each arrival, in trace time.")] = 3.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, to bound the time.")] = 64,
    out: Annotated[Path | None, typer.Option(help="Write the figures as JSON.")] = None,
) -> None:
    """Exit code 1 when a request failed."""
    lines = read_trace(trace, requests)
    due_s = due_times_s(lines, speedup, jitter_s)
    plan = FleetPlan(pods=pods, num_blocks=num_blocks, block_size_tokens=ROUTER_BLOCK_TOKENS, model=model)
    try:
        need_tokenizer()
        rows = uvloop.run(_compare(lines, due_s, max_tokens, plan, url, policies.split(",")))
    except (StageError, ConfigError) as error:
        raise SystemExit(f"replay_trace: {error}") from error
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise SystemExit(130) from None
    Console().print(table(rows, f"{len(lines)} requests of {trace.name}, {speedup:g} times as fast"))
    if out is not None:
        settings = {"requests": len(lines), "speedup": speedup, "jitter_s": jitter_s, "max_tokens": max_tokens}
        out.write_bytes(
            msgspec.json.format(msgspec.json.encode({**settings, "policies": [asdict(row) for row in rows]}))
        )
    raise SystemExit(1 if any(row.errors for row in rows) else 0)


async def _compare(
    trace: Sequence[TraceRequest],
    due_s: Sequence[float],
    max_tokens: int,
    plan: FleetPlan,
    url: str,
    policies: Sequence[str],
) -> list[Figures]:
    end_on_sigterm()
    prose = Prose()
    ordered = [request for _, request in sorted(zip(due_s, trace, strict=True), key=lambda pair: pair[0])]
    ideal = ideal_cached_tokens(ordered)
    if url:
        results = await replay(url, plan.model, trace, prose, due_s, max_tokens)
        return [figures("as it is", results, ideal, [])]
    rows = []
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="warmroute-replay-")))
        pods = await stack.enter_async_context(mock_fleet(plan, folder))
        for policy in policies:
            await clear_caches(pods)
            async with running_router(policy, pods, plan, folder) as router_url:
                print(policy, file=sys.stderr)
                results = await replay(router_url, plan.model, trace, prose, due_s, max_tokens)
                rows.append(figures(policy, results, ideal, [f"pod-{n}" for n in range(plan.pods)]))
    return rows


def _block_lengths(request: TraceRequest) -> Iterator[int]:
    """Tokens of each block; only the last may be shorter."""
    for start in range(0, request.input_length, TRACE_BLOCK_TOKENS):
        yield min(TRACE_BLOCK_TOKENS, request.input_length - start)


if __name__ == "__main__":
    typer.run(main)
