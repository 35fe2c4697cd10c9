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
import os
import re
import shutil
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Annotated, Any

import httpx
import msgspec
import typer
from ruamel.yaml import YAML

from helm.generate import CHART
from helm.monitoring.alerts import ALERTS
from loadtest.commands.child_processes import (
    JSON_CALL,
    ChildError,
    FleetPlan,
    RouterUrls,
    cancel_on_sigterm,
    child,
    configured_router,
    free_port,
    logged_process,
    mock_fleet,
    priced_config,
    temporary_folder,
)
from loadtest.faults.steady_streams import SHOWN
from loadtest.traffic.chat_workload import SessionShape, mixed_sessions, poisson, sessions
from loadtest.traffic.figures import percentile
from loadtest.traffic.load_driver import LoadDriver, RequestResult, play, with_header
from router.cli.options import writable
from router.config.load import shipped
from tests.redis_process import RedisProcess, redis_process

WATCHED_S = 50.0
WINDOW_S, MIN_REQUESTS = 10.0, 30
PAGE_AIM_S = 10.0
COLUMNS = ("incident", "on the page", "alert", "expression true", "fires", "`for` of the chart", "TTFT p99 doubled")


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
    failed: int
    """Answers without a token."""
    cut: int
    """Answers that ended after their first token."""
    error_texts: Sequence[str]
    """What went wrong for the first of them."""
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
    """Counts requests that were due in this time and have a first token."""
    return percentile([one.ttft_s for one in served if one.ttft_s is not None and begin_s <= one.due_s < end_s], 0.99)


def table(found: Sequence[Finding], factor: float) -> list[str]:
    """The findings as Markdown, and how many of them meet the aims."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for one in found:
        times = (_seconds(one.true_s), _seconds(one.fires_s), f"{one.lasts_s:g} s", _seconds(one.doubled_s))
        lines.append(f"| {' | '.join((one.title, _seconds(one.page_s), one.alert, *times))} |")
    visible = sum(one.page_s is not None and one.page_s < PAGE_AIM_S for one in found)
    scaled = sum(one.alerted_first() for one in found)
    whole = sum(one.alerted_first(one.lasts_s * (1 - 1 / factor)) for one in found)
    requests, failed, cut = (sum(getattr(one, name) for one in found) for name in ("requests", "failed", "cut"))
    return [
        *lines,
        "",
        f"{visible} of {len(found)} on the page within {PAGE_AIM_S:g} s. Alerted before the p99 had doubled:"
        f" {scaled} with `for` divided by {factor:g}, {whole} with the whole `for`.",
        f"Of {requests} requests {failed} failed and {cut} were cut.",
    ]


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f} s"


PODS = 6
PLAN = FleetPlan(pods=PODS, num_blocks=8192, time_scale=2.0)
"""Half as fast as the hardware, so that the router's own time is small against that of the engines."""
LINK_GB_PER_S = 25.0
"""The configuration has a port of 200 Gb/s. Over a link of 6 GB/s, splitting prompts would not pay in this fleet."""
MOCK_LINK_FACTOR = 137.0 / LINK_GB_PER_S / PLAN.time_scale
"""Makes the mock engines' own link, at their speed, as fast as the configured one."""


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


RULES = CHART / "files" / "alerts.yaml"
POLL_S = 0.25
UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
DURATION = re.compile(r"(\d+)(ms|s|m|h)")
BROWSER = "/usr/bin/chromium"
PLAYWRIGHT = Path(os.environ.get("WARMROUTE_LIVE_UI_HOME", Path.home() / ".cache" / "warmroute" / "ui")) / "site"


@dataclass(slots=True)
class Sightings:
    """When something was first seen, by name, and its text."""

    first_s: dict[str, float] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, text: str, now_s: float) -> None:
        """The first time counts, the last text stays."""
        self.first_s.setdefault(name, now_s)
        self.texts[name] = text

    def clear(self) -> None:
        """Begin again."""
        self.first_s.clear()
        self.texts.clear()


def seconds_of(duration: str) -> float:
    """A duration of Prometheus in seconds: "5m" is 300."""
    return sum(int(count) * UNITS_S[unit] for count, unit in DURATION.findall(duration))


def scaled_rules(text: str, factor: float) -> dict[str, Any]:
    """The rules of a file, with windows, `for` and `keep_firing_for` divided by `factor`."""

    def scaled(duration: str) -> str:
        return f"{round(seconds_of(duration) / factor * 1000)}ms"

    found: dict[str, Any] = YAML(typ="safe").load(text)
    for group in found["groups"]:
        for rule in group["rules"]:
            rule["expr"] = re.sub(r"\[(\w+)\]", lambda window: f"[{scaled(window[1])}]", rule["expr"])
            rule |= {name: scaled(rule[name]) for name in ("for", "keep_firing_for") if name in rule}
    return found


def prometheus_program() -> str:
    """Path of the server. Raises `ChildError` without one."""
    own = shutil.which("prometheus", path=str(Path(sys.executable).parent))
    if found := own or shutil.which("prometheus"):
        return found
    raise ChildError("prometheus is missing; run `make promtool`")


@dataclass(slots=True)
class Alerts:
    """The alerts of a running Prometheus: when an expression was first true, and when the alert first fired."""

    url: str
    true: Sightings = field(default_factory=Sightings)
    firing: Sightings = field(default_factory=Sightings)

    async def follow(self) -> None:
        """Poll until cancelled."""
        async with httpx.AsyncClient(base_url=self.url, trust_env=False) as client:
            while True:
                try:
                    answer = await client.get("/api/v1/alerts")
                except httpx.TransportError:
                    answer = None
                now_s = time.perf_counter()
                for alert in answer.json()["data"]["alerts"] if answer and answer.status_code == 200 else ():
                    name, text = alert["labels"]["alertname"], alert["annotations"]["summary"]
                    self.true.add(name, text, now_s)
                    if alert["state"] == "firing":
                        self.firing.add(name, text, now_s)
                await asyncio.sleep(POLL_S)


