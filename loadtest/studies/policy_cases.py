"""Compares policies on the cases by which the default is judged: a CSV row per run, and one Markdown table.

    python -m loadtest.studies.policy_cases conversation faults --data FOLDER --out cases.csv
    python -m loadtest.studies.policy_cases --read cases.csv                       # the table of rows on disk
    python -m loadtest.studies.policy_cases faults --data FOLDER --policies cost_aware,cost_aware_before --loads 4.4

FOLDER contains `conversation_trace.jsonl` (Mooncake) and `agent_sessions.jsonl`. A fault of the router (wrong
coefficients, replicas, a restart, lost KV events) is a change of the fleet file, as with `warmroute simulate --set`.
All times are virtual, so the machine does not matter. Rows are appended when their case is complete; a case that has
all of its rows is not run again.
"""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from loadtest.commands.simulate import run_all
from loadtest.commands.simulate_setup import DEFAULT_FLEET, Source, shipped_prior
from loadtest.simulated_peers.peer_pickers import library_with_peers, policies_with_peers
from loadtest.simulator.compare import Experiment, Measure, Result, Setting, grid
from loadtest.simulator.generate import TrafficMix
from loadtest.simulator.outcome import RunFigures
from loadtest.simulator.scenario import FleetSpec
from loadtest.simulator.traffic import Traffic
from loadtest.studies.simulated_stats import MEASURES, best_policies, is_tied, spread_of
from router.config.load import load, shipped
from router.errors import ConfigError
from router.policy.spec import Policy

