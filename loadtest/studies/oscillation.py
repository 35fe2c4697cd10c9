"""Does the backlog of single pods oscillate, in steady state and after a burst, and how soon is the fleet back?

    python -m loadtest.studies.oscillation --trace conversation_trace.jsonl --load 2 --burst 10 --report page.html
    python -m loadtest.studies.oscillation --trace conversation_trace.jsonl --load 4.4 --burst 0

Plays a Mooncake trace in virtual time: `--load` for ten minutes, `--burst` for two, then `--load` again. A router that
sends everybody to the pod that was idle a moment ago makes backlogs swing: what a pod has more than the fleet's mean
becomes less than it some time later, and more again. So the autocorrelation of that difference has a trough and then a
peak outside of the band of chance, and its spectrum a line. A backlog that only takes time to drain has neither.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray

from loadtest.commands.simulate import map_in_processes
from loadtest.commands.simulate_setup import DEFAULT_FLEET, shipped_prior
from loadtest.html_page import PlotAxes, Section, Series, lines, page, paragraph, writable_report
from loadtest.simulated_peers.peer_pickers import policies_with_peers
from loadtest.simulator.outcome import Run
from loadtest.simulator.scenario import FleetSpec
from loadtest.simulator.traffic import TraceRequest, Traffic, mooncake_traffic, read_mooncake
from loadtest.simulator.world import OnEnded, World, ignore_progress
from loadtest.studies.policy_cases import JITTER_S
from router.config.load import load, shipped
from router.policy.spec import Policy

Floats = NDArray[np.float64]
SAMPLE_S = 1.0
WARM_UP_S, STEADY_S, BURST_S = 120.0, 600.0, 120.0
MAX_LAG = 120
SEGMENT = 256
"""Samples of a spectrum; spectra of half-overlapping segments are averaged."""
BAND = 3.5
"""Standard errors that chance exceeds at any of 120 lags in 5 % of runs."""
WINDOW_S = 30.0
BACK = 1.1
"""The fleet is back when the mean time to first token of a window is at most this multiple of the steady one."""


@dataclass(frozen=True, slots=True)
class Waves:
    """The autocorrelation of the backlogs, by lag in samples. `band`: what chance stays below at all lags.

    `line` is the highest ratio of the spectrum to that of a process that only decays (first-order autoregression), and
    `line_s` its period. With chance alone the ratio stays below about 2."""

    correlation: Sequence[float]
    band: float
    line: float
    line_s: float

    @property
    def memory_s(self) -> float:
        """The first lag with a correlation below 1/e."""
        return next((at * SAMPLE_S for at, one in enumerate(self.correlation) if one < 1 / math.e), math.inf)

    @property
    def trough(self) -> tuple[float, float]:
        """(lowest correlation, its lag in s)."""
        at = int(np.argmin(self.correlation))
        return self.correlation[at], at * SAMPLE_S

    @property
    def swing(self) -> float:
        """The highest correlation after the trough: that of a second swing."""
        return max(self.correlation[int(np.argmin(self.correlation)) :])

    @property
    def oscillates(self) -> bool:
        """Whether a trough and then a peak are outside of the band."""
        return self.trough[0] < -self.band and self.swing > self.band


def waves_of(backlogs_ms: Floats) -> Waves:
    """Reads backlogs (samples x pods) as differences from the mean of the fleet. NaN if no backlog ever differs."""
    beyond = backlogs_ms - backlogs_ms.mean(axis=1, keepdims=True)
    beyond = beyond - beyond.mean(axis=0)
    samples, pods = beyond.shape
    lags = min(MAX_LAG, samples // 4)
    variance = float((beyond**2).sum())
    if not variance:
        return Waves([math.nan] * (lags + 1), math.nan, math.nan, math.nan)
    correlation = [float((beyond[: samples - lag] * beyond[lag:]).sum()) / variance for lag in range(lags + 1)]
    # Bartlett's formula for many pods, of which all but one are independent of the mean.
    decay = sum(one**2 for one in correlation[1:] if one > 0.1)
    band = BAND * math.sqrt((1 + 2 * decay) / (samples * max(pods - 1, 1)))
    return Waves(correlation, band, *_line(beyond, correlation[1]))


def _line(beyond: Floats, decay: float) -> tuple[float, float]:
    """The highest ratio of the mean spectrum to that of a first-order autoregression, and its period in s."""
    size = min(SEGMENT, len(beyond))
    starts = range(0, len(beyond) - size + 1, max(size // 2, 1))
    window = np.hanning(size)[:, None]
    segments = [beyond[start : start + size] for start in starts]
    spectra = [abs(np.fft.rfft((one - one.mean(axis=0)) * window, axis=0)) ** 2 for one in segments]
    power = np.mean(spectra, axis=(0, 2))
    frequency = np.fft.rfftfreq(size)
    plain = 1 / (1 + decay**2 - 2 * decay * np.cos(2 * math.pi * frequency))
    ratio = power[2:-1] / plain[2:-1]
    ratio = ratio / ratio.mean()
    at = int(np.argmax(ratio))
    return float(ratio[at]), float(SAMPLE_S / frequency[2 + at])


# --- runs ---


def with_burst(traffic: Traffic, load_factor: float, burst: float) -> Traffic:
    """The traffic at `load_factor` times its rate for `STEADY_S`, at `burst` for `BURST_S`, and as before again."""
    begin_s = STEADY_S * load_factor
    end_s = begin_s + BURST_S * burst

    def played_s(at_s: float) -> float:
        if at_s <= begin_s or not burst:
            return at_s / load_factor
        if at_s <= end_s:
            return STEADY_S + (at_s - begin_s) / burst
        return STEADY_S + BURST_S + (at_s - end_s) / load_factor

    return replace(traffic, sessions=[replace(one, start_s=played_s(one.start_s)) for one in traffic.sessions])


class SampledWorld(World):
    """Records the prefill that waits or runs on each pod, every `SAMPLE_S`."""

    def run(self, traffic: Traffic, on_progress: OnEnded = ignore_progress) -> Run:
        self.backlogs_ms: list[list[float]] = []
        self._clock.call_at(0.0, self._sample)
        return super().run(traffic, on_progress)

    def _sample(self) -> None:
        self.backlogs_ms.append([pod.backlog_ms() for pod in self._pods.values()])
        if self._goes_on():
            self._clock.call_in(SAMPLE_S * 1000, self._sample)


@dataclass(frozen=True, slots=True)
class Play:
    """One run: who decides, and when what arrives."""

    trace: Sequence[TraceRequest]
    policies: Mapping[str, Policy]
    pods: int
    load: float
    burst: float

    def __call__(self, setting: tuple[str, int]) -> tuple[Run, list[list[float]]]:
        policy, seed = setting
        spec = load(shipped("config") / "fleets" / f"{DEFAULT_FLEET}.yaml", FleetSpec).with_pods(self.pods)
        traffic = with_burst(mooncake_traffic(self.trace, jitter_s=JITTER_S, seed=seed), self.load, self.burst)
        conditions = replace(spec.conditions, regret_every=0)
        built = spec.build(shipped_prior)
        block = traffic.block_size_tokens
        world = SampledWorld(built, self.policies[policy], conditions, block_size_tokens=block, seed=seed)
        return world.run(traffic), world.backlogs_ms


def mean_ttft_ms(run: Run, from_s: float, until_s: float) -> float:
    """Counts requests that arrived between the two; NaN without any."""
    found = [one.ttft_ms for one in run.outcomes if not one.refused and from_s <= one.arrived_ms / 1000 < until_s]
    return float(np.mean(found)) if found else math.nan


def back_after_s(run: Run) -> float:
    """From the end of the burst to the first of the windows that are all as fast as before the burst."""
    steady_ms, ended_s = mean_ttft_ms(run, WARM_UP_S, STEADY_S), STEADY_S + BURST_S
    last_s = max(one.arrived_ms for one in run.outcomes) / 1000 - WINDOW_S
    starts = np.arange(ended_s, last_s, WINDOW_S)
    slow = [at for at in starts if mean_ttft_ms(run, at, at + WINDOW_S) > BACK * steady_ms]
    return float(slow[-1] + WINDOW_S - ended_s) if slow else 0.0


def parts_of(run: Run, backlogs_ms: Sequence[Sequence[float]], burst: float) -> dict[str, Floats]:
    """The samples before the burst and after it, while requests arrive."""
    samples = np.array(backlogs_ms)
    begin, end = round(STEADY_S / SAMPLE_S), round((STEADY_S + BURST_S) / SAMPLE_S)
    warm, arrived = round(WARM_UP_S / SAMPLE_S), int(max(one.arrived_ms for one in run.outcomes) / 1000 / SAMPLE_S)
    if not burst:
        return {"steady": samples[warm:arrived]}
    return {"steady": samples[warm:begin], "after the burst": samples[end:arrived]}


COLUMNS = "policy, seed, part | mean ms | memory s | trough | at s | swing | band | line | oscillates"


def main(
    trace: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="A Mooncake trace, JSONL.")],
    policies: Annotated[str, typer.Option(help="Policies to compare.")] = "cost_aware,least_load,lmetric",
    pods: Annotated[int, typer.Option(min=2, help="Number of pods.")] = 16,
    load_factor: Annotated[float, typer.Option("--load", min=0.01, help="Multiple of the trace's rate.")] = 2.0,
    burst: Annotated[float, typer.Option(min=0, help="The same during the burst; 0 for none.")] = 10.0,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each policy.")] = 1,
    jobs: Annotated[int, typer.Option(min=1, help="Number of processes.")] = 1,
    report: Annotated[Path | None, typer.Option(help="Write an HTML page.", callback=writable_report)] = None,
) -> None:
    """Print the autocorrelation of each policy's backlogs, and the time until the fleet is back."""
    play = Play(read_mooncake(trace), policies_with_peers(), pods, load_factor, burst)
    settings = [(policy, seed) for policy in policies.split(",") for seed in range(seeds)]
    runs = map_in_processes(play, settings, jobs, "runs")
    plots = dict[str, list[Series]]()
    print(f"| {COLUMNS} |\n|{'---|' * (COLUMNS.count('|') + 1)}")
    for (policy, seed), (run, backlogs_ms) in zip(settings, runs, strict=True):
        for part, samples in parts_of(run, backlogs_ms, burst).items():
            waves = waves_of(samples)
            print(f"| {policy}, {seed}, {part} | {' | '.join(_cells(samples, waves))} |")
            lags = [at * SAMPLE_S for at in range(len(waves.correlation))]
            plots.setdefault(part, []).append(Series(f"{policy}, {seed}", lags, waves.correlation))
    if burst:
        print("\nfrom the end of the burst until back within 10 %:")
        for (policy, seed), (run, _) in zip(settings, runs, strict=True):
            print(f"{policy}, seed {seed}: {back_after_s(run):.0f} s")
    if report is not None:
        drawn = [lines(PlotAxes(title=part, x="lag, s", y="correlation"), one) for part, one in plots.items()]
        about = paragraph((__doc__ or "").rsplit("\n\n", 1)[-1])
        document = page("Oscillation of backlogs", [Section("Autocorrelation", [about, *drawn])])
        report.write_text(document, encoding="utf-8")


def _cells(samples: Floats, waves: Waves) -> list[str]:
    trough, at_s = waves.trough
    return [
        f"{samples.mean():,.0f}",
        f"{waves.memory_s:.0f}",
        f"{trough:.2f}",
        f"{at_s:.0f}",
        f"{waves.swing:.2f}",
        f"{waves.band:.2f}",
        f"{waves.line:.1f} at {waves.line_s:.0f} s",
        "yes" if waves.oscillates else "no",
    ]


if __name__ == "__main__":
    typer.run(main)
