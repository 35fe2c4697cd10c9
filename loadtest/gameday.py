"""Runs seven incidents and measures what shows them: the page, the alerts, or only clients that wait.

    python loadtest/gameday.py [--only slow-pod] [--out gameday.json] [--markdown gameday.md] [--screenshots FOLDER]

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
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Annotated, Any

import httpx
import typer

sys.path.insert(0, str(Path(__file__).parents[1]))

from helm.monitoring.alerts import ALERTS
from loadtest.gameday_watch import Screen, Sightings, follow_page, prometheus, screen, seconds_of
from router.cli.child_processes import (
    JSON_CALL,
    ChildError,
    FleetPlan,
    all_pods_trusted,
    cancel_on_sigterm,
    child,
    free_port,
    mock_fleet,
    router_config,
    temporary_folder,
)
from router.cli.figures import percentile
from router.cli.load_driver import Exchange, LoadDriver, RequestResult, StreamedResponse, play
from router.cli.options import writable
from router.config.load import shipped
from router.config.priors import load_priors, prior_speed
from router.config.schema import CostPrior
from router.proxy.upstream import UpstreamPool
from router.sim.chat_workload import SessionShape, mixed_sessions, poisson, sessions
from tests.redis_process import RedisProcess, redis_process

PODS = 6
PLAN = FleetPlan(pods=PODS, num_blocks=8192, time_scale=2.0)
"""Half as fast as the hardware, so that the router's own time is small against that of the engines."""
PREFILL_PODS = 3
SESSIONS_PER_S = 3.0
LINK_GB_PER_S = 6.0
"""Of the configuration; the mock engines' own link is a multiple of it."""
MOCK_LINK_FACTOR = 137.0 / LINK_GB_PER_S / PLAN.time_scale
WARM_S, BASELINE_S, WATCHED_S = 28.0, 20.0, 32.0
WINDOW_S, MIN_REQUESTS = 10.0, 30
PICTURE_S, PAGE_AIM_S = 3.0, 10.0
FLOOD_PER_S = 22.0
FLOOD: Mapping[str, SessionShape] = {"flood": SessionShape(share=1, first_words=(2500, 3500), answer_tokens=(8, 16))}
DOCUMENTS_PER_S = 2.0
DOCUMENTS: Mapping[str, SessionShape] = {
    "document": SessionShape(share=1, first_words=(700, 1100), answer_tokens=(24, 56))
}
"""Prompts that no pod holds: P/D fleets pass their KV."""
REGULAR, FLOODS, READERS = b"regular", b"flood", b"readers"


@dataclass(slots=True)
class Rig:
    """What an incident acts on. `send` starts the load of one more tenant."""

    pods: Sequence[str]
    policies: Path
    redis: RedisProcess | None
    send: Callable[[], object] = lambda: None

    async def inject(self, pods: Sequence[str], **fault: object) -> None:
        """Arm a fault of these mock engines."""
        async with httpx.AsyncClient(trust_env=False) as client:
            for url in pods:
                (await client.post(f"{url}/_fault", json=fault, headers=JSON_CALL)).raise_for_status()


