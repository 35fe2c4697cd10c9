"""Checks that hostile clients neither delay nor fail the requests of good ones, and leave nothing behind.

    python -m loadtest.faults.hostile_soak --minutes 60 --out hostile.json
    python -m loadtest.faults.hostile_soak --minutes 30 --evil-pod --evil-tenant

First fills the router's prompt caches, which takes a few minutes at the highest rate and half an hour at the measured
one. Then phases with and without attacks alternate under the same steady load; attackers are a process of their own.
Compares the p99 of the good requests, samples the router's memory, and reads all gauges at the end. Exit code 1 unless
no good request failed, no p99 rose by more than 20 ms, memory grew by at most 2 % after the first quarter, and all
in-flight gauges are 0.

With `--evil-pod`, one of the pods does wrong during attacks (`evil_pod.py`): what it began and broke is no failure of a
good request, and the times of what it served are shown apart and not judged; what another pod served after it failed,
is. With `--evil-tenant`, the attackers are one tenant, and the good clients another; the router's shared
limits are low enough for one tenant to reach them.
"""

from __future__ import annotations

import asyncio
import gc
import os
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import httpx
import msgspec
import typer
import uvloop
from rich.console import Console
from rich.table import Table

from loadtest.bench.bodies import SourceText, chat_bodies, warm_chats
from loadtest.bench.rig import OURS, PODS, Mocks, RunningRouter, launch_router
from loadtest.commands.child_processes import cancel_on_sigterm, free_port, logged_process
from loadtest.commands.mock_engine_command import mock_tokenizer
from loadtest.faults.evil_pod import WRONGS
from loadtest.faults.good_clients import EVIL, GoodClients, GoodResults
from loadtest.faults.hostile_clients import ENDED_S
from loadtest.faults.soak import connected, left_behind
from loadtest.peers.processes import process_usage
from router.cli.options import writable
from router.config.index_schema import Index

PROMPT_TOKENS, BODIES = 500, 256
FILLING_CLIENTS, FILLING_S = 48, 900.0
"""Clients that fill the caches, and their timeout."""
FULL_BYTES = 0.98 * 2 * Index().tokens_cache_bytes
"""With this many bytes both prompt caches are full."""
WARM_UP_S, SETTLE_S = 20.0, 5.0
"""Not measured: the start of the run, and of each phase."""
SAMPLE_S = 5.0
QUIET_S = 60.0
MAX_DELAY_MS = 20.0
MAX_GROWTH = 0.02
JUDGED_MINUTES = 30
"""A shorter run does not judge memory: its last three quarters have too few phases."""
LIMITS = {"request_timeout_s": 10, "write_timeout_s": 10, "first_byte_timeout_s": 20}
"""So that slow clients end within their phase."""
SHARED_LIMITS = {**LIMITS, "max_held_bytes": 64 * 2**20, "max_in_flight": 512, "max_connections": 512}
"""Two hundred good requests are in flight at most, with a megabyte."""
GOOD_KEY, EVIL_KEY = "good", "evil"


@dataclass(frozen=True, slots=True)
class Percentiles:
    """p50, p99 and maximum in milliseconds."""

    p50_ms: float
    p99_ms: float
    max_ms: float

    @classmethod
    def of(cls, values_s: Sequence[float]) -> Percentiles:
        if len(values_s) < 2:
            return cls(0.0, 0.0, 0.0)
        cuts = statistics.quantiles(values_s, n=100)
        return cls(*(round(value * 1000, 2) for value in (cuts[49], cuts[98], max(values_s))))


@dataclass(slots=True)
class Phase:
    """One phase: the good requests that were due in it, the router's memory and CPU, and how attacks ended."""

    hostile: bool
    began_minute: float
    answered: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    times: dict[str, Percentiles] = field(default_factory=dict)
    """By kind of request and measure."""
    client_lag: Percentiles = field(default_factory=lambda: Percentiles(0, 0, 0))
    rss_mib: float = 0.0
    """Median."""
    router_cpu: float = 0.0
    """Share of a core."""
    attacks: dict[str, int] = field(default_factory=dict)
    series: int = 0
    """Metric series at its end."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The router's process at one time."""

    minute: float
    hostile: bool
    rss_mib: float
    cpu_s: float
    descriptors: int


