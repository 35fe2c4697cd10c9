"""The traffic of a comparison round, the same for all routers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import TypeAlias

from loadtest.commands.child_processes import FleetPlan
from loadtest.commands.mock_engine_command import MAX_CONTEXT_TOKENS, mock_tokenizer
from loadtest.fleets.replay_agents import AgentReplay
from loadtest.fleets.replay_trace import TraceProse, due_times_s, ideal_of_trace, read_trace, replay
from loadtest.simulator.agent_sessions import agent_traffic, read_agent_sessions
from loadtest.traffic.chat_workload import sessions
from loadtest.traffic.figures import ideal_cached_tokens
from loadtest.traffic.load_driver import DriveResults, drive

TRACE_ROUNDED_TO_S = 3.0
TRACE_MAX_TOKENS = 64
AGENT_MAX_TOKENS = 1000


@dataclass(frozen=True, slots=True)
class Traffic:
    """`play` sends it to a URL; `ideal_cached_tokens` is what an infinite cache would have saved; `sticky_share` how
    many requests of the last play went to the engine of the one before, if that is measured."""

    play: Callable[[str], Awaitable[DriveResults]]
    ideal_cached_tokens: Callable[[DriveResults], int]
    sticky_share: Callable[[], float] = lambda: nan


TrafficOfRound: TypeAlias = Callable[[int], Traffic]


def session_traffic(seed: int, duration_s: float, sessions_per_s: float, model: str) -> TrafficOfRound:
    """The demo's sessions: chats, questions about documents, agents, one-offs; different in every round."""

    def of_round(number: int) -> Traffic:
        mix = sessions(seed + number, duration_s=duration_s, sessions_per_s=sessions_per_s)
        return Traffic(lambda url: drive(url, model, mix), ideal_of_chats)

    return of_round


def trace_traffic(path: Path, requests: int, speedup: float, model: str) -> TrafficOfRound:
    """The first requests of a Mooncake trace, the same in every round."""
    lines, prose = read_trace(path, requests), TraceProse()
    due_s = due_times_s(lines, speedup, TRACE_ROUNDED_TO_S)
    ordered = [request for _, request in sorted(zip(due_s, lines, strict=True), key=lambda pair: pair[0])]
    ideal = ideal_of_trace(ordered)

    def play(url: str) -> Awaitable[DriveResults]:
        return replay(url, model, lambda _: None, lines, prose, due_s, TRACE_MAX_TOKENS)

    return lambda _: Traffic(play, lambda _: ideal)


def agent_traffic_of(path: Path, load: float, duration_s: float, seed: int, plan: FleetPlan) -> TrafficOfRound:
    """Recorded coding agents, closed loop: other sessions in every round."""
    recorded = read_agent_sessions(path)
    pod_tokens = min(plan.num_blocks * plan.block_size_tokens, MAX_CONTEXT_TOKENS)

    def of_round(number: int) -> Traffic:
        traffic = agent_traffic(recorded, speedup=load, seed=seed + number, duration_s=duration_s)
        replay = AgentReplay(list(traffic.sessions), traffic.block_size_tokens, AGENT_MAX_TOKENS, pod_tokens)
        return Traffic(
            lambda url: replay.play(url, plan.model, lambda _: None),
            replay.ideal_tokens,
            lambda: replay.sticky_share,
        )

    return of_round


def ideal_of_chats(results: DriveResults) -> int:
    """Tokens that an infinite cache would have saved."""
    return ideal_cached_tokens(results.served, mock_tokenizer())
