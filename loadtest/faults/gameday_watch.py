"""What shows an incident: the operators' page, and a real Prometheus with the alerts of the chart.

Times are of `time.perf_counter`. Prometheus scrapes and evaluates every second. The windows and the `for` of all rules
are divided by a factor, so that a game day of minutes has the order of events of an incident of hours; thresholds stay.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
from ruamel.yaml import YAML

from helm.generate import CHART
from loadtest.commands.child_processes import ChildError, free_port, logged_process

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
    notices: list[dict[str, str]]


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