@dataclass(slots=True)
class HostileResult:
    """The run: `delays_ms` is how much p99 rose with attacks, by kind of request and measure."""

    minutes: float
    rate_per_s: float
    kinds: Sequence[str] = ()
    fills: bool = True
    """Whether the caches were filled first. Else they grow, and memory is not judged."""
    phases: list[Phase] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    with_attacks: dict[str, Percentiles] = field(default_factory=dict)
    without_attacks: dict[str, Percentiles] = field(default_factory=dict)
    delays_ms: dict[str, float] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    left_behind: dict[str, float] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)
    series: dict[str, int] = field(default_factory=dict)
    late_series: list[str] = field(default_factory=list)
    """Metric series that appeared after the first quarter."""
    errors: list[str] = field(default_factory=list)
    """Errors of the soak itself."""
    broken_by_pod: int = 0
    """Responses that the evil pod began and broke."""

    @property
    def growth(self) -> float:
        """Memory of the last quiet phase relative to the first one after a quarter of the run, minus 1."""
        quiet = [phase for phase in self.phases if not phase.hostile and phase.rss_mib]
        late = [phase for phase in quiet if phase.began_minute >= self.minutes / 4]
        return late[-1].rss_mib / late[0].rss_mib - 1 if len(late) > 1 else 0.0

    @property
    def verdict(self) -> list[str]:
        """What is wrong."""
        wrong = [f"{count} times {name}" for name, count in self.failures.items()]
        wrong += [
            f"p99 of {name} rose by {ms:.1f} ms"
            for name, ms in self.delays_ms.items()
            if ms > MAX_DELAY_MS and not name.startswith(EVIL)
        ]
        wrong += [f"{name} is {value:g}" for name, value in self.left_behind.items() if value]
        if self.fills and self.minutes >= JUDGED_MINUTES and self.growth > MAX_GROWTH:
            wrong.append(f"memory grew by {self.growth:.1%}")
        return wrong + self.errors


# --- processes ---


@contextmanager
def soak_pods(folder: Path, *, has_evil: bool = False) -> Iterator[Mocks]:
    """Run the mock pods. `has_evil`: the last one is the evil pod, in a process of its own."""
    ports = sorted({free_port() for _ in range(PODS * 4)})[:PODS]
    good = ports[:-1] if has_evil else ports
    script, evil = (str(Path(__file__).with_name(name)) for name in ("soak_pods.py", "evil_pod.py"))
    with ExitStack() as running:
        running.enter_context(logged_process("pods", [sys.executable, script, *map(str, good)], folder))
        if has_evil:
            running.enter_context(logged_process("evil", [sys.executable, evil, str(ports[-1])], folder))
        yield Mocks(ports)


def tenants_of(folder: Path) -> Mapping[str, object]:
    """The router's settings for a good and an evil tenant."""
    listed = [{"name": name, "keys": [sha256(name.encode()).hexdigest()]} for name in (GOOD_KEY, EVIL_KEY)]
    file = folder / "tenants.yaml"
    file.write_text(msgspec.json.encode({"tenants": listed}).decode())
    return {"tenants": str(file)}


@dataclass(slots=True)
class Attackers:
    """The process of the attackers."""

    process: asyncio.subprocess.Process

    async def begin(self) -> None:
        self._command(b"on\n")

    async def end(self) -> dict[str, int]:
        """Wait until all attacks have ended; returns how they did."""
        self._command(b"off\n")
        return await self.answer()

    async def answer(self) -> dict[str, int]:
        assert self.process.stdout
        async with asyncio.timeout(ENDED_S + 30):
            return dict(msgspec.json.decode(await self.process.stdout.readline()))

    def _command(self, word: bytes) -> None:
        assert self.process.stdin
        self.process.stdin.write(word)


@asynccontextmanager
async def attackers(port: int, kinds: Sequence[str], variables: Mapping[str, str]) -> AsyncIterator[Attackers]:
    """Start the attackers, waiting. Without `kinds`: all."""
    script, pipe = str(Path(__file__).with_name("hostile_clients.py")), asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        script,
        str(port),
        *kinds,
        stdin=pipe,
        stdout=pipe,
        limit=1 << 22,
        start_new_session=True,
        env={**os.environ, **variables},
    )
    try:
        started = Attackers(process)
        await started.answer()
        yield started
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


