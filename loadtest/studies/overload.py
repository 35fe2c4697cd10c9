"""How many requests a second meet the SLO in an overload, with a queue in front of the fleet and without?

    python -m loadtest.studies.overload --trace conversation_trace.jsonl --saturation 4.6 --seeds 2,3,4
    python -m loadtest.studies.overload --mix mixed --pods 4 --saturation 1.25 --seeds 2,3,4
    python -m loadtest.studies.overload --trace conversation_trace.jsonl --prefill 8 --saturation 3.5 --seeds 2,3,4
    python -m loadtest.studies.overload --mix mixed --pods 4 --saturation 1.25 --rules queue --routers 4
    python -m loadtest.studies.overload --fairness --seeds 2,3,4

Plays traffic at multiples of the load at which the fleet saturates, in virtual time, under each admission rule. A
client that is refused ends its session. "late": of the refusals, those after more than 50 ms. With `--fairness`, two
tenants with equal weights share a fleet, and one of them sends 20 times as much.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import merge
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Annotated, TypeVar

import numpy as np
import typer

from loadtest.commands.simulate import map_in_processes
from loadtest.commands.simulate_setup import DEFAULT_FLEET, shipped_prior
from loadtest.simulated_peers.peer_admission import EarlyRejectionWorld, SaturationWorld
from loadtest.simulated_peers.peer_pickers import policies_with_peers
from loadtest.simulator.admission_rules import Admission, Rule
from loadtest.simulator.generate import Kind, TrafficMix
from loadtest.simulator.outcome import RequestOutcome, Run, figures
from loadtest.simulator.router_view import RouterSettings
from loadtest.simulator.scenario import FleetSpec
from loadtest.simulator.traffic import Session, TraceRequest, Traffic, mooncake_traffic, read_mooncake
from loadtest.simulator.world import World
from loadtest.studies.policy_cases import JITTER_S
from router.admission.tenant import Slo, Tenant
from router.config.load import load, shipped
from router.types import Role

CaseT = TypeVar("CaseT")
RowT = TypeVar("RowT")
SLO = Slo(ttft_ms=2000.0, tpot_ms=100.0, idle_prefills=3.0)
REFUSED_WITHIN_MS = 50.0
MIX_S = 300.0
POLICY, SPLIT_POLICY = "cost_aware", "cost_aware_pd"
RULES: Mapping[str, tuple[type[World], Rule]] = {
    "none": (World, Rule.NONE),
    "llm_d": (SaturationWorld, Rule.NONE),
    "early_rejection": (EarlyRejectionWorld, Rule.NONE),
    "queue": (World, Rule.QUEUE),
}
COLUMNS = (
    "rule | load / saturation | goodput /s | of maximum | accepted | of these in SLO | TTFT p99 ms | cached | late"
)


@dataclass(frozen=True, slots=True)
class Overload:
    """One row of a run: rates are per second of arrivals, shares 0..1."""

    goodput_per_s: float
    accepted: float
    accepted_in_slo: float
    ttft_p99_ms: float
    cached: float
    refused_late: float
    """Share of the refusals that came after more than `REFUSED_WITHIN_MS`."""


def overload_of(run: Run) -> Overload:
    """The figures of one run."""
    found = figures(run, SLO)
    refused = [one for one in run.outcomes if one.refused]
    late = sum(one.waited_ms > REFUSED_WITHIN_MS for one in refused)
    return Overload(
        found.goodput_per_s,
        1 - found.refused / max(found.requests, 1),
        found.accepted_slo_share,
        found.ttft_p99_ms,
        found.cached_share,
        late / max(len(refused), 1),
    )


def fleet_of(pods: int, prefill: int) -> FleetSpec:
    """The default fleet with that many pods. If `prefill` of them only compute prompts, the others only decode."""
    spec = load(shipped("config") / "fleets" / f"{DEFAULT_FLEET}.yaml", FleetSpec).with_pods(pods)
    if not prefill:
        return spec
    counts = {Role.PREFILL: prefill, Role.DECODE: pods - prefill}
    groups = (spec.pods[0].model_copy(update={"count": count, "role": role}) for role, count in counts.items())
    return spec.model_copy(update={"pods": tuple(groups)})


def play(
    traffic: Traffic,
    rule: str,
    pods: int,
    seed: int,
    prefill: int = 0,
    routers: int = 1,
    tenants: Sequence[Tenant] = (),
) -> Run:
    """One run. The collector of reference cycles is off: a simulation creates none."""
    gc.disable()
    spec = fleet_of(pods, prefill)
    conditions = replace(spec.conditions, regret_every=0, routers=routers)
    world, queue = RULES[rule]
    return world(
        spec.build(shipped_prior),
        policies_with_peers()[SPLIT_POLICY if prefill else POLICY],
        conditions,
        block_size_tokens=traffic.block_size_tokens,
        seed=seed,
        routers=RouterSettings(slo=SLO),
        admission=Admission(rule=queue, tenants={one.name: one for one in tenants}),
    ).run(traffic)


def trace_at(trace: Sequence[TraceRequest], load_factor: float, seed: int) -> Traffic:
    """A trace at a multiple of its rate."""
    return mooncake_traffic(trace, speedup=load_factor, jitter_s=JITTER_S, seed=seed)


def mix_at(mix: TrafficMix, duration_s: float, load_factor: float, seed: int) -> Traffic:
    """A mix at a multiple of its rate."""
    changes = {"sessions_per_s": mix.sessions_per_s * load_factor, "duration_s": duration_s}
    return mix.model_copy(update=changes).traffic(seed=seed)


def run_setting(
    traffic: Callable[[float, int], Traffic], pods: int, prefill: int, routers: int, setting: tuple[str, float, int]
) -> Overload:
    """One run of (rule, load, seed)."""
    rule, load_factor, seed = setting
    return overload_of(play(traffic(load_factor, seed), rule, pods, seed, prefill, routers))


def print_overload(rows: dict[tuple[str, float], list[Overload]], saturation: float) -> None:
    """A table: means over seeds."""
    best = dict.fromkeys((rule for rule, _ in rows), 0.0)
    for (rule, _), runs in rows.items():
        best[rule] = max(best[rule], _mean(runs, "goodput_per_s"))
    print(f"| {COLUMNS} |\n|{'---|' * (COLUMNS.count('|') + 1)}")
    for (rule, load_factor), runs in rows.items():
        goodput = _mean(runs, "goodput_per_s")
        cells = (
            rule,
            f"{load_factor / saturation:.1f}",
            f"{goodput:.2f}",
            f"{goodput / best[rule]:.0%}" if best[rule] else "",
            f"{_mean(runs, 'accepted'):.1%}",
            f"{_mean(runs, 'accepted_in_slo'):.1%}",
            f"{_mean(runs, 'ttft_p99_ms'):,.0f}",
            f"{_mean(runs, 'cached'):.1%}",
            f"{_mean(runs, 'refused_late'):.1%}",
        )
        print(f"| {' | '.join(cells)} |")


def _mean(runs: Sequence[Overload], name: str) -> float:
    return fmean(getattr(one, name) for one in runs)


# --- fairness ---

NORMAL = Kind(prefixes=8, prefix_tokens=(2000, 6000), first_tokens=(200, 4000), output_tokens=(50, 300))
QUIET, NOISY = "quiet", "noisy"
FAIR_PODS, FAIR_S = 8, 150.0
SHARE_PER_S = 17.0
"""Half of what the fleet serves of these requests."""
QUIET_PER_S, MANY_TIMES = SHARE_PER_S / 2, 20.0
WEIGHTS = {"quiet": 1.0, "noisy": 3.0}


def two_tenants(quiet_per_s: float, noisy_per_s: float, seed: int) -> Traffic:
    """The same requests of the quiet tenant, with any number of the noisy one."""

    def sessions(name: str, per_s: float, number: int) -> Iterator[Session]:
        mix = TrafficMix(sessions_per_s=per_s, duration_s=FAIR_S, kinds={name: NORMAL})
        return iter(mix.traffic(seed=number).sessions)

    both = [sessions(QUIET, quiet_per_s, 2 * seed)]
    if noisy_per_s:
        both.append(sessions(NOISY, noisy_per_s, 2 * seed + 1))
    return Traffic(TrafficMix.model_fields["block_size_tokens"].default, merge(*both, key=attrgetter("start_s")))


def run_fairness(setting: tuple[str, float, int]) -> dict[str, list[RequestOutcome]]:
    """The requests of each tenant that arrived after the first quarter, of (rule, times the share, seed)."""
    rule, times, seed = setting
    tenants = [Tenant(name=name, slo=SLO) for name in (QUIET, NOISY)]
    traffic = two_tenants(QUIET_PER_S, SHARE_PER_S * times, seed)
    run = play(traffic, rule, FAIR_PODS, seed, tenants=tenants)
    arrived = [one for one in run.outcomes if one.arrived_ms >= run.last_start_ms / 4]
    return {name: [one for one in arrived if one.kind == name] for name in (QUIET, NOISY)}


def print_fairness(results: dict[tuple[str, float], list[dict[str, list[RequestOutcome]]]]) -> None:
    """A table of the quiet tenant."""
    print(
        "| rule | the noisy tenant sends | quiet: TTFT p50 ms | p99 ms | refused | cached | noisy: refused |\n"
        + "|---" * 7
        + "|"
    )
    for (rule, times), runs in results.items():
        quiet, noisy = ([one for run in runs for one in run[name]] for name in (QUIET, NOISY))
        served = [one for one in quiet if not one.refused]
        ttft_ms = [one.ttft_ms for one in served]
        cached = sum(one.cached_tokens for one in served) / max(sum(one.prompt_tokens for one in served), 1)
        p50, p99 = np.percentile(ttft_ms, [50, 99])
        cells = (
            rule,
            f"{times:g} times its share",
            f"{p50:,.0f}",
            f"{p99:,.0f}",
            _refused(quiet),
            f"{cached:.1%}",
            _refused(noisy),
        )
        print(f"| {' | '.join(cells)} |")


def run_shares(seed: int) -> float:
    """The quiet tenant's part of the prefill if both send 20 times their share, with `WEIGHTS`."""
    tenants = [Tenant(name=name, slo=SLO, weight=weight) for name, weight in WEIGHTS.items()]
    traffic = two_tenants(SHARE_PER_S * MANY_TIMES / 2, SHARE_PER_S * MANY_TIMES / 2, seed)
    run = play(traffic, "queue", FAIR_PODS, seed, tenants=tenants)
    speed, _ = shipped_prior("llama-3.1-70b", "h100x4")
    used_ms = dict.fromkeys(WEIGHTS, 0.0)
    for one in run.outcomes:
        if not one.refused and one.arrived_ms >= run.last_start_ms / 4:
            used_ms[one.kind] += speed.compute_ms(one.cached_tokens, one.prompt_tokens)
    return used_ms[QUIET] / sum(used_ms.values())


