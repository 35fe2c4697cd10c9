"""What does it gain a router to know what hits on pods whose layers are windows or states? Simulated.

    python -m loadtest.studies.layer_hits --data FOLDER --out hits.csv --seeds 3 --jobs 2

FOLDER contains `conversation_trace.jsonl` (Mooncake, the first 3,000 requests) and `agent_sessions.jsonl` (40 minutes).
`full`: the router assumes full attention. `kept`: it follows the rule of the pods, and what a pod will keep of a prompt
counts from its dispatch on. `true`: only what the pods have announced counts. All times are virtual. Rows are appended
as runs end.

    python -m loadtest.studies.layer_hits --data FOLDER --out draws.csv --seeds 9 --draws 3 --only gemma-3/agents/2

repeats `full` and `kept` with the same requests under other names: which of equally good pods a session begins on is
drawn again. What a seed loses in one draw and not in the mean of several is chance.
"""

from __future__ import annotations

import csv
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

import loadtest.simulator.router_view as views
from loadtest.commands.simulate_setup import shipped_prior
from loadtest.simulated_peers.peer_pickers import policies_with_peers
from loadtest.simulator.agent_sessions import agent_traffic, read_agent_sessions
from loadtest.simulator.compare import Experiment, Setting
from loadtest.simulator.router_view import HashStore
from loadtest.simulator.scenario import FleetSpec
from loadtest.simulator.traffic import Session, Traffic, mooncake_traffic, read_mooncake
from loadtest.studies.simulated_stats import OURS
from router.types import BlockHash, PodId, PromptPrefix

PODS = 8
MODELS = {
    "gpt-oss": ("gpt-oss-120b", "h100x1", 300_000, ["window 128", "full"]),
    "gemma-3": ("qwen3-32b", "h100x2", 1_000_000, ["6 x window 1024", "full"]),
}
"""Step times, tokens of the pool of a pod, and groups. The times of Gemma 3 27B are those of a model of its size."""
LOADS = {
    ("gpt-oss", "conversation"): (2.0, 3.0, 4.0),
    ("gemma-3", "conversation"): (1.0, 1.5, 2.0),
    ("gpt-oss", "agents"): (1.0, 2.5, 3.5),
    ("gemma-3", "agents"): (1.0, 2.0, 3.0),
}
PEERS = ("llm_d", "dynamo", "mooncake_conductor", "lmetric", "sglang_cache_aware")
AWARE = ("llm_d",)
"""Peers that follow the groups of layers; the others assume full attention."""


class Announced(HashStore):
    """A store that counts what the pods have announced, and not what they are about to keep."""

    def _kept_ends(self, pod: PodId, prefix: PromptPrefix, hashes: Sequence[BlockHash]) -> Sequence[BlockHash]:
        return ()


class Run(NamedTuple):
    seed: int
    model: str
    traffic: str
    load: float
    policy: str
    belief: str
    draw: int = 0


FIGURES = ("requests", "cached_share", "ttft_mean_ms", "ttft_p99_ms", "slo_share", "predictions_exact_share")


def runs(seeds: int, draws: int, only: str) -> Iterator[Run]:
    """All of these settings. llm-d's and Dynamo's rules at all loads, the other peers at the middle one."""
    for seed, draw in product(range(seeds), range(draws)):
        for (model, traffic), loads in LOADS.items():
            for at, load in enumerate(loads):
                if only not in ("", f"{model}/{traffic}/{load:g}"):
                    continue
                for belief in ("full", "kept") if draws > 1 else ("full", "true", "kept"):
                    yield Run(seed, model, traffic, load, OURS, belief, draw)
                for peer in () if draws > 1 else PEERS if at == 1 else PEERS[:2]:
                    yield Run(seed, model, traffic, load, peer, "true" if peer in AWARE else "full")


def traffic_at(data: Path, run: Run, load: float, seed: int) -> Traffic:
    if run.traffic == "agents":
        recorded = read_agent_sessions(data / "agent_sessions.jsonl")
        traffic = agent_traffic(recorded, speedup=load, seed=seed, duration_s=2400.0)
    else:
        trace = read_mooncake(data / "conversation_trace.jsonl")[:3000]
        traffic = mooncake_traffic(trace, speedup=load, jitter_s=3.0, seed=seed)
    return replace(traffic, sessions=(renamed(session, run.draw) for session in traffic.sessions))


def renamed(session: Session, draw: int) -> Session:
    """The same session with other names for its blocks; draw 0 leaves them."""
    requests = (
        replace(request, blocks=array("Q", (block ^ draw << 52 for block in request.blocks)))
        for request in session.requests
    )
    return replace(session, requests=tuple(requests)) if draw else session


def simulate(data: Path, run: Run) -> list[object]:
    model, hardware, kv_tokens, groups = MODELS[run.model]
    fleet = FleetSpec.model_validate(
        {
            "model": model,
            "pods": [{"count": PODS, "hardware": hardware, "kv_tokens": kv_tokens}],
            "kv_groups": groups,
            "knowledge": {"kv_groups": run.belief != "full"},
            "conditions": {"overhead_ms": 20.0},
        }
    )
    views.HashStore = Announced if run.belief == "true" else HashStore  # type: ignore[misc]
    experiment = Experiment(fleet, shipped_prior, policies_with_peers(), partial(traffic_at, data, run))
    figures = experiment.run(Setting(run.policy, run.load, PODS, run.seed)).figures
    return [*run, *(getattr(figures, name) for name in FIGURES)]


def main(
    data: Annotated[Path, typer.Option(help="Folder of the recorded traffic.")],
    out: Annotated[Path, typer.Option(help="CSV file; rows are appended.")] = Path("hits.csv"),
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each setting.")] = 3,
    draws: Annotated[int, typer.Option(min=1, max=100, help="Runs of each seed.")] = 1,
    only: Annotated[str, typer.Option(help="The only setting, such as gemma-3/agents/2.")] = "",
    jobs: Annotated[int, typer.Option(min=1, help="Number of processes.")] = 1,
) -> None:
    """Run all settings."""
    with out.open("a", newline="", encoding="utf-8") as file, get_context("fork").Pool(jobs) as pool:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow([*Run._fields, *FIGURES])
        for row in pool.imap(partial(simulate, data), runs(seeds, draws, only)):
            rows.writerow(row)
            file.flush()


if __name__ == "__main__":
    typer.run(main)
