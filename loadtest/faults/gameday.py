"""Runs seven incidents and measures what shows them: the page, the alerts, or only clients that wait.

    python -m loadtest.faults.gameday [--only slow-pod] [--out gameday.json] [--screenshots FOLDER]

Mock engines, a router and a real Prometheus run as processes of their own for each incident; requests go over sockets
from an open-loop client. First the fleet is warm and all is well, then the incident begins. Measured from its begin:

* page: seconds until a line at the top of `/ui` names it. The page has one snapshot a second.
* alert: seconds until the expression of its alert is true, and until the alert fires. Prometheus scrapes and evaluates
  every second. Windows (`[5m]`) and `for` of all rules are divided by `--factor`; thresholds are those of the chart.
* TTFT p99 doubled: seconds until more than 1 % of the requests that were due in the last 10 s have waited longer than
  twice the p99 of the time before, as clients measure it. A request that still waits counts from when it has waited so
  long. In the incident of a flood only the other tenants' requests count.

Tenants have no quotas yet: the tenant that floods is a client with a name of its own in `x-tenant-id`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Annotated, Any

import httpx
import typer

from helm.monitoring.alerts import ALERTS
from loadtest.commands.child_processes import (
    ChildError,
    all_pods_trusted,
    cancel_on_sigterm,
    child,
    free_port,
    mock_fleet,
    router_config,
    temporary_folder,
)
from loadtest.faults.gameday_findings import WATCHED_S, Finding, p99_doubled_s, table, ttft_p99_s
from loadtest.faults.gameday_incidents import INCIDENTS, LINK_GB_PER_S, MOCK_LINK_FACTOR, PLAN, PODS, Incident, Rig
from loadtest.faults.gameday_watch import Screen, Sightings, follow_page, prometheus, screen, seconds_of
from loadtest.faults.steady_streams import SHOWN
from loadtest.traffic.chat_workload import SessionShape, mixed_sessions, poisson, sessions
from loadtest.traffic.load_driver import LoadDriver, SendRequest, play
from router.cli.options import writable
from router.config.load import shipped
from router.config.models import load_priors, prior_speed
from router.config.schema import CostPrior
from router.frontends.http.upstream import UpstreamPool
from router.request.inbound import IncomingResponse
from tests.redis_process import RedisProcess, redis_process

PREFILL_PODS = 3
SESSIONS_PER_S = 3.0
WARM_S, BASELINE_S = 28.0, 20.0
PICTURE_S = 3.0
FLOOD_PER_S = 22.0
FLOOD: Mapping[str, SessionShape] = {"flood": SessionShape(share=1, first_words=(2500, 3500), answer_tokens=(8, 16))}
DOCUMENTS_PER_S = 2.0
DOCUMENTS: Mapping[str, SessionShape] = {
    "document": SessionShape(share=1, first_words=(700, 1100), answer_tokens=(200, 400))
}
"""Prompts that no pod holds, with long answers that prompts on the same pod would delay: P/D fleets pass their KV."""
REGULAR, FLOODS, READERS = b"regular", b"flood", b"readers"


# --- one incident ---


def _as_tenant(tenant: bytes) -> SendRequest:
    """Send with this tenant's name."""
    line = b"content-type: application/json\r\n"

    def exchange(pool: UpstreamPool, message: bytes, _pause_s: float) -> Awaitable[IncomingResponse]:
        return pool.exchange(message.replace(line, b"%bx-tenant-id: %b\r\n" % (line, tenant), 1))

    return exchange


def _config(incident: Incident, pods: Sequence[str], redis: RedisProcess | None, *, continues: bool) -> dict[str, Any]:
    config = router_config(pods, replace(PLAN, continues=continues)) | {"log": {"requests": False}}
    cost = CostPrior(model=PLAN.speed_model, hardware=PLAN.speed_hardware)
    prior = prior_speed(load_priors(shipped("config") / "models"), cost)
    for pod in config["pods"]:
        pod["speed"] = asdict(prior.scaled(PLAN.time_scale))
    if incident.split:
        config |= {"policy": "cost_aware_pd", "links": {"elsewhere": {"t0_ms": 0.4, "gb_per_s": LINK_GB_PER_S}}}
        for number, pod in enumerate(config["pods"]):
            pod |= {"role": "prefill" if number < PREFILL_PODS else "decode", "handoff": "nixl"}
    if redis is not None:
        config["index"] = {"redis": {"url": redis.url}}
    return config