# --- the run ---


class HostileSoak:
    """One run against a running router."""

    def __init__(
        self, router: RunningRouter, result: HostileResult, good: GoodClients, variables: Mapping[str, str]
    ) -> None:
        self._variables = variables
        self._router = router
        self._result = result
        self._good = good
        self._hostile = False
        self._began_s = time.monotonic()
        self._early_series: set[str] = set()
        self._merged: dict[bool, GoodResults] = {False: GoodResults(), True: GoodResults()}

    @property
    def _minute(self) -> float:
        return (time.monotonic() - self._began_s) / 60

    async def run(self, phase_s: float, *, fills: bool) -> None:
        """Fill caches, alternate phases until the time is over, then read what is left."""
        if fills:
            await self._fill_caches()
        self._began_s = time.monotonic()
        tasks = [asyncio.create_task(run()) for run in (self._good.run, self._good.watch_lag, self._sample)]
        self._result.series["begin"] = len(_samples(await self._metrics()))
        async with attackers(self._router.port, self._result.kinds, self._variables) as attacking:
            await asyncio.sleep(WARM_UP_S)
            for hostile in cycle((False, True)):
                if self._minute + phase_s / 60 / 2 > self._result.minutes and len(self._result.phases) > 1:
                    break
                try:
                    await self._phase(hostile, phase_s, attacking)
                except (OSError, ValueError, TimeoutError) as error:
                    self._result.errors.append(f"phase at minute {self._minute:.1f}: {error!r}")
        tasks[0].cancel()
        await self._good.finish()
        for task in tasks:
            task.cancel()
        await self._until_quiet()
        self._summarize()

    async def _fill_caches(self) -> None:
        full, tokens_cache_bytes = asyncio.Event(), 0.0
        filling = asyncio.create_task(self._good.fill(FILLING_CLIENTS, full))
        try:
            async with asyncio.timeout(FILLING_S):
                while tokens_cache_bytes < FULL_BYTES:
                    await asyncio.sleep(SAMPLE_S)
                    tokens_cache_bytes = _sum(_samples(await self._metrics()), "warmroute_prompt_cache_bytes")
                    rss_mib = self._router.rss_bytes / 2**20
                    _say(f"filling caches: {tokens_cache_bytes / 2**20:.1f} MiB, RSS {rss_mib:.1f} MiB")
        except TimeoutError:
            self._result.errors.append(f"caches not full after {FILLING_S:g} s: {tokens_cache_bytes:.0f} bytes")
        full.set()
        await filling

    async def _phase(self, hostile: bool, phase_s: float, attacking: Attackers) -> None:
        phase, results = Phase(hostile, round(self._minute, 2)), GoodResults()
        self._hostile = hostile
        if hostile:
            await attacking.begin()
        await asyncio.sleep(SETTLE_S)
        cpu_s, began_s, first = self._router.cpu_s, time.monotonic(), len(self._result.samples)
        self._good.results = results
        await self._wait(phase_s - SETTLE_S, results)
        self._good.results = None
        await asyncio.sleep(1)  # responses of the last requests
        phase.router_cpu = round((self._router.cpu_s - cpu_s) / (time.monotonic() - began_s), 3)
        sampled = [sample.rss_mib for sample in self._result.samples[first:]]
        phase.rss_mib = round(statistics.median(sampled), 2) if sampled else 0.0
        phase.answered, phase.failures = results.answered, dict(results.failures)
        phase.times, phase.client_lag = _times(results), Percentiles.of(results.lag_s)
        self._observe_series(phase, _samples(await self._metrics()).keys())
        self._result.phases.append(phase)
        self._merged[hostile].extend(results)
        if hostile:
            phase.attacks = dict(sorted((await attacking.end()).items()))
        self._print(phase)

    def _observe_series(self, phase: Phase, series: Iterable[str]) -> None:
        phase.series, known = len(series := set(series)), self._early_series
        if phase.began_minute > self._result.minutes / 4:
            self._result.late_series += sorted(series - known)
        known.update(series)

    async def _wait(self, seconds: float, results: GoodResults) -> None:
        """Print a line each minute."""
        ends_s = time.monotonic() + seconds
        while (left_s := ends_s - time.monotonic()) > 0.5:
            await asyncio.sleep(min(60.0, left_s))
            last = self._result.samples[-1] if self._result.samples else None
            _say(
                f"minute {self._minute:5.1f}  {'attacks' if self._hostile else 'quiet  '}  "
                f"answered {results.answered}, failed {results.failures.total()}, "
                f"RSS {last.rss_mib if last else 0:.1f} MiB, {last.descriptors if last else 0} descriptors"
            )

    async def _sample(self) -> None:
        while True:
            try:
                usage = await asyncio.to_thread(process_usage, self._router.session or 0)
                descriptors = await asyncio.to_thread(_descriptors, self._router.session or 0)
                mib = round(usage.rss_bytes / 2**20, 2)
                sample = Sample(round(self._minute, 3), self._hostile, mib, round(usage.cpu_s, 2), descriptors)
                self._result.samples.append(sample)
            except OSError as error:
                self._result.errors.append(f"the router's process: {error!r}")
                return
            await asyncio.sleep(SAMPLE_S)

    async def _metrics(self) -> str:
        async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
            return (await client.get(f"{getattr(self._router, 'admin_url', self._router.url)}/metrics")).text

    async def _until_quiet(self) -> None:
        """Wait until nothing is left behind, or until the timeout."""
        ends_s = time.monotonic() + QUIET_S
        while time.monotonic() < ends_s:
            try:
                metrics = await self._metrics()
            except httpx.HTTPError as error:
                self._result.errors.append(f"metrics: {error!r}")
                return
            table = await asyncio.to_thread(Path("/proc/net/tcp").read_text)
            clients = connected(table, self._router.port)
            self._result.left_behind = {**left_behind(metrics), "connected clients": clients}
            self._result.gauges = _gauges(metrics)
            self._result.series["end"] = len(_samples(metrics))
            if not any(self._result.left_behind.values()):
                return
            await asyncio.sleep(1)

    def _summarize(self) -> None:
        result = self._result
        result.without_attacks, result.with_attacks = _times(self._merged[False]), _times(self._merged[True])
        for name, quiet in result.without_attacks.items():
            if name in result.with_attacks:
                result.delays_ms[name] = round(result.with_attacks[name].p99_ms - quiet.p99_ms, 2)
        result.failures, result.broken_by_pod = dict(self._good.failures), self._good.broken_by_pod

    def _print(self, phase: Phase) -> None:
        times = ", ".join(f"{name} {value.p50_ms:.1f}/{value.p99_ms:.1f}" for name, value in phase.times.items())
        _say(
            f"phase at {phase.began_minute:.1f} {'with attacks' if phase.hostile else 'quiet'}: p50/p99 ms: {times}; "
            f"lag of the clients p99 {phase.client_lag.p99_ms:.1f} ms; CPU {phase.router_cpu:.0%}, "
            f"RSS {phase.rss_mib:.1f} MiB, {phase.series} series; failed: {phase.failures or 'none'}"
        )


