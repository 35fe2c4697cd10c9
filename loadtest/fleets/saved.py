"""Are counterfactuals true: what the page says of other placements, and `warmroute compare` of other policies?

    python -m loadtest.fleets.saved [KIND ...] [--seconds 20] [--runs 1]

For each kind of traffic, really runs the default, round robin and least load in front of mock engines with empty
caches. Next to the real cached share of each is the page's figure (of shadow caches, while the default runs), and
that of `compare` from the receipts of the default; then the real mean TTFT and that of `compare`. With `--runs`, each
baseline really runs so often, and the means are shown: the same 80 requests of agents find 62 to 67 % under least load.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Annotated, Any, NamedTuple

import httpx
import typer
from rich.console import Console

from loadtest.commands.child_processes import (
    FleetPlan,
    RouterUrls,
    clear_caches,
    configured_router,
    mock_fleet,
    router_config,
    temporary_folder,
)
from loadtest.commands.compare import BASELINES
from loadtest.simulator.outcome import cached_share
from loadtest.tables import text_table
from loadtest.traffic.chat_workload import MIX, ChatSession, SessionShape, Shared, mixed_sessions, poisson
from loadtest.traffic.figures import ttfts_ms
from loadtest.traffic.load_driver import DriveResults, drive

POLICIES = {"cost_aware": "chosen", "round_robin": "round_robin", "least_load": "least_load"}
"""With the placement of the metrics."""
FOLLOWED_S = 1.5
"""After it, shadow caches have followed all that has ended."""
_SERIES = re.compile(r'warmroute_placed_(prompt|cached)_tokens_total\{.*placement="(\w+)".*\} (\S+)')
_SHORT: dict[str, Any] = {"answer_tokens": (8, 24), "first_words": (20, 60)}


class Kind(NamedTuple):
    """Sessions, their rate, and the blocks of 16 tokens that each of four pods holds."""

    shapes: Mapping[str, SessionShape]
    per_s: float
    num_blocks: int = 2560


EIGHT = Shared(texts=8, words=(2500, 5000), zipf=0)
KINDS = {
    "mix": Kind(MIX, 3.0),
    "documents": Kind({"eight": SessionShape(share=1, shared=EIGHT, **_SHORT)}, 4.0),
    "agents": Kind({"agent": MIX["agent"]}, 0.8),
    "hot": Kind({"hot": SessionShape(share=1, shared=Shared(texts=1, words=(2000, 2000)), **_SHORT)}, 6.0),
    "nothing": Kind({"own": SessionShape(share=1, first_words=(300, 2000), answer_tokens=(8, 24))}, 4.0),
}


async def measured(
    kind: Kind, seconds: float, runs: int, folder: Path
) -> tuple[dict[str, list[DriveResults]], dict[str, float], Path]:
    """The drives of each policy; cached shares by placement, from the default's metrics; and its receipts."""
    plan, receipts, placed = FleetPlan(pods=4, num_blocks=kind.num_blocks), folder / "receipts.jsonl", {}
    random = Random(1)
    mix: Sequence[ChatSession] = mixed_sessions(random, kind.shapes, poisson(random, seconds, kind.per_s))
    driven: defaultdict[str, list[DriveResults]] = defaultdict(list)
    async with mock_fleet(plan, folder) as pods:
        for policy in (*POLICIES, *BASELINES * (runs - 1)):
            await clear_caches(pods)
            config = router_config(pods, plan) | {"policy": policy}
            if policy == "cost_aware":
                config["receipts"] = str(receipts)
            async with configured_router(f"router-{policy}", config, folder) as router:
                driven[policy].append(await drive(router.public, plan.model, mix, lambda _: None))
                if policy == "cost_aware":
                    await asyncio.sleep(FOLLOWED_S)
                    placed = await placed_shares(router)
    return driven, placed, receipts


async def placed_shares(router: RouterUrls) -> dict[str, float]:
    async with httpx.AsyncClient(trust_env=False) as client:
        text = (await client.get(f"{router.admin}/metrics")).text
    found: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for what, placement, value in _SERIES.findall(text):
        found[placement][what] = float(value)
    print(*re.findall(r"^warmroute_placed_error_ratio.*$", text, re.MULTILINE))
    return {placement: one["cached"] / max(one["prompt"], 1) for placement, one in found.items()}


def compared(receipts: Path) -> dict[str, dict[str, float]]:
    command = [sys.executable, "-m", "router.cli", "compare", str(receipts), "--json", "--jobs", "1"]
    ended = subprocess.run(command, check=True, capture_output=True, text=True)
    return {row["policy"]: row for row in json.loads(ended.stdout)}


def main(
    kinds: Annotated[list[str] | None, typer.Argument(help=f"Of {', '.join(KINDS)}.", show_default="all")] = None,
    seconds: Annotated[float, typer.Option(min=5, help="Seconds in which sessions start.")] = 20.0,
    runs: Annotated[int, typer.Option(min=1, help="Real runs of each baseline.")] = 1,
) -> None:
    rows = []
    for name in kinds or KINDS:
        with temporary_folder("warmroute-saved-") as folder:
            driven, placed, receipts = asyncio.run(measured(KINDS[name], seconds, runs, folder))
            says = compared(receipts)
        for policy, drives in driven.items():
            good = [one for results in drives for one in results.served if not one.error]
            shares = (cached_share(good), placed.get(POLICIES[policy], 0.0), says[policy]["cached_share"])
            real_ms, said_ms = fmean(ttfts_ms(good)), says[policy]["ttft_mean_ms"]
            times = f"{real_ms:.1f}", f"{said_ms:.1f}", f"{said_ms / real_ms - 1:+.0%}"
            rows.append((f"{name}, {policy}", str(len(good)), *(f"{share:.1%}" for share in shares), *times))
            print(*rows[-1], flush=True)
    columns = ("traffic, policy", "sent", "real", "page", "compare", "real ms", "compare ms", "off by")
    Console().print(text_table(columns, rows, title="Cached share, and mean time to first token"))


if __name__ == "__main__":
    typer.run(main)