def _refused(outcomes: Sequence[RequestOutcome]) -> str:
    return f"{sum(bool(one.refused) for one in outcomes) / max(len(outcomes), 1):.1%}"


def main(
    trace: Annotated[Path | None, typer.Option(exists=True, help="A Mooncake trace, JSONL.")] = None,
    mix: Annotated[str, typer.Option(help="A shipped mix.")] = "mixed",
    fairness: Annotated[bool, typer.Option("--fairness", help="Two tenants instead.")] = False,
    pods: Annotated[int, typer.Option(min=1, help="Number of pods.")] = 16,
    prefill: Annotated[int, typer.Option(min=0, help="Of these, those that only compute prompts; 0: all do both.")] = 0,
    requests: Annotated[int | None, typer.Option(min=1, help="The first requests of a trace only.")] = None,
    saturation: Annotated[float, typer.Option(min=0.01, help="The load at which the fleet saturates.")] = 4.6,
    loads: Annotated[str, typer.Option(help="Multiples of it.")] = "0.8,1,1.1,1.5,2,3",
    rules: Annotated[str, typer.Option(help="Admission rules.")] = ",".join(RULES),
    seeds: Annotated[str, typer.Option(help="Seeds.")] = "2,3,4",
    routers: Annotated[int, typer.Option(min=1, help="Number of routers.")] = 1,
    seconds: Annotated[float, typer.Option(min=1.0, help="Of a mix.")] = MIX_S,
    jobs: Annotated[int, typer.Option(min=1, help="Number of processes.")] = 1,
) -> None:
    """Print a table."""
    numbers = [int(one) for one in seeds.split(",")]
    chosen = rules.split(",")
    if fairness:
        tenant_cases = [(rule, times) for rule in chosen for times in (0.0, 1.0, MANY_TIMES)]
        found = map_in_processes(
            run_fairness, [(*case, seed) for case in tenant_cases for seed in numbers], jobs, "runs"
        )
        print_fairness(_by_case(tenant_cases, found))
        parts = map_in_processes(run_shares, numbers, jobs, "runs")
        shown = ", ".join(f"{part:.1%}" for part in parts)
        print(f"Both overload, weights 1 and 3: the first gets {shown} of the prefill")
        return
    if trace is not None:
        traffic: Callable[[float, int], Traffic] = partial(trace_at, read_mooncake(trace)[:requests])
    else:
        traffic = partial(mix_at, load(shipped("config") / "traffic" / f"{mix}.yaml", TrafficMix), seconds)
    cases = [(rule, saturation * float(times)) for rule in chosen for times in loads.split(",")]
    run = partial(run_setting, traffic, pods, prefill, routers)
    rows = map_in_processes(run, [(*case, seed) for case in cases for seed in numbers], jobs, "runs")
    print_overload(_by_case(cases, rows), saturation)


def _by_case(cases: Sequence[CaseT], rows: Sequence[RowT]) -> dict[CaseT, list[RowT]]:
    """Rows are ordered by case, with as many seeds for each."""
    seeds = len(rows) // len(cases)
    return {case: list(rows[at * seeds : (at + 1) * seeds]) for at, case in enumerate(cases)}


if __name__ == "__main__":
    typer.run(main)
