"""Compares policies on recorded sessions of coding agents, closed loop.

    python -m loadtest.fleets.replay_agents --sessions agent_sessions.jsonl --load 1.5 --duration-s 900

Plays the traffic of `warmroute simulate agent_sessions.jsonl` against routers over mock engines, once per policy, or
against the router at --url: the same sessions start at the same times, prompts have the recorded lengths and share the
recorded blocks, and a request follows the previous answer after its recorded pause. Times count from when it was due.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Annotated

import typer
from rich.console import Console

from loadtest.commands.child_processes import FleetPlan
from loadtest.commands.mock_engine_command import MAX_CONTEXT_TOKENS
from loadtest.fleets.record import Objective, Record, record_of
from loadtest.fleets.replay_trace import one_token_words
from loadtest.fleets.runs import Workload, command, replayed, run_script
from loadtest.html_page import OutOption, ReportOption
from loadtest.simulator.agent_sessions import STARTS_EVERY_S, agent_traffic, read_agent_sessions
from loadtest.simulator.traffic import IdealCache, Session, TrafficRequest
from loadtest.traffic.load_driver import DriveResults, LoadDriver, OnProgress
from router.types import BlockHash, Endpoint

ROUTER_BLOCK_TOKENS = 16
KEPT_BLOCKS = 1 << 18
"""Texts of blocks in memory: about 100 MB."""


class AgentProse:
    """Texts of exactly the recorded lengths; equal leading blocks give equal leading tokens."""

    def __init__(self, block_tokens: int) -> None:
        self._tokens = block_tokens
        self._words = one_token_words()
        self._block = lru_cache(KEPT_BLOCKS)(self._words_of)

    def prompt(self, request: TrafficRequest) -> str:
        """The blocks, then the words of the last, incomplete block, which no other prompt shares."""
        rest = request.prompt_tokens - request.prompt_blocks * self._tokens
        blocks = [self._block(block) for block in request.prompt_hashes]
        return "".join(blocks) + "".join(Random(f"{blocks[-1:]} {rest}").choices(self._words, k=rest))

    def _words_of(self, block: BlockHash) -> str:
        return "".join(Random(block).choices(self._words, k=self._tokens))


class AgentReplay:
    """The sessions as a workload. A request that fits no pod ends its session before it is sent."""

    def __init__(self, sessions: Sequence[Session], block_tokens: int, max_tokens: int, pod_tokens: int) -> None:
        self._prose, self._max_tokens, self._block_tokens = AgentProse(block_tokens), max_tokens, block_tokens
        self._sessions = [(one.start_s, fitting(one.requests, pod_tokens)) for one in sessions]
        self._sent: list[TrafficRequest] = []
        self._engines: list[list[str]] = []

    @property
    def sticky_share(self) -> float:
        """Share of the requests, without the first of each session, that the engine of the one before answered."""
        steps = [pair for engines in self._engines for pair in pairwise(engines)]
        return sum(one == other for one, other in steps) / max(len(steps), 1)

    def workload(self, rate_per_s: float) -> Workload:
        """`rate_per_s` counts sessions."""
        planned = sum(len(requests) for _, requests in self._sessions)
        return Workload(rate_per_s, planned, self.play, self.ideal_tokens)

    async def play(self, url: str, model: str, on_progress: OnProgress) -> DriveResults:
        """Send all sessions once."""
        driver, self._sent, self._engines = LoadDriver([url], on_progress), [], []
        try:
            async with asyncio.TaskGroup() as group:
                for start_s, requests in self._sessions:
                    group.create_task(self._play(driver, model, start_s, requests))
            return driver.results()
        finally:
            driver.close()

    def ideal_tokens(self, _: DriveResults) -> int:
        """Prompt tokens that one cache without eviction would have saved of the requests sent, in their order."""
        ideal = IdealCache(self._block_tokens)
        return sum(ideal.serve(request) // ROUTER_BLOCK_TOKENS * ROUTER_BLOCK_TOKENS for request in self._sent)

    async def _play(self, driver: LoadDriver, model: str, ready_s: float, requests: Sequence[TrafficRequest]) -> None:
        engines: list[str] = []
        self._engines.append(engines)
        for request in requests:
            due_s = ready_s + request.think_s
            await driver.until(due_s)
            self._sent.append(request)
            asked = {
                "model": model,
                "prompt": self._prose.prompt(request),
                "add_special_tokens": False,
                "max_tokens": min(request.output_tokens, self._max_tokens),
            }
            result = await driver.send(Endpoint.COMPLETIONS, asked, "agent", due_s)
            if result.error:
                return
            engines.append(result.engine)
            ready_s = result.due_s + result.e2e_s


def fitting(requests: Sequence[TrafficRequest], pod_tokens: int) -> Sequence[TrafficRequest]:
    """The requests before the first one that does not fit into a pod."""
    longer = (at for at, one in enumerate(requests) if one.prompt_tokens + one.output_tokens > pod_tokens)
    return requests[: next(longer, len(requests))]


def main(
    sessions: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="Agent sessions, JSONL.")],
    load: Annotated[
        float, typer.Option(min=0.01, help=f"Factor on the starts of sessions: 1 is one every {STARTS_EVERY_S:g} s.")
    ] = 1.0,
    duration_s: Annotated[float, typer.Option(min=1, help="Recorded time of a run.")] = 900.0,
    seed: Annotated[int, typer.Option(help="Seed of the starts and their order.")] = 0,
    url: Annotated[str, typer.Option(help="A running router; default: start a fleet and routers.")] = "",
    model: Annotated[str, typer.Option(help="Model of --url; it must use the DeepSeek tokenizer.")] = "demo",
    policies: Annotated[str, typer.Option(help="Policies to compare, without --url.")] = "least_load,cost_aware",
    pods: Annotated[int, typer.Option(min=1, help="Number of mock engines.")] = 8,
    num_blocks: Annotated[
        int, typer.Option(min=1, help="KV blocks of 16 tokens per pod; 28,836 is Llama-70B on 4 H100.")
    ] = 28_836,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens per response.")] = 1000,
    out: OutOption = None,
    report: ReportOption = None,
) -> None:
    """Play agent sessions. Exit code 1 if a request failed."""
    plan = FleetPlan(pods=pods, num_blocks=num_blocks, block_size_tokens=ROUTER_BLOCK_TOKENS, model=model)
    settings = {"load": load, "duration_s": duration_s, "seed": seed, "pods": pods, "max_tokens": max_tokens}
    about = f"Coding agents of {sessions.name} at load {load:g}, closed loop."

    async def played(console: Console) -> Record:
        traffic = agent_traffic(read_agent_sessions(sessions), speedup=load, seed=seed, duration_s=duration_s)
        pod_tokens = min(num_blocks * ROUTER_BLOCK_TOKENS, MAX_CONTEXT_TOKENS)
        replay = AgentReplay(list(traffic.sessions), traffic.block_size_tokens, max_tokens, pod_tokens)
        runs = await replayed(replay.workload(load / STARTS_EVERY_S), plan, url, policies, console)
        return record_of("coding-agents", about, command(), settings, Objective(ttft_ms=2000.0, tpot_ms=100.0), runs)

    run_script(played, out, report)


if __name__ == "__main__":
    typer.run(main)