OURS = "cost_aware"
BEFORE = "cost_aware_before"
PEERS = ("mooncake_conductor", "lmetric", "llm_d", "llm_d_weighted", "dynamo", "sglang_cache_aware")
CONVERSATION, AGENTS = "conversation_trace.jsonl", "agent_sessions.jsonl"
JITTER_S = 3.0
CONSTANTS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Values of `eviction.reuse` in place of the learnt one."""
CONSTANT = "extends: {base}\nname: {name}\nabout: A constant.\ncosts: {{eviction: {{reuse: {value}, learnt: 0.0}}}}\n"


@dataclass(frozen=True, slots=True)
class Case:
    """Traffic on a fleet. `changes` are those of `--set`; a mix is generated for `duration_s`."""

    name: str
    traffic: str
    loads: tuple[float, ...]
    pods: int = 16
    fleet: Path = DEFAULT_FLEET
    changes: tuple[str, ...] = ()
    policies: tuple[str, ...] = (OURS, BEFORE, *PEERS)
    duration_s: float | None = None


@dataclass(frozen=True, slots=True)
class MixSource:
    """A shipped traffic mix for another duration."""

    path: Path
    duration_s: float

    def __call__(self, speedup: float, seed: int) -> Traffic:
        return load(self.path, TrafficMix, (f"duration_s={self.duration_s}",)).traffic(speedup=speedup, seed=seed)


def _constants(base: str) -> tuple[str, ...]:
    return tuple(_constant_name(base, value) for value in CONSTANTS)


def _constant_name(base: str, value: float) -> str:
    return f"{base}_reuse_{value:g}".replace(".", "_")


def _mix(name: str, pods: int, *loads: float, duration_s: float = 300.0) -> Case:
    return Case(f"{name}, {duration_s:g} s", f"{name}.yaml", loads, pods, duration_s=duration_s)


def _fault(name: str, *changes: str) -> Case:
    return Case(f"conversation, {name}", CONVERSATION, (4.4,), changes=changes, policies=(OURS, BEFORE))


NO_LINK = ("link=null",)
SPLITTING = (OURS, BEFORE, "cost_aware_pd")
"""Policies that use prefill pods; no peer does."""
_POD = "hardware: h100x4, gpus: 4, kv_tokens: 461376"
APART = f"pods=[{{count: 6, {_POD}, role: prefill}}, {{count: 10, {_POD}, role: decode}}]"
GROUPS: Mapping[str, tuple[Case, ...]] = {
    "conversation": (
        Case("conversation", CONVERSATION, (1, 2, 4, 4.4, 4.7, 5)),
        Case("conversation", CONVERSATION, (1, 2), pods=8),
        Case("conversation", CONVERSATION, (4, 8.8), pods=32),
    ),
    "no-link": (Case("conversation, no link", CONVERSATION, (2, 4.4, 4.7), changes=NO_LINK),),
    "unequal": (
        Case("conversation, half of the pods twice as slow", CONVERSATION, (2.5,), fleet=Path("half-slow")),
        Case("conversation, 8 h100x4 and 8 a100x8", CONVERSATION, (2.5,), fleet=Path("h100-a100")),
    ),
    "mixes": (
        _mix("rag", 6, 0.7, 1.5),
        _mix("mixed", 4, 1, 1.4),
        _mix("mixed", 4, 1, 1.4, duration_s=200.0),
        _mix("agents", 6, 0.7),
        _mix("bursts", 16, 1),
        _mix("system_prompts", 16, 1),
    ),
    "specialists": (
        replace(_mix("batch", 16, 1, 5, duration_s=240.0), policies=(OURS, BEFORE, "batch", *PEERS)),
        _mix("long_context", 16, 1, 1.5),
    ),
    "prefill-decode": (
        Case("conversation, 6 prefill and 10 decode pods", CONVERSATION, (1, 2), changes=(APART,), policies=SPLITTING),
        Case(
            "rag, 300 s, 2 prefill and 4 decode pods",
            "rag.yaml",
            (0.5, 1),
            6,
            changes=(APART,),
            policies=SPLITTING,
            duration_s=300.0,
        ),
    ),
    "faults": (
        _fault("no fault"),
        _fault("compute believed 0.7", "believed.compute=0.7"),
        _fault("compute believed 1.3", "believed.compute=1.3"),
        _fault("bandwidth believed 0.5", "believed.bandwidth=0.5"),
        _fault("bandwidth believed 2", "believed.bandwidth=2"),
        _fault("four routers, exchange 50 ms", "conditions.routers=4", "conditions.exchange_ms=50"),
        _fault("no link, four routers, exchange 50 ms", *NO_LINK, "conditions.routers=4", "conditions.exchange_ms=50"),
        _fault("router restarted at 300 s", "conditions.restarts=[[0, 300, 5]]"),
        _fault("20 % of KV events lost", "conditions.event_loss=0.2"),
    ),
    "agents": (Case("agent_sessions", AGENTS, (0.5, 1, 1.5, 2), pods=8),),
    "constants": (Case("agent_sessions", AGENTS, (0.5, 1, 1.5, 2), pods=8, policies=(OURS, *_constants(OURS))),),
}


# --- running ---


def policies_of(folder: Path) -> dict[str, Policy]:
    """The shipped policies, the peers, those of the folder `policies`, and the constants, written into `folder`."""
    for value in CONSTANTS:
        name = _constant_name(OURS, value)
        (folder / f"{name}.yaml").write_text(CONSTANT.format(base=OURS, name=name, value=value))
    return policies_with_peers() | _own(Path(__file__).parent / "policies") | _own(folder)


def _own(folder: Path) -> dict[str, Policy]:
    library = library_with_peers(folder)
    return {name: library.policy(name) for name in library.own}


def experiment_of(case: Case, data: Path, policies: Mapping[str, Policy]) -> Experiment:
    """Raises `ConfigError`."""
    fleet = case.fleet if case.fleet.suffix else shipped("config") / "fleets" / f"{case.fleet}.yaml"
    spec = load(fleet, FleetSpec, case.changes)
    if case.duration_s is not None:
        return Experiment(
            spec, shipped_prior, policies, MixSource(shipped("config") / "traffic" / case.traffic, case.duration_s)
        )
    jitter_s = JITTER_S if case.traffic == CONVERSATION else 0.0
    return Experiment(spec, shipped_prior, policies, Source(data / case.traffic, jitter_s=jitter_s))


def missing(case: Case, seeds: int, rows: Iterable[Mapping[str, str]]) -> list[Setting]:
    """The settings of the case without a row."""
    known = {_key(row) for row in rows}
    settings = grid(case.policies, case.loads, [case.pods], seeds)
    return [one for one in settings if (case.name, one.policy, one.load, one.pods, one.seed) not in known]


def _key(row: Mapping[str, str]) -> tuple[str, str, float, int, int]:
    return row["case"], row["policy"], float(row["load"]), int(row["pods"]), int(row["seed"])


SETTING = ("policy", "load", "pods", "seed")
FIGURES = [
    "requests",
    "refused",
    "cached_share",
    "ttft_mean_ms",
    "ttft_p50_ms",
    "ttft_p99_ms",
    "tpot_p50_ms",
    "tpot_p99_ms",
    "slo_share",
    "peak_over_mean",
    "preemptions",
    "busy_share",
]
"""Figures of a row."""


def rows_of(case: str, results: Sequence[Result]) -> list[dict[str, str]]:
    """A row per run."""
    return [
        {"case": case}
        | {name: str(getattr(one.setting, name)) for name in SETTING}
        | {name: _short(getattr(one.figures, name)) for name in FIGURES}
        for one in results
    ]


def append(path: Path, rows: Sequence[Mapping[str, str]]) -> None:
    """Add rows, after a header if the file is new."""
    is_new = not path.exists() or not path.stat().st_size
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["case", *SETTING, *FIGURES], lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows(rows)


def _short(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def read_rows(path: Path) -> list[dict[str, str]]:
    """All rows; none without the file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# --- the table ---

