"""What is it worth that the next turn's prefill pod can read the last answer, which a decode pod has computed?

    python -m loadtest.studies.next_turn --data FOLDER [--seeds 101,102,103] [--out runs.csv]

In virtual time, over the public chat trace and recorded sessions of coding agents, whose answers the next prompts
repeat word by word. Eight pods of Llama-3.1-70B on four H100: split 6 + 2 and 4 + 4, and unsplit. `published` plays the
published measurement of vLLM, one prefill and one decode pod of Qwen3-32B.
"""

from __future__ import annotations

import csv
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from functools import cache, partial
from itertools import count, islice, takewhile
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Annotated

import typer
from msgspec import structs

from loadtest.commands.simulate import map_in_processes
from loadtest.commands.simulate_setup import shipped_prior
from loadtest.simulator.agent_sessions import AgentSession, agent_traffic, read_agent_sessions
from loadtest.simulator.outcome import figures
from loadtest.simulator.router_view import Knowledge, RouterSettings
from loadtest.simulator.scenario import Conditions, FleetSpec, LinkSpec, PodsSpec, StoreSpec
from loadtest.simulator.session_turn import SessionTurn
from loadtest.simulator.traffic import (
    Session,
    TraceRequest,
    Traffic,
    TrafficRequest,
    mooncake_traffic,
    read_mooncake,
    with_answers,
)
from loadtest.simulator.world import World
from router.admission.tenant import NO_SLO
from router.cli.options import writable
from router.config.load import shipped
from router.config.policy_files import load_policies
from router.decision import Candidate, Pull, Split
from router.types import Pod, Role

CHAT, AGENTS, PUBLISHED = "chat", "agents", "published"
MAX_PROMPT_TOKENS = 131_072
"""The context of the model: a session ends in front of the first prompt that is longer."""
STORE_TOKENS = 24_000_000
"""7.9 TB, 1 TB of memory for each pod."""
CONDITIONS = Conditions(overhead_ms=20.0)
FLEETS = {
    CHAT: {"6 + 2": (6, 2), "4 + 4": (4, 4), "8 unsplit": (8, 0)},
    AGENTS: {"6 + 2": (6, 2), "4 + 4": (4, 4), "6 + 2 always": (6, 2), "8 unsplit": (8, 0)},
    PUBLISHED: {"1 + 1 always": (1, 1)},
}
"""By traffic, pods that prefill and pods that decode. Those of `always` serve only what is split, as SGLang's do."""


@dataclass(frozen=True, slots=True)
class Way:
    """How KV of other pods gets to the pod that computes a prompt. `pulls` are priced, or taken by rule: always from
    the pod that holds most. Of a store that is not `priced` the router knows nothing; pods read what they find."""

    pulls: bool = False
    store: StoreSpec | None = None
    priced: bool = True


WAYS = {
    "none": Way(),
    "p2p, unpriced": Way(pulls=True, priced=False),
    "p2p": Way(pulls=True),
    "store of prompts": Way(store=StoreSpec(kv_tokens=STORE_TOKENS, answers=False)),
    "store, unpriced": Way(store=StoreSpec(kv_tokens=STORE_TOKENS), priced=False),
    "store": Way(store=StoreSpec(kv_tokens=STORE_TOKENS)),
}


@dataclass(frozen=True, slots=True)
class Recorded:
    """The folder of the recorded traffic, how many requests of the chat trace are played, and agents for how long."""

    data: Path
    requests: int | None = None
    agents_s: float = 7200.0


@dataclass(frozen=True, slots=True)
class Play:
    """One run. `load` multiplies the rate at which requests or sessions start."""

    traffic: str
    load: float
    fleet: str
    gb_per_s: float
    way: str
    seed: int


@dataclass(frozen=True, slots=True)
class Found:
    """Prompt tokens in all, and those that pods computed; times to first token; share of requests that were split."""

    requests: int
    prompt_mtokens: float
    computed_mtokens: float
    ttft_mean_ms: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p99_ms: float
    split_share: float
    pulled_mtokens: float


