"""Measures a GPU with vLLM, and this router in front of it, and writes everything as JSON.

    python -m loadtest.gpu.measure --out measured.json [--device cpu --engine-python PYTHON] [--budget-s 540]

Copies between host and GPU; prefills, decode steps and both in one step for each model; a CPU tier; then the demo's mix
through a real router in front of one, two and four pods that share the GPU. A part that fails or has no time left is
named in `skipped`; the file is written after each part.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).parents[2]))

from loadtest.gpu.engines import Engine, EnginePlan, await_healthy, start
from loadtest.gpu.fit import decode_points, fit, fit_launched, prefill_points
from loadtest.gpu.fleet import FleetPlanOnGpu, FleetPod, chat_overhead_ms, measure_fleet
from loadtest.gpu.models import MODELS, Model
from loadtest.gpu.steps import FULL, REHEARSAL, Grid, StepMeasurement
from loadtest.gpu.streams import PodClient, made_up
from router.types import PodSpeed

FIRST_PORT = 18100
GB = 10**9
STEPS_S = 110.0
"""Longest time for the steps of one model."""
TIER_PROMPTS_TOKENS = (2048, 8192, 16384)
TIER_REPEATS = 3
TIER_SETTLE_S = 1.0
"""Time in which a pod copies new blocks to its CPU tier; nothing says when it has."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What is measured on a device. KV sizes are chosen so that both models and then four pods fit into one H200."""

    kv_gb: Mapping[str, float]
    """By model."""
    fleet_pods: Sequence[int]
    fleet_kv_gb: float
    grid: Grid
    hardware: str
    sessions_per_s: float
    fleet_duration_s: float
    fleet_limit_s: float
    """Longest time for one fleet, its router's start included."""
    cpu_tier_gib: int
    max_model_len: int


SETTINGS = {
    "gpu": Setting({"llama-3.1-8b": 32, "qwen3-30b-a3b": 14}, (1, 2, 4), 9, FULL, "h200x1", 9.0, 15.0, 45.0, 24, 40960),
    "cpu": Setting({"tiny": 1}, (1,), 1, REHEARSAL, "h100x1", 0.5, 20.0, 150.0, 0, 8192),
}


