"""How near is the learnt value of evicted blocks to what an unlimited ghost list and other cache sizes show?

    python -m loadtest.studies.learnt_reuse --data FOLDER [--seeds 2] [--only "rag, 300 s"]

`cost_aware` learns how many requests would have used an evicted block (`router/index/evicted.py`): h' / (1 - h), where
h is the hit share and h' its derivative by the logarithm of capacity. It is shown with, for the same runs:

* the same ratio by a ghost list that keeps every evicted block and counts every prompt, for caches larger by a quarter
  (what the router's list is meant to find) and by a tenth;
* the slope of the hit share between two runs, with caches a tenth smaller and larger. These runs also route otherwise,
  so the figure contains chance: a slope of less than 0.02 is not above it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer

from loadtest.commands.simulate import map_in_processes
from loadtest.commands.simulate_setup import shipped_prior
from loadtest.simulated_peers.peer_pickers import policies_with_peers
from loadtest.simulator.outcome import cached_share
from loadtest.simulator.world import World
from loadtest.studies.policy_cases import AGENTS, CONVERSATION, OURS, Case, experiment_of
from router.index.evicted import BEFORE_S, EvictedBlocks
from router.types import BlockChange, BlockHash, BlocksByTier, PodId

CASES = (
    Case("conversation", CONVERSATION, (2, 4.4)),
    Case("agent_sessions", AGENTS, (0.5, 1), pods=8),
    Case("rag, 300 s", "rag.yaml", (0.7, 1.5), 6, duration_s=300.0),
    Case("mixed, 300 s", "mixed.yaml", (1, 1.4), 4, duration_s=300.0),
    Case("agents, 300 s", "agents.yaml", (0.7,), 6, duration_s=300.0),
)
LARGER = (0.1, 0.25)
"""Shares by which caches would be larger."""
SIZES = (0.9, 1.0, 1.1)
WARM_UP_SHARE = 0.25
"""The share of the run that is not counted."""


class UnlimitedGhosts(EvictedBlocks):
    """Learns as the router does, and keeps every evicted block with its turn."""

    def __init__(self) -> None:
        super().__init__()
        self.learnt: list[float] = []
        self.missed: list[int] = []
        """The blocks of each request that no pod holds."""
        self.depths: list[list[float]] = []
        """How much larger the caches should have been, as a share, for each block that was evicted once."""
        self._turns: dict[BlockHash, int] = {}
        self._evictions = 0
        self._held_by: dict[PodId, int] = {}

    def evicted(self, pod: PodId, change: BlockChange, held: int) -> None:
        super().evicted(pod, change, held)
        self._held_by[pod] = held
        for block in change.blocks:
            self._turns[block] = self._evictions
            self._evictions += 1

    def requested(
        self,
        hashes: Sequence[BlockHash],
        held: Mapping[PodId, BlocksByTier],
        now_s: float = BEFORE_S,
        block_tokens: int = 1,
    ) -> None:
        super().requested(hashes, held, now_s, block_tokens)
        missed = hashes[max(map(sum, held.values()), default=0) :]
        turns = (self._turns.get(block) for block in missed)
        capacity = max(sum(self._held_by.values()), 1)
        self.learnt.append(self.reuse)
        self.missed.append(len(missed))
        self.depths.append([(self._evictions - turn) / capacity for turn in turns if turn is not None])

    def reuse_if(self, larger: float) -> float:
        """h' / (1 - h), by caches larger by this share."""
        start = int(len(self.missed) * WARM_UP_SHARE)
        found = sum(depth <= larger for depths in self.depths[start:] for depth in depths)
        return found / larger / max(sum(self.missed[start:]), 1)


@dataclass(frozen=True, slots=True)
class Found:
    """What one run shows. `size` multiplies the pods' caches."""

    size: float
    hit_share: float
    learnt: float
    ghosts: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Play:
    """One run of a case."""

    case: Case
    data: Path

    def __call__(self, setting: tuple[float, float, int]) -> Found:
        load_factor, size, seed = setting
        setup = experiment_of(self.case, self.data, policies_with_peers())
        spec, traffic = setup.fleet.with_pods(self.case.pods), setup.traffic(load_factor, seed)
        groups = tuple(
            group.model_copy(update={"kv_tokens": int(group.kv_tokens * size) // 512 * 512}) for group in spec.pods
        )
        spec = spec.model_copy(update={"pods": groups})
        conditions = replace(spec.conditions, regret_every=0)
        world = World(
            spec.build(shipped_prior),
            setup.policies[OURS],
            conditions,
            block_size_tokens=traffic.block_size_tokens,
            seed=seed,
        )
        ghosts = UnlimitedGhosts()
        world.views[0].store.evicted[spec.model] = ghosts
        run = world.run(traffic)
        start = int(len(run.outcomes) * WARM_UP_SHARE)
        hits = cached_share(one for one in run.outcomes[start:] if not one.refused)
        learnt = fmean(ghosts.learnt[int(len(ghosts.learnt) * WARM_UP_SHARE) :])
        return Found(size, hits, learnt, tuple(map(ghosts.reuse_if, LARGER)))


def row(name: str, found: Sequence[Found]) -> str:
    """A line of the table: means over seeds."""
    own = [one for one in found if one.size == 1.0]
    shares = [fmean(one.hit_share for one in found if one.size == size) for size in SIZES]
    slope = (shares[-1] - shares[0]) / math.log(SIZES[-1] / SIZES[0])
    ghosts = [fmean(one.ghosts[at] for one in own) for at in range(len(LARGER))]
    cells = [fmean(one.learnt for one in own), ghosts[1], ghosts[0], slope / (1 - shares[1])]
    return f"| {name} | {shares[1]:.1%} | {' | '.join(f'{one:.2f}' for one in cells)} | {slope:.3f} |"


def main(
    data: Annotated[Path, typer.Option(help="Folder of the recorded traffic.")] = Path("../shared/data"),
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each size.")] = 2,
    only: Annotated[str, typer.Option(help="Only the case with this name.")] = "",
    jobs: Annotated[int, typer.Option(min=1, help="Number of processes.")] = 1,
) -> None:
    """Print a table."""
    print("| traffic | hit share | learnt | ghosts + 25 % | ghosts + 10 % | by two sizes | h' by two sizes |")
    print("|---|---|---|---|---|---|---|")
    for case in CASES:
        for load_factor in case.loads if only in ("", case.name) else ():
            settings = [(load_factor, size, seed) for size in SIZES for seed in range(seeds)]
            found = map_in_processes(Play(case, data), settings, jobs, "runs")
            print(row(f"{case.name}, {case.pods} pods, load {load_factor:g}", found), flush=True)


if __name__ == "__main__":
    typer.run(main)