@asynccontextmanager
async def _router(config: Mapping[str, Any], folder: Path, *, publisher: bool) -> AsyncIterator[tuple[str, str]]:
    """Run a router with policies of its own; yields its two URLs once it trusts all pods."""
    path, policies, port, admin_port = folder / "router.yaml", folder / "policies", free_port(), free_port()
    path.write_text(json.dumps(config))
    policies.mkdir()
    for one in shipped("policies").glob("*.yaml"):
        (policies / one.name).write_text(one.read_text())
    listen = ["--port", str(port), "--admin-port", str(admin_port)]
    async with AsyncExitStack() as stack:
        if publisher:
            arguments = ["publish", "--config", str(path), "--port", str(free_port())]
            stack.enter_context(child("publisher", arguments, folder))
        router = stack.enter_context(
            child("router", ["serve", "--config", str(path), "--policies", str(policies), *listen], folder)
        )
        admin = f"http://127.0.0.1:{admin_port}"
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=admin, trust_env=False))

        async def ready() -> bool | None:
            return await all_pods_trusted(client, PODS) or None

        await router.until(ready)
        yield f"http://127.0.0.1:{port}", admin


@dataclass(slots=True)
class Load:
    """Tenants that send sessions to the router."""

    url: str
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    drivers: dict[bytes, LoadDriver] = field(default_factory=dict)

    def start(self, tenant: bytes, seed: int) -> LoadDriver:
        """Start a tenant's sessions, until `stop`."""
        duration_s = WARM_S + WATCHED_S
        mix = sessions(seed, duration_s=duration_s, sessions_per_s=SESSIONS_PER_S)
        random = Random(seed)
        if tenant == FLOODS:
            mix = mixed_sessions(random, FLOOD, poisson(random, WATCHED_S, FLOOD_PER_S))
        if tenant == READERS:
            mix = mixed_sessions(random, DOCUMENTS, poisson(random, duration_s, DOCUMENTS_PER_S))
        driver = self.drivers[tenant] = LoadDriver([self.url], lambda _: None, _as_tenant(tenant))
        self.tasks += [asyncio.create_task(play(driver, PLAN.model, session)) for session in mix]
        return driver

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for driver in self.drivers.values():
            driver.close()


async def run_incident(
    name: str, factor: float, seed: int, pictures: Path | None, *, continues: bool = False
) -> Finding:
    """Start everything, warm up, begin the incident, watch, and stop everything."""
    incident = INCIDENTS[name]
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(temporary_folder("warmroute-gameday-"))
        pods = await stack.enter_async_context(_fleet(incident, folder))
        redis = stack.enter_context(redis_process()) if incident.redis else None
        config = _config(incident, pods, redis, continues=continues)
        url, admin = await stack.enter_async_context(_router(config, folder, publisher=incident.redis))
        alerts = await stack.enter_async_context(prometheus(admin, factor, folder))
        shown, load = Sightings(), Load(url)
        stack.push_async_callback(load.stop)
        opened = await stack.enter_async_context(screen(admin)) if pictures else None
        rig = Rig(pods, folder / "policies", redis, lambda: load.start(FLOODS, seed))
        following = asyncio.create_task(follow_page(admin, shown))
        stack.callback(following.cancel)
        driver = load.start(REGULAR, seed)
        if incident.split:
            load.start(READERS, seed)
        await asyncio.sleep(WARM_S)
        before = [*shown.texts.values(), *alerts.firing.first_s]
        for seen in (shown, alerts.true, alerts.firing):
            seen.clear()
        begin_s = time.perf_counter()
        await incident.begin(rig)
        on_screen = await _watch(incident, shown, opened, pictures / f"{name}.png" if pictures else None, begin_s)
        await load.stop()
        if following.done():
            following.result()  # why the page's stream ended
    begun_s = begin_s - driver.started_s
    served, end_s = [*driver.served], begun_s + WATCHED_S
    if incident.split:
        served += load.drivers[READERS].served
    p99_s = ttft_p99_s(served, begun_s - BASELINE_S, begun_s)

    def after(found: Sightings, key: str) -> float | None:
        return found.first_s[key] - begin_s if key in found.first_s else None

    return Finding(
        incident=name,
        title=incident.title,
        page_s=after(shown, incident.notice),
        line=shown.texts.get(incident.notice, ""),
        on_screen=on_screen,
        alert=incident.alert,
        true_s=after(alerts.true, incident.alert),
        fires_s=after(alerts.firing, incident.alert),
        lasts_s=seconds_of(next(one.lasts for one in ALERTS if one.name == incident.alert)),
        doubled_s=p99_doubled_s(served, begun_s, end_s, 2 * p99_s),
        p99_before_ms=p99_s * 1000,
        p99_after_ms=ttft_p99_s(served, begun_s, end_s) * 1000,
        requests=len(served),
        failed=sum(bool(one.error) and one.ttft_s is None for one in served),
        cut=sum(bool(one.error) and one.ttft_s is not None for one in served),
        error_texts=[f"{one.id} {one.pod} {one.due_s:.1f} s: {one.error}" for one in served if one.error][:SHOWN],
        others=[one for one in alerts.firing.first_s if one != incident.alert],
        before=before,
    )