@dataclass(slots=True)
class Measurement:
    """One run: what was found so far, and until when it may take.

    `prior` is the speed that the router starts with; without one, the row of `config/models`.
    """

    device: str
    engine_python: str
    folder: Path
    out: Path
    until_s: float
    setting: Setting
    seed: int
    prior: PodSpeed | None
    found: dict[str, Any] = field(default_factory=dict)
    engines: dict[str, Engine] = field(default_factory=dict)
    stack: ExitStack = field(default_factory=ExitStack)

    def run(self) -> None:
        """All parts, in an order in which no pod computes while another is measured."""
        self.found = {"date": datetime.now().astimezone().isoformat(), "seed": self.seed, "skipped": []}
        self.found |= {"models": {}, "fleets": []}
        first, *others = self.setting.kv_gb
        fleets = self.setting.fleet_pods
        self._part("copies", self._copies)
        self._part("start", self._start_models)
        self._part(f"steps of {first}", partial(_run, self._steps, first))
        if fleets:
            self._part("fleet of 1", partial(_run, self._fleet, [first]))
        for name in others:
            self._part(f"steps of {name}", partial(_run, self._steps, name))
            self._stop(name)
        if max(fleets, default=1) > 1:
            self._part("more pods", lambda: self._start_fleet(max(fleets)))
            names = [first, *(name for name in self.engines if name.startswith("pod-"))]
            for pods in fleets[1:]:
                self._part(f"fleet of {pods}", partial(_run, self._fleet, names[:pods]))
            self._part("CPU tier", partial(_run, self._cpu_tier, names[-1]))

    def _part(self, title: str, part: Callable[[], None]) -> None:
        """Run a part if there is time; its failure costs only itself."""
        began_s = time.monotonic()
        if began_s > self.until_s:
            self.found["skipped"].append({"part": title, "why": "no time left"})
        else:
            try:
                part()
            except Exception as error:
                traceback.print_exc()
                self.found["skipped"].append({"part": title, "why": f"{type(error).__name__}: {error}"[-2000:]})
        print(f"[{time.monotonic() - began_s:5.1f} s] {title}", flush=True)
        self._write()

    def _write(self) -> None:
        self.out.write_text(json.dumps(self.found))

    def _copies(self) -> None:
        """In a process of its own, whose GPU memory is free afterwards."""
        command = [sys.executable, "-m", "loadtest.gpu.copies"]
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        self.found |= json.loads(said.stdout)

    def _start_models(self) -> None:
        sizes = enumerate(self.setting.kv_gb.items())
        self._start([self._plan(MODELS[name], name, number, kv_gb) for number, (name, kv_gb) in sizes])

    def _start_fleet(self, pods: int) -> None:
        """Further pods of the first model. The last one has a CPU tier."""
        model = MODELS[next(iter(self.setting.kv_gb))]
        tiers_gib = [0] * (pods - 2) + [self.setting.cpu_tier_gib]
        size_gb = self.setting.fleet_kv_gb
        numbered = enumerate(tiers_gib, start=1)
        self._start([self._plan(model, f"pod-{number}", number + 10, size_gb, tier) for number, tier in numbered])

    def _plan(self, model: Model, name: str, number: int, kv_gb: float, cpu_tier_gib: int = 0) -> EnginePlan:
        return EnginePlan(
            name,
            model.write(self.folder),
            FIRST_PORT + number,
            int(kv_gb * GB),
            self.device,
            self.engine_python,
            cpu_tier_gib,
            self.setting.max_model_len,
        )

    def _start(self, plans: Sequence[EnginePlan]) -> None:
        starting = [start(plan, self.folder) for plan in plans]
        for engine in starting:
            self.stack.callback(engine.stop)
        for engine in await_healthy(starting, self.folder, self.until_s):
            self.stack.callback(engine.stop)
            self.engines[engine.plan.name] = engine
            self.found.setdefault("starts", {})[engine.plan.name] = {"s": engine.start_s, "eager": engine.eager}

    def _stop(self, name: str) -> None:
        if name in self.engines:
            self.engines.pop(name).stop()

    async def _steps(self, name: str) -> None:
        engine, model = self.engines[name], MODELS[name]
        kv_tokens = engine.plan.kv_bytes // model.kv_bytes_per_token
        client = PodClient(engine.url, engine.plan.model_dir.name)
        found: dict[str, Any] = {"kv_bytes": engine.plan.kv_bytes}
        self.found["models"][name] = found
        until_s = min(time.monotonic() + STEPS_S, self.until_s)
        try:
            found["kv_cache"] = await client.kv_cache()
            steps = StepMeasurement(client, self.setting.grid, kv_tokens, until_s, Random(f"{name}-{self.seed}"))
            async for part, values in steps.parts():
                found[part] = values
                self._write()
        finally:
            client.close()

    async def _fleet(self, names: Sequence[str]) -> None:
        """The demo's mix; more sessions for more pods would only measure how they share the GPU."""
        engines = [self.engines[name] for name in names]
        setting, plan = self.setting, engines[0].plan
        load = FleetPlanOnGpu(
            model=plan.model_dir.name,
            tokenizer=str(plan.model_dir),
            block_size_tokens=plan.block_tokens,
            cost_hardware=setting.hardware,
            speed=self.prior,
            seed=self.seed,
            sessions_per_s=setting.sessions_per_s,
            duration_s=setting.fleet_duration_s,
            deadline_s=min(setting.fleet_limit_s, self.until_s - time.monotonic() + 15),
        )
        pods = [
            FleetPod(url=one.url, kv_endpoint=one.plan.kv_endpoint, replay_endpoint=one.plan.replay_endpoint)
            for one in engines
        ]
        if len(pods) == 1:
            steps = [self.found["models"][names[0]]]
            speed = fit(prefill_points(steps), decode_points(steps))
            self.found["chat_overhead_ms"] = await chat_overhead_ms(pods[0], load, speed)
        self.found["fleets"].append(await measure_fleet(pods, load, self.folder))

    async def _cpu_tier(self, name: str) -> None:
        """Prompts that are nowhere, in GPU memory, and in the CPU tier only."""
        engine = self.engines[name]
        if not engine.plan.cpu_tier_gib:
            return
        client, random = PodClient(engine.url, engine.plan.model_dir.name), Random(name)
        found = self.found["cpu_tier"] = []
        try:
            for tokens in TIER_PROMPTS_TOKENS * TIER_REPEATS:
                prompt = made_up(random, tokens)
                new = await client.stream(prompt, 4)
                on_gpu = await client.stream(prompt, 4)
                await asyncio.sleep(TIER_SETTLE_S)
                await client.forget()
                on_host = await client.stream(prompt, 4)
                for where, one in (("nowhere", new), ("gpu", on_gpu), ("cpu", on_host)):
                    found.append({"n": tokens, "where": where, "p": one.cached_tokens, "ttft_ms": one.ttft_ms})
        finally:
            client.close()


def main(
    out: Annotated[Path, typer.Option()],
    folder: Annotated[Path, typer.Option(help="For models and logs.")] = Path("/tmp/warmroute-gpu"),
    device: Annotated[str, typer.Option(help="gpu or cpu; cpu is a rehearsal with a tiny model.")] = "gpu",
    engine_python: Annotated[str, typer.Option(help="Python with vLLM.")] = sys.executable,
    budget_s: Annotated[float, typer.Option(help="No part begins later.")] = 480.0,
    models: Annotated[str, typer.Option(help="Names, comma-separated; all if empty.")] = "",
    fleet_pods: Annotated[int, typer.Option(help="Largest fleet; 0 is none.")] = 4,
    seed: Annotated[int, typer.Option(help="Of prompts and sessions.")] = 1,
    prior_from: Annotated[Path | None, typer.Option(help="An earlier run: the router starts with its speed.")] = None,
) -> None:
    """Measure, and write the JSON."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that pods and routers are stopped
    folder.mkdir(parents=True, exist_ok=True)
    setting = SETTINGS[device]
    kept = {name: size for name, size in setting.kv_gb.items() if name in (models or name).split(",")}
    fleets = [pods for pods in setting.fleet_pods if pods <= fleet_pods]
    setting = replace(setting, kv_gb=kept, fleet_pods=fleets)
    prior = _prior(prior_from, next(iter(kept))) if prior_from else None
    run = Measurement(device, engine_python, folder, out, time.monotonic() + budget_s, setting, seed, prior)
    with run.stack:
        run.run()


def _run(part: Callable[[Any], Coroutine[Any, Any, None]], subject: Any) -> None:
    asyncio.run(part(subject))


def _prior(earlier: Path, model: str) -> PodSpeed:
    steps = [json.loads(earlier.read_text())["models"][model]]
    return fit_launched(prefill_points(steps), decode_points(steps))


if __name__ == "__main__":
    typer.run(main)