Runs = Mapping[str, list[Result]]
"""By policy."""


def results_of(rows: Iterable[Mapping[str, str]]) -> dict[tuple[str, float, int], dict[str, list[Result]]]:
    """The runs by case, load and pods, then by policy, in the order of the rows."""
    groups: dict[tuple[str, float, int], dict[str, list[Result]]] = {}
    for row in rows:
        case, policy, load_factor, pods, seed = _key(row)
        known = {one.name: float(row[one.name]) if row.get(one.name) else math.nan for one in fields(RunFigures)}
        values: dict[str, Any] = known | {"cached_share_by_kind": {}}
        result = Result(Setting(policy, load_factor, pods, seed), RunFigures(**values), (), (), (), 0.0)
        groups.setdefault((case, load_factor, pods), {}).setdefault(policy, []).append(result)
    return groups


def place(policy: str, by_policy: Runs, measure: Measure) -> int:
    """One more than the number of policies that are better beyond chance, by the test of `is_tied`. 0 for one seed,
    which shows nothing about chance."""
    if len(by_policy[policy]) < 2:
        return 0
    runs, own = by_policy[policy], spread_of(by_policy[policy], measure).mean
    others = (other for name, other in by_policy.items() if name != policy)
    return 1 + sum(spread_of(other, measure).mean < own and not is_tied(runs, other, measure) for other in others)


def table(rows: Iterable[Mapping[str, str]]) -> Iterator[str]:
    """Lines of Markdown: for each case, the policies by mean time to first token."""
    for (case, load_factor, pods), by_policy in results_of(rows).items():
        yield from ("", f"### {case}, {pods} pods, load {load_factor:g}", "")
        yield "| policy | place | mean ms | ± | behind | p99 ms | SLO | TPOT p99 | cached | runs |"
        yield "|---|---|---|---|---|---|---|---|---|---|"
        best = min(_mean(runs, "ttft_mean_ms") for runs in by_policy.values())
        for policy, runs in sorted(by_policy.items(), key=lambda one: _mean(one[1], "ttft_mean_ms")):
            spread = spread_of(runs, MEASURES["TTFT mean"])
            margin = f"{spread.margin:,.0f}" if math.isfinite(spread.margin) else ""
            yield (
                f"| {policy} | {place(policy, by_policy, MEASURES['TTFT mean']) or ''} | {spread.mean:,.0f} | {margin} "
                f"| {spread.mean / best - 1:.1%} | {_mean(runs, 'ttft_p99_ms'):,.0f} | {_mean(runs, 'slo_share'):.1%} "
                f"| {_mean(runs, 'tpot_p99_ms'):,.0f} | {_mean(runs, 'cached_share'):.1%} | {len(runs)} |"
            )