class PullsByRule(World):
    """Every split pulls from the pod that holds most, at any cost, and is priced without."""

    def _send_in(self, turn: SessionTurn, candidate: Candidate) -> None:
        if isinstance(candidate.plan, Split):
            held = {pod_id: pod.held_tokens(turn.request) for pod_id, pod in self._pods.items()}
            holder, own = max(held, key=held.__getitem__), held[candidate.plan.prefill.id]
            if held[holder] > own:
                pull = Pull(holder, held[holder], held[holder] - own)
                candidate = structs.replace(candidate, plan=structs.replace(candidate.plan, pull=pull))
        super()._send_in(turn, candidate)


def run(recorded: Recorded, play: Play) -> Found:
    spec, way = fleet_of(play), WAYS[play.way]
    fleet = spec.build(shipped_prior)
    pods = tuple(replace(one, known=_with_ways(one.known, way, play.fleet)) for one in fleet.pods)
    fleet = replace(fleet, pods=pods)
    traffic = traffic_of(recorded, play)
    world = (PullsByRule if way.pulls and not way.priced else World)(
        fleet,
        load_policies(shipped("policies"))["cost_aware_pd" if fleet.splits else "cost_aware"],
        spec.conditions,
        routers=RouterSettings(knowledge=spec.knowledge),
        block_size_tokens=traffic.block_size_tokens,
        seed=play.seed,
    )
    outcome = world.run(traffic)
    found, served = figures(outcome, NO_SLO), [one for one in outcome.outcomes if not one.refused]
    sent = sum(use.requests for use in outcome.pods.values())
    return Found(
        requests=len(served),
        prompt_mtokens=found.prompt_tokens / 1e6,
        computed_mtokens=(found.prompt_tokens - found.cached_tokens) / 1e6,
        ttft_mean_ms=found.ttft_mean_ms,
        ttft_p50_ms=found.ttft_p50_ms,
        ttft_p99_ms=found.ttft_p99_ms,
        tpot_p99_ms=found.tpot_p99_ms,
        split_share=sent / max(len(served), 1) - 1,
        pulled_mtokens=sum(one.pulled_tokens for one in served) / 1e6,
    )


def _with_ways(pod: Pod, way: Way, fleet: str) -> Pod:
    pulls = pod.pulls if way.pulls and way.priced else ""
    return replace(pod, pulls=pulls, serves_alone="always" not in fleet)


def fleet_of(play: Play) -> FleetSpec:
    first, decode = FLEETS[play.traffic][play.fleet]
    roles = [(first, Role.PREFILL), (decode, Role.DECODE)] if decode else [(first, Role.BOTH)]
    model, hardware = ("qwen3-32b", "h100x2") if play.traffic == PUBLISHED else ("llama-3.1-70b", "h100x4")
    pods = [PodsSpec(count=count, hardware=hardware, kv_tokens=461_376, role=role) for count, role in roles]
    return FleetSpec(
        model=model,
        pods=tuple(pods),
        link=LinkSpec(t0_ms=0.4, gb_per_s=play.gb_per_s),
        store=WAYS[play.way].store,
        conditions=CONDITIONS,
        knowledge=Knowledge(store=WAYS[play.way].priced),
    )


# --- traffic ---


def traffic_of(recorded: Recorded, play: Play) -> Traffic:
    if play.traffic == CHAT:
        trace = mooncake_traffic(
            _trace(recorded.data)[: recorded.requests], speedup=play.load, jitter_s=3.0, seed=play.seed
        )
        sessions = list(trace.sessions)
        answered = with_answers([one.requests[0] for one in sessions], trace.block_size_tokens)
        repeated = [replace(one, requests=(request,)) for one, request in zip(sessions, answered, strict=True)]
        return replace(trace, sessions=repeated)
    if play.traffic == PUBLISHED:
        return published_traffic(play.seed)
    traffic = agent_traffic(_sessions(recorded.data), speedup=play.load, seed=play.seed, duration_s=recorded.agents_s)
    size = traffic.block_size_tokens
    sessions = [replace(one, requests=tuple(with_answers([*_fitting(one.requests)], size))) for one in traffic.sessions]
    return Traffic(size, [one for one in sessions if one.requests])


def _fitting(requests: Sequence[TrafficRequest]) -> Iterator[TrafficRequest]:
    return takewhile(lambda one: one.prompt_tokens <= MAX_PROMPT_TOKENS, requests)


