"""Measures the CPU per request of this checkout against an older commit, both in one run.

    python -m loadtest.bench.cpu_ratio COMMIT                                  # `make cpu BASE=COMMIT`
    python -m loadtest.bench.cpu_ratio COMMIT --rounds 7 --loads "2K warm;chunk" --peers nginx,sglang-router

One driver, generator, mocks and configuration serve both sides (`hotpath.py`). Both routers run at once and take turns
in short bursts. A round has new ones, because processes of one program differ by some percent, and the side that starts
first changes with the round. For each load: the ratio of the medians, and its 95 % interval, by drawing rounds with
replacement. Exit code 1 if the lower end of an interval is above the limit, or a load failed. A load that the older
router has no settings for is measured on one side, and says so.

The older commit is unpacked in ~/.cache/warmroute/cpu-ratio. It runs in the environment of this checkout if both need
the same packages, else in its own, which takes a minute or two, once.
"""

from __future__ import annotations

import io
import os
import random
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, NamedTuple

import typer

from loadtest.bench.checkout import HERE, Checkout
from loadtest.bench.duties import lacking
from loadtest.bench.hotpath import ALL_LOADS, LOADS, LONGEST_S, Cost, bench_of, measure_in_turns
from loadtest.bench.rig import BENCH, OURS, BenchFolder
from loadtest.peers.catalog import PEERS

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "warmroute" / "cpu-ratio"
DRAWS = 4000
SHARE = 0.95
EXTRA = "demo"
"""What the router needs here beyond itself: the tokenizer of the mocks."""


class NotComparable(Exception):
    """This machine or this clone cannot run the comparison."""


class Pair(NamedTuple):
    """CPU microseconds of both sides in one round."""

    before: float
    now: float


@dataclass(frozen=True, slots=True)
class Ratio:
    """What one load costs now, relative to before, and the interval of that."""

    before_us: float
    now_us: float
    low: float
    high: float


def ratio_of(pairs: Sequence[Pair]) -> Ratio:
    """The ratio of the medians, and its percentile bootstrap over rounds. The two sides of a round are drawn together,
    so that a round in which the machine was slow does not widen the interval."""
    draw = random.Random(0)
    drawn = sorted(_ratio(draw.choices(pairs, k=len(pairs))) for _ in range(DRAWS))
    left_out = int(DRAWS * (1 - SHARE) / 2)
    before_us, now_us = _medians(pairs)
    return Ratio(before_us, now_us, drawn[left_out], drawn[-1 - left_out])


def _medians(pairs: Sequence[Pair]) -> tuple[float, float]:
    return median(pair.before for pair in pairs), median(pair.now for pair in pairs)


def _ratio(pairs: Sequence[Pair]) -> float:
    before_us, now_us = _medians(pairs)
    return now_us / before_us


@dataclass(slots=True)
class LoadFigures:
    """What was measured of one load, round by round, in CPU microseconds. A round that failed on one side is left out
    on both. `lacking`: settings that the older router does not have; only the other side is measured then."""

    lacking: Sequence[str] = ()
    pairs: list[Pair] = field(default_factory=list)
    only_now: list[float] = field(default_factory=list)
    peers: dict[str, list[float]] = field(default_factory=dict)

    @property
    def of_now(self) -> Sequence[float]:
        return self.only_now or [pair.now for pair in self.pairs]

    def is_bad(self, limit: float) -> bool:
        """Whether even the lower end of the ratio is above the limit, or nothing was measured."""
        if self.lacking:
            return not self.only_now
        return not self.pairs or ratio_of(self.pairs).low > limit

    def line(self, limit: float) -> str:
        """A line of the table, without the name of the load."""
        cells = "".join(f"{median(found):>16.1f}" if found else f"{'failed':>16}" for found in self.peers.values())
        if self.lacking and self.only_now:
            return f"{'-':>10} {median(self.only_now):10.1f}   before has no {', '.join(self.lacking)}{cells}"
        if not self.pairs:
            return f"failed{cells}"
        ratio = ratio_of(self.pairs)
        figures = f"{ratio.before_us:10.1f} {ratio.now_us:10.1f} {ratio.now_us / ratio.before_us:7.2f}"
        interval = f"{ratio.low:.2f} to {ratio.high:.2f}"
        return f"{figures}   {interval:16}{cells}{'  <-- slower' * self.is_bad(limit)}"


def table(figures: Mapping[str, LoadFigures], peers: Sequence[str], limit: float) -> str:
    """One line per load."""
    head = f"{'load':24} {'before us':>10} {'now us':>10} {'ratio':>7}   {'95 % interval':16}"
    lines = [f"{load:24} {found.line(limit)}" for load, found in figures.items()]
    return "\n".join(["".join([head, *(f"{peer:>16}" for peer in peers)]), *lines])


def compared_with_plain(figures: Mapping[str, LoadFigures]) -> Sequence[str]:
    """A line for each variant of a measured load, such as `chunk, continued` of `chunk`: its ratio on this side."""
    lines = []
    for load, found in figures.items():
        plain = figures.get(load.partition(",")[0])
        if plain is None or plain is found or not (pairs := [*map(Pair, plain.of_now, found.of_now)]):
            continue
        ratio = ratio_of(pairs)
        added_us, interval = ratio.now_us - ratio.before_us, f"{ratio.low:.2f} to {ratio.high:.2f}"
        lines.append(
            f"{load}, now: {ratio.now_us / ratio.before_us:.2f} of the plain load ({interval}), {added_us:+.1f} us"
        )
    return lines