def _descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def _say(line: str) -> None:
    print(time.strftime("%H:%M:%S"), line, flush=True)


def _times(results: GoodResults) -> dict[str, Percentiles]:
    found = {
        f"{kind} TTFT": Percentiles.of(values) for kind, values in results.ttft_s.items() if not kind.endswith("unary")
    }
    return found | {f"{kind} end to end": Percentiles.of(values) for kind, values in results.e2e_s.items()}


def _samples(metrics: str) -> dict[str, float]:
    """All series."""
    rows = (line.rpartition(" ") for line in metrics.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in rows}


def _sum(samples: dict[str, float], name: str) -> float:
    """The sum of a metric over its labels."""
    return sum(value for series, value in samples.items() if series.partition("{")[0] == name)


def _gauges(metrics: str) -> dict[str, float]:
    """All series of gauges."""
    names = set(re.findall(r"^# TYPE (\S+) gauge$", metrics, re.MULTILINE))
    return {series: value for series, value in _samples(metrics).items() if series.partition("{")[0] in names}


async def _run(
    router: RunningRouter, result: HostileResult, phase_s: float, variables: Mapping[str, str], *, fills: bool
) -> None:
    cancel_on_sigterm()
    chats = list(warm_chats(SourceText(mock_tokenizer()), PROMPT_TOKENS, BODIES))
    bodies = chat_bodies(chats, stream=True), chat_bodies(chats, stream=False)
    gc.collect()
    gc.freeze()
    key = GOOD_KEY if "EVIL_KEY" in variables else ""
    evil_pod = f"pod-{PODS - 1}" if "EVIL_POD_PORT" in variables else ""
    good = GoodClients(router.port, result.rate_per_s, *bodies, key=key, evil_pod=evil_pod)
    await HostileSoak(router, result, good, variables).run(phase_s, fills=fills)