async def _restart(rig: Rig) -> None:
    await rig.inject(rig.pods[: PODS // 2], kind="restart")


async def _throttle(rig: Rig) -> None:
    await rig.inject(rig.pods[3:4], kind="throttle", factor=3.0)


async def _lose_events(rig: Rig) -> None:
    await rig.inject(rig.pods[2:3], kind="lose_events", count=20, replayable=False)


async def _kill_redis(rig: Rig) -> None:
    assert rig.redis is not None
    await asyncio.to_thread(rig.redis.kill)


async def _change_policy(rig: Rig) -> None:
    """Somebody wanted 0.01."""
    path = rig.policies / "cost_aware.yaml"
    text = path.read_text()
    changed = text.replace("weight: 0.01 ", "weight: 100 ")
    assert changed != text
    path.write_text(changed)


async def _flood(rig: Rig) -> None:
    rig.send()


async def _slow_link(rig: Rig) -> None:
    await rig.inject(rig.pods, kind="slow_link", factor=10 * MOCK_LINK_FACTOR)


@dataclass(frozen=True, slots=True)
class Incident:
    """One incident: what it is, what begins it, and the line and the alert that should show it."""

    title: str
    begin: Callable[[Rig], Awaitable[None]]
    notice: str
    alert: str
    redis: bool = False
    split: bool = False
    """The fleet has prefill and decode pods."""


INCIDENTS: Mapping[str, Incident] = {
    "caches": Incident(f"{PODS // 2} of {PODS} pods restart", _restart, "restarts", "WarmrouteCachesLost"),
    "slow-pod": Incident("one pod becomes three times slower", _throttle, "slow", "WarmroutePodSlow"),
    "events": Incident("KV events of one pod are lost", _lose_events, "events", "WarmrouteKvEventsIncomplete"),
    "redis": Incident("Redis is killed", _kill_redis, "index", "WarmrouteIndexStale", redis=True),
    "policy": Incident("decode.weight 100, not 0.01", _change_policy, "policy", "WarmroutePolicyWorse"),
    "tenant": Incident("a tenant floods with long prompts", _flood, "tenant", "WarmrouteTenantFloods"),
    "link": Incident("P/D links at a tenth of their bandwidth", _slow_link, "link", "WarmrouteLinkSlow", split=True),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One incident's result. Times in seconds from its begin; None: not within the time watched."""

    incident: str
    title: str
    page_s: float | None
    line: str
    on_screen: bool | None
    """Whether the browser showed the line; None without one."""
    alert: str
    true_s: float | None
    fires_s: float | None
    lasts_s: float
    """The `for` of the chart, not divided."""
    doubled_s: float | None
    p99_before_ms: float
    p99_after_ms: float
    requests: int
    errors: int
    others: Sequence[str]
    """Other alerts that fired."""
    before: Sequence[str]
    """Lines and alerts while all was well."""

    def alerted_first(self, extra_s: float = 0.0) -> bool:
        """Whether the alert, this much later, is known to fire before the p99 doubles."""
        known_s = WATCHED_S if self.doubled_s is None else self.doubled_s
        return self.fires_s is not None and self.fires_s + extra_s < known_s


def p99_doubled_s(served: Sequence[RequestResult], begin_s: float, end_s: float, limit_s: float) -> float | None:
    """When the p99 of the last `WINDOW_S` exceeded `limit_s`, after `begin_s`, both on the driver's clock."""
    exceeded_s = sorted(
        one.due_s + limit_s for one in served if (one.ttft_s is None and not one.error) or (one.ttft_s or 0.0) > limit_s
    )
    for at_s in exceeded_s:
        if begin_s < at_s <= end_s:
            due = sum(at_s - WINDOW_S < one.due_s <= at_s for one in served)
            slow = sum(at_s - WINDOW_S < slow_s - limit_s and slow_s <= at_s for slow_s in exceeded_s)
            if due >= MIN_REQUESTS and slow > 0.01 * due:
                return at_s - begin_s
    return None


def ttft_p99_s(served: Sequence[RequestResult], begin_s: float, end_s: float) -> float:
    """Of the requests that were due in this time and have a first token."""
    return percentile([one.ttft_s for one in served if one.ttft_s is not None and begin_s <= one.due_s < end_s], 0.99)


# --- one incident ---


def _as_tenant(tenant: bytes) -> Exchange:
    """Send with this tenant's name."""
    line = b"content-type: application/json\r\n"

    def exchange(pool: UpstreamPool, message: bytes, _pause_s: float) -> Awaitable[StreamedResponse]:
        return pool.exchange(message.replace(line, b"%bx-tenant-id: %b\r\n" % (line, tenant), 1))

    return exchange


def _config(incident: Incident, pods: Sequence[str], redis: RedisProcess | None) -> dict[str, Any]:
    config = router_config(pods, PLAN) | {"log": {"requests": False}}
    cost = CostPrior(model=PLAN.speed_model, hardware=PLAN.speed_hardware)
    prior = prior_speed(load_priors(shipped("config") / "models"), cost)
    for pod in config["pods"]:
        pod["speed"] = {name: value * PLAN.time_scale for name, value in asdict(prior).items()}
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


async def run_incident(name: str, factor: float, seed: int, pictures: Path | None) -> Finding:
    """Start everything, warm up, begin the incident, watch, and stop everything."""
    incident = INCIDENTS[name]
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(temporary_folder("warmroute-gameday-"))
        pods = await stack.enter_async_context(_fleet(incident, folder))
        redis = stack.enter_context(redis_process()) if incident.redis else None
        config = _config(incident, pods, redis)
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
        errors=sum(bool(one.error) for one in served),
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

COLUMNS = ("incident", "on the page", "alert", "expression true", "fires", "`for` of the chart", "TTFT p99 doubled")


def main(
    only: Annotated[str, typer.Option(help="Incidents, separated by commas.")] = ",".join(INCIDENTS),
    factor: Annotated[float, typer.Option(min=1, help="Divides the windows and `for` of the alerts.")] = 10.0,
    seed: Annotated[int, typer.Option(help="Seed of the sessions.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Write all figures as JSON.", callback=writable)] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the table.", callback=writable)] = None,
    screenshots: Annotated[Path | None, typer.Option(help="Folder for pictures; needs `make live-ui` once.")] = None,
) -> None:
    """Run the incidents one after the other, 75 s each, and print one table."""
    names = only.split(",")
    if unknown := set(names) - INCIDENTS.keys():
        raise typer.BadParameter(f"--only: unknown {', '.join(sorted(unknown))}; known: {', '.join(INCIDENTS)}")
    if screenshots is not None:
        screenshots.mkdir(parents=True, exist_ok=True)
    try:
        found = asyncio.run(_all(names, factor, seed, screenshots))
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


async def _all(names: Sequence[str], factor: float, seed: int, pictures: Path | None) -> list[Finding]:
    cancel_on_sigterm()
    found = []
    for name in names:
        typer.echo(f"{name}: {INCIDENTS[name].title}", err=True)
        found.append(await run_incident(name, factor, seed, pictures))
        typer.echo(f"  {json.dumps(asdict(found[-1]))}", err=True)
    return found


def table(found: Sequence[Finding], factor: float) -> list[str]:
    """The findings as Markdown, and how many of them meet the aims."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for one in found:
        times = (_seconds(one.true_s), _seconds(one.fires_s), f"{one.lasts_s:g} s", _seconds(one.doubled_s))
        lines.append(f"| {' | '.join((one.title, _seconds(one.page_s), one.alert, *times))} |")
    visible = sum(one.page_s is not None and one.page_s < PAGE_AIM_S for one in found)
    scaled = sum(one.alerted_first() for one in found)
    whole = sum(one.alerted_first(one.lasts_s * (1 - 1 / factor)) for one in found)
    return [
        *lines,
        "",
        f"{visible} of {len(found)} on the page within {PAGE_AIM_S:g} s. Alerted before the p99 had doubled:"
        f" {scaled} with `for` divided by {factor:g}, {whole} with the whole `for`.",
    ]


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f} s"


if __name__ == "__main__":
    typer.run(main)