def published_traffic(seed: int) -> Traffic:
    """Chats of four users: prompts grow from 12 K to 23 K tokens by answers of 1,000 and questions of 200."""
    random, ids = Random(seed), count(1)
    size, sessions = 64, []
    for user in range(4):
        blocks = array("Q", islice(ids, 24_000 // size))
        requests = []
        for turn in range(10):
            prompt_tokens = 12_000 + turn * 1_200
            end = (prompt_tokens + 1_000 - 1) // size
            whole = prompt_tokens // size
            requests.append(TrafficRequest(prompt_tokens, 1_000, blocks[:end], whole, random.uniform(2, 8)))
        sessions.append(Session(user * 10.0, tuple(requests), "chat"))
    return Traffic(size, sessions)


@cache
def _trace(data: Path) -> list[TraceRequest]:
    return read_mooncake(data / "conversation_trace.jsonl")


@cache
def _sessions(data: Path) -> list[AgentSession]:
    return read_agent_sessions(data / "agent_sessions.jsonl")


# --- the table ---


def plays(seeds: Sequence[int], links: Sequence[float], loads: Mapping[str, float]) -> list[Play]:
    """All settings. The first link has all ways, the others those that depend on it most. Unsplit pods have no answers
    of others to fetch by a rule."""
    return [
        Play(traffic, load, fleet, link, way, seed)
        for traffic, load in loads.items()
        for fleet in FLEETS[traffic]
        for link in links
        for way in WAYS
        for seed in seeds
        if link == links[0] or way in ("none", "p2p", "store")
        if fleet != "8 unsplit" or (WAYS[way].priced and (way != "none" or link == links[0]))
    ]


COLUMNS = (
    *("traffic", "fleet", "GB/s", "KV of other pods", "computed, M tokens", "of all"),
    *("TTFT mean ms", "p50", "p99", "TPOT p99", "split"),
)


def row(of: Play, found: Sequence[Found]) -> str:
    """A line of the table: means over seeds."""
    cells = (
        f"{fmean(one.computed_mtokens for one in found):,.1f}",
        f"{fmean(one.computed_mtokens for one in found) / fmean(one.prompt_mtokens for one in found):.0%}",
        *(
            f"{fmean(getattr(one, name) for one in found):,.0f}"
            for name in ("ttft_mean_ms", "ttft_p50_ms", "ttft_p99_ms")
        ),
        f"{fmean(one.tpot_p99_ms for one in found):.1f}",
        f"{fmean(one.split_share for one in found):.0%}",
    )
    return f"| {of.traffic} | {of.fleet} | {of.gb_per_s:g} | {of.way} | {' | '.join(cells)} |"


def main(
    data: Annotated[Path, typer.Option(help="Folder of the recorded traffic.")] = Path("../shared/data"),
    seeds: Annotated[str, typer.Option(help="Separated by commas.")] = "101,102,103",
    links: Annotated[str, typer.Option(help="GB/s, separated by commas.")] = "12,50",
    traffic: Annotated[
        str, typer.Option(help="chat, agents or published, each with a load: chat=1,agents=2")
    ] = "chat=1,agents=1",
    requests: Annotated[int | None, typer.Option(min=1, help="Of the chat trace.", show_default="all")] = None,
    minutes: Annotated[float, typer.Option(min=1, help="For which sessions of agents start.")] = 120.0,
    jobs: Annotated[int, typer.Option(min=1, help="Number of processes.")] = 1,
    out: Annotated[
        Path | None, typer.Option(help="Write a row of CSV for each run.", show_default="none", callback=writable)
    ] = None,
) -> None:
    """Print a table."""
    loads = {name: float(load or 1) for name, _, load in (one.partition("=") for one in traffic.split(","))}
    settings = plays([int(one) for one in seeds.split(",")], [float(one) for one in links.split(",")], loads)
    found = map_in_processes(partial(run, Recorded(data, requests, minutes * 60)), settings, jobs, "runs")
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    by_row: dict[Play, list[Found]] = {}
    for one, result in zip(settings, found, strict=True):
        by_row.setdefault(replace(one, seed=0), []).append(result)
    for of, results in by_row.items():
        print(row(of, results))
    if out is not None:
        with out.open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow([one.name for one in (*fields(Play), *fields(Found))])
            rows.writerows([*astuple(one), *astuple(result)] for one, result in zip(settings, found, strict=True))


if __name__ == "__main__":
    typer.run(main)