def main(
    minutes: Annotated[float, typer.Option(min=1, help="Length of the run.")] = 60,
    phase_s: Annotated[
        float | None, typer.Option(min=15, help="Length of a phase; default: 240, or an eighth of the run.")
    ] = None,
    rate: Annotated[float, typer.Option(min=1, help="Good requests per second.")] = 150,
    kind: Annotated[list[str] | None, typer.Option(help="Only attacks of this kind. Can be repeated.")] = None,
    evil_pod: Annotated[bool, typer.Option("--evil-pod", help="One of the pods attacks the router.")] = False,
    evil_tenant: Annotated[bool, typer.Option("--evil-tenant", help="The attackers are one of two tenants.")] = False,
    wrong: Annotated[list[str] | None, typer.Option(help="Only these wrongs of the evil pod. Can be repeated.")] = None,
    fill: Annotated[bool, typer.Option(help="Fill the router's caches first.")] = True,
    out: Annotated[
        Path | None, typer.Option(help="Write results and samples here, as JSON.", callback=writable)
    ] = None,
) -> None:
    """Run the soak test."""
    result = HostileResult(minutes, rate, kind or (), fill)
    with TemporaryDirectory(prefix="warmroute-soak-") as temporary:
        folder = Path(temporary)
        limits, settings = (SHARED_LIMITS, tenants_of(folder)) if evil_tenant else (LIMITS, {})
        with (
            soak_pods(folder, has_evil=evil_pod) as pods,
            launch_router(OURS, pods, folder / OURS, limits, settings=settings) as router,
        ):
            variables = {"EVIL_KEY": EVIL_KEY} if evil_tenant else {}
            if evil_pod:
                variables |= {"EVIL_POD_PORT": str(pods.ports[-1]), "EVIL_WRONGS": ";".join(wrong or WRONGS)}
            running = _run(router, result, phase_s or min(240.0, minutes * 60 / 8), variables, fills=fill)
            try:
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    runner.run(running)
            except asyncio.CancelledError:
                result.errors.append("stopped early")
            finally:
                if out is not None:
                    out.write_bytes(msgspec.json.encode({**asdict(result), "growth": result.growth}))
    Console().print(table(result))
    for line in result.verdict:
        _say(f"NOT OK: {line}")
    raise typer.Exit(1 if result.verdict else 0)


def table(result: HostileResult) -> Table:
    """Times with and without attacks, and memory."""
    shown = Table("ms", "quiet p50", "p99", "attacks p50", "p99", "p99 rose by", title=f"{result.minutes:g} minutes")
    for name, delay_ms in result.delays_ms.items():
        quiet, hostile = result.without_attacks[name], result.with_attacks[name]
        values = (quiet.p50_ms, quiet.p99_ms, hostile.p50_ms, hostile.p99_ms, delay_ms)
        shown.add_row(name, *(f"{value:.1f}" for value in values))
    attacks: Counter[str] = Counter()
    for phase in result.phases:
        attacks.update({name.partition(":")[0]: count for name, count in phase.attacks.items()})
    rows: dict[str, Any] = {"attacks": attacks.total(), "good requests": sum(each.answered for each in result.phases)}
    rows |= {"failed": sum(result.failures.values()), "memory growth": f"{result.growth:.2%}"}
    rows["begun and broken by the evil pod"] = result.broken_by_pod
    rows |= {f"left: {name.removeprefix('warmroute_')}": value for name, value in result.left_behind.items()}
    rows |= {f"metric series, {when}": count for when, count in result.series.items()}
    rows["metric series that appeared after the first quarter"] = len(result.late_series)
    for name, value in rows.items():
        shown.add_row(name, str(value))
    return shown


if __name__ == "__main__":
    typer.run(main)