@asynccontextmanager
async def prometheus(admin_url: str, factor: float, folder: Path) -> AsyncIterator[Alerts]:
    """Run a server that scrapes this admin listener every second."""
    rules, config = folder / "rules.yaml", folder / "prometheus.yaml"
    labels = {"namespace": "llm", "pod": "router-0"}
    target = {"targets": [admin_url.removeprefix("http://")], "labels": labels}
    every = {"scrape_interval": "1s", "evaluation_interval": "1s", "scrape_timeout": "1s"}
    yaml = YAML(typ="safe")
    yaml.dump(scaled_rules(RULES.read_text(), factor), rules)
    job = {"job_name": "warmroute", "static_configs": [target]}
    yaml.dump({"global": every, "rule_files": [str(rules)], "scrape_configs": [job]}, config)
    port = free_port()
    command = [
        *(prometheus_program(), f"--config.file={config}", f"--storage.tsdb.path={folder / 'prometheus'}"),
        *(f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"),
    ]
    url = f"http://127.0.0.1:{port}"
    with logged_process("prometheus", command, folder) as server:
        async with httpx.AsyncClient(trust_env=False) as client:

            async def ready() -> bool | None:
                try:
                    return (await client.get(f"{url}/-/ready")).status_code == 200 or None
                except httpx.TransportError:
                    return None

            await server.until(ready)
        alerts = Alerts(url)
        following = asyncio.create_task(alerts.follow())
        try:
            yield alerts
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


class _Snapshot(msgspec.Struct):
    notices: list[dict[str, Any]]


async def follow_page(admin_url: str, shown: Sightings) -> None:
    """Read the snapshots of the page until cancelled, and note the lines at its top."""
    decode = msgspec.json.Decoder(_Snapshot).decode
    client = httpx.AsyncClient(base_url=admin_url, trust_env=False, timeout=None)
    async with client, client.stream("GET", "/ui/events") as stream:
        async for line in stream.aiter_lines():
            if line.startswith("data: "):
                now_s = time.perf_counter()
                for notice in decode(line.removeprefix("data: ")).notices:
                    shown.add(notice["about"], notice["text"], now_s)


@dataclass(frozen=True, slots=True)
class Screen:
    """A browser that has the page open."""

    page: Any

    async def lines(self) -> Sequence[str]:
        """The lines at the top, as displayed."""
        found: Sequence[str] = await self.page.locator("#notices li span").all_inner_texts()
        return found

    async def save(self, path: Path) -> None:
        """Write a screenshot."""
        await self.page.screenshot(path=path)


@asynccontextmanager
async def screen(admin_url: str) -> AsyncIterator[Screen]:
    """Open the page in the system's Chromium, driven by the Playwright that `make live-ui` installs."""
    sys.path.insert(0, str(PLAYWRIGHT))
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = await browser.new_page(viewport={"width": 1280, "height": 1000})
        await page.goto(f"{admin_url}/ui")
        await page.wait_for_selector(".tile")
        yield Screen(page)
        await browser.close()


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
REGULAR, FLOODS, READERS = "regular", "flood", "readers"


# --- one incident ---


def _config(incident: Incident, pods: Sequence[str], redis: RedisProcess | None, *, continues: bool) -> dict[str, Any]:
    config = priced_config(pods, replace(PLAN, continues=continues)) | {"log": {"requests": False}}
    if incident.split:
        config |= {"policy": "cost_aware_pd", "links": {"elsewhere": {"t0_ms": 0.4, "gb_per_s": LINK_GB_PER_S}}}
        for number, pod in enumerate(config["pods"]):
            pod |= {"role": "prefill" if number < PREFILL_PODS else "decode", "handoff": "nixl"}
    if redis is not None:
        config["index"] = {"redis": {"url": redis.url}}
    return config


@asynccontextmanager
async def _router(config: Mapping[str, Any], folder: Path, *, publisher: bool) -> AsyncIterator[RouterUrls]:
    """Run a router with policies of its own; yields its two URLs once it trusts all pods."""
    policies, path = folder / "policies", folder / "publisher.yaml"
    path.write_text(json.dumps(config))
    policies.mkdir()
    for one in shipped("policies").glob("*.yaml"):
        (policies / one.name).write_text(one.read_text())
    async with AsyncExitStack() as stack:
        if publisher:
            arguments = ["publish", "--config", str(path), "--port", str(free_port())]
            stack.enter_context(child("publisher", arguments, folder))
        options = ("--policies", str(policies))
        yield await stack.enter_async_context(configured_router("router", config, folder, options=options))


@dataclass(slots=True)
class Load:
    """Tenants that send sessions to the router."""

    url: str
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    drivers: dict[str, LoadDriver] = field(default_factory=dict)

    def start(self, tenant: str, seed: int) -> LoadDriver:
        """Start a tenant's sessions, until `stop`."""
        duration_s = WARM_S + WATCHED_S
        mix = sessions(seed, duration_s=duration_s, sessions_per_s=SESSIONS_PER_S)
        random = Random(seed)
        if tenant == FLOODS:
            mix = mixed_sessions(random, FLOOD, poisson(random, WATCHED_S, FLOOD_PER_S))
        if tenant == READERS:
            mix = mixed_sessions(random, DOCUMENTS, poisson(random, duration_s, DOCUMENTS_PER_S))
        driver = self.drivers[tenant] = LoadDriver([self.url], lambda _: None, with_header(f"x-tenant-id: {tenant}"))
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