# --- the older commit ---


def unpack(commit: str, here: Path = HERE.root, cache: Path = CACHE) -> Path:
    """The files of a commit, in a folder of the cache. Raises `NotComparable` if the clone does not have it."""
    if shutil.which("git") is None:
        raise NotComparable("git is not installed")
    named = ["git", "-C", str(here), "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"]
    found = subprocess.run(named, capture_output=True, text=True, check=False)
    if found.returncode:
        raise NotComparable(f"commit {commit} is not in this clone: its history is shallow or absent; git fetch it")
    folder = cache / found.stdout.strip()
    if not folder.exists():
        archive = ["git", "-C", str(here), "archive", "--format=tar", found.stdout.strip()]
        packed = subprocess.run(archive, capture_output=True, check=True).stdout
        partial = folder.with_suffix(f".{os.getpid()}")
        with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
            tar.extractall(partial, filter="data")
        partial.rename(folder)
    return folder


def requirements(root: Path) -> tuple[Sequence[str], Sequence[str], Sequence[str]]:
    """What a router's environment follows from: dependencies, those of the mocks' tokenizer, and pinned versions."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    pins = (root / "constraints.txt").read_text().split("\n")
    return sorted(project["dependencies"]), sorted(project["optional-dependencies"].get(EXTRA, ())), sorted(pins)


def python_for(base: Path, here: Path = HERE.root) -> Path:
    """The Python that runs the older router: ours if both need the same packages, else one of its own environment.
    Raises `NotComparable` if that cannot be built."""
    if requirements(base) == requirements(here):
        return Path(sys.executable)
    environment = base / ".venv"
    if not (environment / ".ready").exists():
        print(f"{base.name[:8]} needs other packages: building its environment ...", file=sys.stderr)
        install = [str(environment / "bin" / "pip"), "install", "-q", "-c", "constraints.txt", "-e", f".[{EXTRA}]"]
        try:
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(environment)], check=True)
            subprocess.run(install, cwd=base, check=True)
        except subprocess.CalledProcessError as error:
            raise NotComparable(f"the environment of {base.name[:8]} cannot be built: {error}") from error
        (environment / ".ready").touch()
    return environment / "bin" / "python"


def older(commit: str) -> Checkout:
    """The checkout of an older commit. Raises `NotComparable`."""
    if shutil.which("cc") is None:
        raise NotComparable("there is no C compiler (cc) for the load generator and the mocks")
    base = unpack(commit)
    return Checkout.at(base, python_for(base))


# --- the comparison ---


def main(
    base: Annotated[str, typer.Argument(help="The older commit.")],
    rounds: Annotated[int, typer.Option(min=1)] = 7,
    loads: Annotated[str, typer.Option(help=f"Of {'; '.join(LOADS)}; separated by semicolons.")] = ";".join(LOADS),
    limit: Annotated[float, typer.Option(help="Largest ratio; that of the interval's lower end.")] = 1.0,
    peers: Annotated[str, typer.Option(help=f"Measured in the same rounds, of {', '.join(PEERS)}.")] = "",
    seconds: Annotated[float, typer.Option(min=1, help="Longest time of one load.")] = LONGEST_S,
    bench: BenchFolder = BENCH,
    if_possible: Annotated[
        bool, typer.Option("--if-possible", help="Exit code 0 without the commit, its packages or a C compiler.")
    ] = False,
) -> None:
    """Compare CPU per request with an older commit. Exit code 1 if a load is slower."""
    try:
        before = older(base)
    except NotComparable as error:
        print(f"cpu: not compared with {base}: {error}", file=sys.stderr)
        raise SystemExit(0 if if_possible else 2) from None
    titles, others = loads.split(";"), [name for name in peers.split(",") if name]
    figures = {
        title: LoadFigures(lacking(before, ALL_LOADS[title].duties), peers={name: [] for name in others})
        for title in titles
    }
    with bench_of(titles, bench) as (rig, pods):
        run = partial(measure_in_turns, rig=rig, pods=pods, longest_s=seconds)
        for number in range(rounds):
            for title, of_load in figures.items():
                play_round(title, of_load, before, run, now_first=number % 2 == 1)
    print("\n".join([table(figures, others, limit), *compared_with_plain(figures)]))
    raise SystemExit(any(found.is_bad(limit) for found in figures.values()))


def play_round(
    title: str, figures: LoadFigures, before: Checkout, run: Callable[..., Sequence[Cost]], *, now_first: bool
) -> None:
    """Measure one load once on both sides, and through the peers."""
    sides = [HERE] if figures.lacking else [HERE, before] if now_first else [before, HERE]
    print(f"{', '.join('now' if side is HERE else 'before' for side in sides)}: ", end="", file=sys.stderr)
    costs = [cost.cpu_us for cost in run(OURS, title, checkouts=sides)]
    if len(costs) == 2:
        figures.pairs.append(Pair(*costs[:: -1 if now_first else 1]))
    else:
        figures.only_now += costs
    for name, of_peer in figures.peers.items():
        of_peer += [cost.cpu_us for cost in run(name, title, checkouts=[HERE])]


if __name__ == "__main__":
    typer.run(main)
