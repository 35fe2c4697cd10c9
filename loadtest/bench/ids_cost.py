"""Measures what `return_token_ids` costs a real vLLM: CPU per token of its processes, as the kernel counts it.

    python -m loadtest.bench.ids_cost [--rounds 10] [--out ids.json]

Needs `tests/live/install.sh` and a model that knows its answers (`tests/live/answer_bodies.py`). A pod writes answers
in concurrent streams, in pairs of rounds with and without ids, the first of which alternates. Printed are microseconds
per token of the API server and of all processes, and the ratio with ids to without: the geometric mean over the pairs,
with an interval of 95 %. CPU time counts no waiting, but caches that other programs empty make it longer.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from loadtest.commands.child_processes import free_port
from loadtest.peers.processes import process_usage
from router.cli.options import writable
from tests.live.answer_bodies import CHAT, COMPLETIONS, MODEL, chat, completion
from tests.live.answer_scripts import TOOLS
from tests.live.engines import EngineProcess, start_vllm
from tests.live.live_fleet import AGENT_FLAGS

STREAMS = 12
TOKENS = 200
STUDENT = {4: 3.18, 6: 2.57, 8: 2.36, 10: 2.26, 12: 2.20, 16: 2.13, 20: 2.09, 30: 2.05}
"""Student's t for 95 %, by number of pairs."""
PLAIN = [11, 13, 264, 279, 304, 315, 323, 374, 389, 429, 432, 458, 504, 525, 702, 773, 825, 1075, 1349]
"""The only allowed output tokens: whole words."""
ENDLESS: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True, "allowed_token_ids": PLAIN}
LOADS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, chat("plain", **ENDLESS)),
    "chat with tools": (CHAT, chat("plain", tools=TOOLS, **ENDLESS)),
    "completion": (COMPLETIONS, completion("plain", **ENDLESS)),
}


def main(
    rounds: Annotated[int, typer.Option(help="Pairs of rounds for each load; even.")] = 10,
    out: Annotated[Path | None, typer.Option(help="Write all rounds as JSON.", callback=writable)] = None,
) -> None:
    """Print a line for each load and process."""
    with start_vllm("ids-cost", free_port(), MODEL, kv_port=free_port(), extra_args=AGENT_FLAGS) as pod:
        measured = {name: asyncio.run(_pairs(pod, *load, rounds)) for name, load in LOADS.items()}
    for name, pairs in measured.items():
        for process in ("API server", "all"):
            print(_line(f"{name}, {process}", [(one[process], other[process]) for one, other in pairs]))
        events = [statistics.mean(pair[with_ids]["events"] for pair in pairs) for with_ids in (0, 1)]
        print(f"  tokens per event: {1 / events[0]:.2f} without ids, {1 / events[1]:.2f} with")
    if out is not None:
        out.write_text(json.dumps(measured, indent=1))


async def _pairs(pod: EngineProcess, path: str, body: dict[str, Any], rounds: int) -> list[list[dict[str, float]]]:
    """CPU per token without and with ids, for each pair."""
    found = []
    async with httpx.AsyncClient(base_url=pod.url, timeout=600, trust_env=False) as client:
        await _round(client, pod, path, body)
        for number in range(rounds):
            bodies = [body, {**body, "return_token_ids": True}]
            order = (0, 1) if number % 2 == 0 else (1, 0)
            both = {which: await _round(client, pod, path, bodies[which]) for which in order}
            found.append([both[0], both[1]])
    return found


async def _round(client: httpx.AsyncClient, pod: EngineProcess, path: str, body: dict[str, Any]) -> dict[str, float]:
    before = _cpu_us(pod)
    events = await asyncio.gather(*(_events(client, path, body) for _ in range(STREAMS)))
    after, tokens = _cpu_us(pod), STREAMS * TOKENS
    return {name: (after[name] - before[name]) / tokens for name in before} | {"events": sum(events) / tokens}


async def _events(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> int:
    async with client.stream("POST", path, json=body) as response:
        response.raise_for_status()
        return sum([piece.count(b"data: ") async for piece in response.aiter_raw()])


def _cpu_us(pod: EngineProcess) -> dict[str, float]:
    leader = pod.process.pid
    fields = Path(f"/proc/{leader}/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    return {"API server": 1e6 * ticks / os.sysconf("SC_CLK_TCK"), "all": 1e6 * process_usage(leader).cpu_s}


def _line(title: str, pairs: Sequence[tuple[float, float]]) -> str:
    logs = [math.log(after / before) for before, after in pairs]
    mean, t = statistics.mean(logs), next(t for count, t in STUDENT.items() if count >= len(pairs))
    spread = t * statistics.stdev(logs) / math.sqrt(len(logs))
    low, middle, high = (math.exp(mean + sign * spread) for sign in (-1, 0, 1))
    without, with_ids = (statistics.mean(side) for side in zip(*pairs, strict=True))
    return f"{title}: {without:.1f} -> {with_ids:.1f} us a token, x {middle:.3f} [{low:.3f}, {high:.3f}]"


if __name__ == "__main__":
    typer.run(main)