def overview(rows: Iterable[Mapping[str, str]]) -> Iterator[str]:
    """Lines of Markdown, one a case: `OURS`, its place, the former default, and the best peer by each measure."""
    yield "| case | pods | load | ours ms | ± | place | before ms | best peer ms | p99 ms | best p99 | SLO | best SLO |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|---|"
    for (case, load_factor, pods), by_policy in results_of(rows).items():
        peers = {name: runs for name, runs in by_policy.items() if name not in (OURS, BEFORE)}
        if OURS not in by_policy:
            continue
        cells = [case, str(pods), f"{load_factor:g}"]
        mean = spread_of(by_policy[OURS], MEASURES["TTFT mean"])
        cells += [f"{mean.mean:,.0f}", f"{mean.margin:,.0f}" if math.isfinite(mean.margin) else ""]
        cells.append(str(place(OURS, by_policy, MEASURES["TTFT mean"]) or ""))
        cells.append(f"{_mean(by_policy[BEFORE], 'ttft_mean_ms'):,.0f}" if BEFORE in by_policy else "")
        for name, figure in (("TTFT mean", "ttft_mean_ms"), ("TTFT p99", "ttft_p99_ms")):
            best = next(iter(best_policies(peers, MEASURES[name])), "") if peers else ""
            own = [f"{_mean(by_policy[OURS], figure):,.0f}"] if name == "TTFT p99" else []
            cells += [*own, f"{best} {_mean(peers[best], figure):,.0f}" if best else ""]
        best = next(iter(best_policies(peers, MEASURES["share of SLO misses"])), "") if peers else ""
        cells.append(f"{_mean(by_policy[OURS], 'slo_share'):.1%}")
        cells.append(f"{best} {_mean(peers[best], 'slo_share'):.1%}" if best else "")
        yield f"| {' | '.join(cells)} |"


def losses(rows: Iterable[Mapping[str, str]], policy: str = OURS) -> Iterator[str]:
    """Lines of Markdown: every case and measure in which another policy is better beyond chance."""
    for (case, load_factor, pods), by_policy in results_of(rows).items():
        if policy not in by_policy:
            continue
        for name, measure in MEASURES.items():
            if place(policy, by_policy, measure) <= 1:
                continue
            best, found = next(iter(best_policies(by_policy, measure).items()))
            own = spread_of(by_policy[policy], measure).mean
            shown = (
                f"{1 - own:.1%} within the SLO, {best} {1 - found.mean:.1%}"
                if name.startswith("share")
                else f"{name} {own:,.0f} ms, {best} {found.mean:,.0f} ms ({own / found.mean - 1:+.1%})"
            )
            yield f"- {case}, {pods} pods, load {load_factor:g}: {shown}"


def _mean(runs: Sequence[Result], figure: str) -> float:
    return fmean(getattr(one.figures, figure) for one in runs)


def main(
    groups: Annotated[list[str] | None, typer.Argument(help=f"Of {', '.join(GROUPS)}.")] = None,
    data: Annotated[Path, typer.Option(help="Folder of the recorded traffic.")] = Path("../shared/data"),
    out: Annotated[Path | None, typer.Option(help="CSV file; rows are appended.")] = None,
    read: Annotated[Path | None, typer.Option(help="Print the table of this CSV file, without runs.")] = None,
    policies: Annotated[str, typer.Option(help="Policies instead of those of the cases.")] = "",
    loads: Annotated[str, typer.Option(help="Only these loads.")] = "",
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each setting.")] = 3,
    jobs: Annotated[int, typer.Option(min=1, help="Number of processes.")] = 1,
    short: Annotated[bool, typer.Option("--short", help="One line for each case.")] = False,
) -> None:
    """Run the cases of groups, and print the table and the losses of `cost_aware`."""
    path = read or out
    rows = read_rows(path) if path else []
    try:
        with TemporaryDirectory() as folder:
            known = policies_of(Path(folder))
            for case in (one for group in groups or () for one in GROUPS[group]):
                chosen = _narrowed(case, policies, loads)
                if settings := missing(chosen, seeds, rows):
                    print(f"{chosen.name}: {len(settings)} runs", file=sys.stderr)
                    results = run_all(experiment_of(chosen, data, known), settings, jobs)
                    new = rows_of(chosen.name, results)
                    rows += new
                    if out is not None:
                        append(out, new)
    except (ConfigError, KeyError) as error:
        raise SystemExit(f"policy_cases: {error}") from error
    print("\n".join(overview(rows) if short else table(rows)))
    print("\nBetter than cost_aware:\n", *losses(rows), sep="\n")


def _narrowed(case: Case, policies: str, loads: str) -> Case:
    chosen = tuple(policies.split(",")) if policies else case.policies
    wanted = {float(one) for one in loads.split(",")} if loads else set(case.loads)
    return replace(case, policies=chosen, loads=tuple(one for one in case.loads if one in wanted))


if __name__ == "__main__":
    typer.run(main)