@asynccontextmanager
async def _fleet(incident: Incident, folder: Path) -> AsyncIterator[list[str]]:
    """Mock engines; with P/D, `PREFILL_PODS` of them compute prompts for the others."""
    split = ("--pd", "nixl", "--prefill", str(PREFILL_PODS)) if incident.split else ()
    async with mock_fleet(PLAN, folder, split) as pods:
        if incident.split:
            await Rig(pods, folder, None).inject(pods, kind="slow_link", factor=MOCK_LINK_FACTOR)
        yield pods


async def _watch(
    incident: Incident, shown: Sightings, opened: Screen | None, picture: Path | None, begin_s: float
) -> bool | None:
    """Wait for `WATCHED_S`. Returns whether the browser shows the line, `PICTURE_S` after the snapshot has it."""
    until_s, on_screen = begin_s + WATCHED_S, None if opened is None else False
    while (now_s := time.perf_counter()) < until_s:
        seen_s = shown.first_s.get(incident.notice, until_s)
        if opened is not None and picture is not None and not on_screen and now_s > seen_s + PICTURE_S:
            on_screen = shown.texts[incident.notice][:20] in " ".join(await opened.lines())
            await opened.save(picture)
        await asyncio.sleep(0.1)
    return on_screen


# --- all incidents ---


def main(
    only: Annotated[str, typer.Option(help="Incidents, separated by commas.")] = ",".join(INCIDENTS),
    factor: Annotated[float, typer.Option(min=1, help="Divides the windows and `for` of the alerts.")] = 10.0,
    seed: Annotated[int, typer.Option(help="Seed of the sessions.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Write all figures as JSON.", callback=writable)] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the table.", callback=writable)] = None,
    continues: Annotated[bool, typer.Option("--continues", help="Let the router continue broken streams.")] = False,
    screenshots: Annotated[Path | None, typer.Option(help="Folder for pictures; needs `make live-ui` once.")] = None,
) -> None:
    """Run the incidents one after the other, 95 s each, and print one table."""
    names = only.split(",")
    if unknown := set(names) - INCIDENTS.keys():
        raise typer.BadParameter(f"--only: unknown {', '.join(sorted(unknown))}; known: {', '.join(INCIDENTS)}")
    if screenshots is not None:
        screenshots.mkdir(parents=True, exist_ok=True)
    try:
        found = asyncio.run(_all(names, factor, seed, screenshots, continues=continues))
    except ChildError as error:
        typer.echo(f"gameday: {error}", err=True)
        raise typer.Exit(1) from error
    text = "\n".join(table(found, factor))
    typer.echo(text)
    if markdown is not None:
        markdown.write_text(text + "\n")
    if out is not None:
        settings = {"factor": factor, "seed": seed, "sessions_per_s": SESSIONS_PER_S, "fleet": asdict(PLAN)}
        out.write_text(json.dumps({"settings": settings, "found": [asdict(one) for one in found]}, indent=1) + "\n")


async def _all(
    names: Sequence[str], factor: float, seed: int, pictures: Path | None, *, continues: bool
) -> list[Finding]:
    cancel_on_sigterm()
    found = []
    for name in names:
        typer.echo(f"{name}: {INCIDENTS[name].title}", err=True)
        found.append(await run_incident(name, factor, seed, pictures, continues=continues))
        typer.echo(f"  {json.dumps(asdict(found[-1]))}", err=True)
    return found


if __name__ == "__main__":
    typer.run(main)
