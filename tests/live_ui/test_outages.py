"""What the page shows of an outage: its first line names the cause within ten seconds, in red if clients get errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtest.commands.child_processes import (
    JSON_CALL,
    FleetPlan,
    RouterUrls,
    child,
    free_port,
    mock_fleet,
    router_config,
)
from tests.live_ui.conftest import SCREENSHOTS
from tests.live_ui.test_page import DEADLINE_S, opened
from tests.redis_process import redis_process
from tests.redis_servers.server import binaries

pytestmark = [pytest.mark.net, pytest.mark.anyio]

PLAN = FleetPlan(pods=4, num_blocks=2560)
NAMED_WITHIN_S, WARM_S, REQUESTS_PER_S, AT_ONCE = 10.0, 20.0, 8.0, 40
WIDTHS = (1280, 390)
Config = dict[str, Any]
Inject = Callable[..., Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Outage:
    """How the router is configured, what happens to these of its pods, and the first line. `warm_s`: until then all is
    well."""

    line: str
    is_red: bool = True
    change: Callable[[Config, Path], None] = lambda _config, _folder: None
    begin: Mapping[str, object] | None = None
    of: Sequence[int] = ()
    warm_s: float = 0.0
    stream: bool = True
    redis: bool = False


def without_pods(config: Config, _folder: Path) -> None:
    config["pods"] = []


def other_template(config: Config, folder: Path) -> None:
    """The router's template lacks what the engines put in front."""
    template = folder / "template.jinja"
    text = Path(config["models"][0]["chat_template"]).read_text()
    template.write_text("Today is a good day. " + text)
    config["models"][0]["chat_template"] = str(template)


OUTAGES = {
    "no pod": Outage("No pod is known, so all requests fail: name engines under `pods`", change=without_pods),
    "all pods ejected": Outage(
        "No pod is ready, so all requests fail: 4 ejected; pod-0 (connection refused by",
        begin={"kind": "refuse"},
        of=range(4),
        warm_s=5.0,
    ),
    "one pod dead": Outage(
        "1 of 4 pods ejected: pod-1 (connection refused by",
        is_red=False,
        begin={"kind": "refuse"},
        of=(1,),
        warm_s=5.0,
    ),
    "template mismatch": Outage(
        "4 of 4 pods (pod-0, pod-1, pod-2 and 1 more) are routed by load only: self-test mismatch: in front the engine"
        " puts nothing, the router 'Today is a good day.'; give the model the tokenizer and chat template",
        is_red=False,
        change=other_template,
    ),
    "slow pod unstreamed": Outage(
        "Requests on pod-2 take",
        is_red=False,
        begin={"kind": "throttle", "factor": 4.0},
        of=(2,),
        warm_s=WARM_S,
        stream=False,
    ),
    "Redis dead": Outage("The shared index is", is_red=False, warm_s=5.0, redis=True),
}


@asynccontextmanager
async def router(config: Config, folder: Path) -> AsyncIterator[RouterUrls]:
    """A router from its first answer on, also without a ready pod."""
    path, port, admin_port = folder / "router.yaml", free_port(), free_port()
    path.write_text(json.dumps(config))
    urls = RouterUrls(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}")
    arguments = ["serve", "--config", str(path), "--port", str(port), "--admin-port", str(admin_port)]
    async with httpx.AsyncClient(trust_env=False) as client:
        with child("router", arguments, folder) as process:

            async def answers() -> bool | None:
                try:
                    return (await client.get(f"{urls.admin}/livez")).status_code == 200 or None
                except httpx.TransportError:
                    return None

            await process.until(answers)
            yield urls


async def ask(url: str, model: str, *, stream: bool) -> None:
    """Send chats with different prompts until cancelled."""
    limits, numbers = httpx.Limits(max_connections=AT_ONCE), count()
    async with httpx.AsyncClient(base_url=url, trust_env=False, limits=limits, timeout=30.0) as client:

        async def one(number: int) -> None:
            chat = [{"role": "user", "content": f"{number} is a number. " * 200}]
            body = {"model": model, "messages": chat, "max_tokens": 24, "stream": stream}
            await client.post("/v1/chat/completions", json=body)

        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(one(next(numbers)))
                await asyncio.sleep(1 / REQUESTS_PER_S)


async def inject(pods: Sequence[str], fault: Mapping[str, object]) -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        for url in pods:
            (await client.post(f"{url}/_fault", json=fault, headers=JSON_CALL)).raise_for_status()


async def first_line(page: Any) -> str:
    lines = await page.locator("#notices li span").all_inner_texts()
    return lines[0] if lines else ""


@pytest.mark.parametrize("name", OUTAGES)
async def test_the_first_line_names_the_cause(browser: Any, axe: str, tmp_path: Path, name: str) -> None:
    outage = OUTAGES[name]
    if outage.redis and not binaries():
        pytest.skip("no redis-server")
    async with asyncio.timeout(DEADLINE_S), AsyncExitStack() as stack:
        pods = await stack.enter_async_context(mock_fleet(PLAN, tmp_path))
        config = router_config(pods, PLAN)
        redis = stack.enter_context(redis_process()) if outage.redis else None
        if redis is not None:
            config["index"] = {"redis": {"url": redis.url}}
        outage.change(config, tmp_path)
        urls = await stack.enter_async_context(router(config, tmp_path))
        asking = asyncio.create_task(ask(urls.public, PLAN.model, stream=outage.stream))
        stack.callback(asking.cancel)
        pages = [await opened(browser, urls.admin, viewport={"width": width, "height": 844}) for width in WIDTHS]
        await asyncio.sleep(outage.warm_s)
        await inject([pods[number] for number in outage.of], outage.begin or {})
        if redis is not None:
            await asyncio.to_thread(redis.kill)
        async with asyncio.timeout(NAMED_WITHIN_S):
            while not (await first_line(pages[0])).startswith(outage.line):
                await asyncio.sleep(0.2)
        for page, width in zip(pages, WIDTHS, strict=True):
            await page.bring_to_front()
            while not (await first_line(page)).startswith(outage.line):
                await asyncio.sleep(0.2)
            assert ("red" in (await page.get_attribute("#dot", "class")).split()) is outage.is_red
            assert ("needs action" in await page.inner_text("#state")) is outage.is_red
            height = await page.evaluate("document.body.scrollHeight")
            await page.set_viewport_size({"width": width, "height": height})  # tiles out of sight are not drawn
            await page.wait_for_timeout(500)
            await page.screenshot(path=SCREENSHOTS / f"outage-{name.replace(' ', '-')}-{width}.png", full_page=True)
            assert await page.evaluate("document.documentElement.scrollWidth") <= width
            await page.evaluate(axe)
            found = await page.evaluate("axe.run().then((found) => found.violations)")
            assert [(one["id"], [node["html"] for node in one["nodes"]][:3]) for one in found] == []
            assert page.faults == []
            await page.context.close()


async def test_a_phone_shows_the_pod_and_the_ttft_of_a_decision(browser: Any, admin_url: str) -> None:
    """Inside the screen, without scrolling sideways."""
    async with asyncio.timeout(DEADLINE_S):
        page = await opened(browser, admin_url, viewport={"width": 390, "height": 844})
        await page.click("nav a[href='#requests']")
        row = page.locator("#recent tbody tr:has(td:text-is('ok'))").last
        await row.wait_for()
        await page.check("#pause")
        for column in (4, 8, 9):  # pod, actual TTFT, result
            box = await row.locator(f":nth-child({column + 1})").bounding_box()
            assert box is not None and box["x"] + box["width"] <= 390, column
        await page.screenshot(path=SCREENSHOTS / "phone-requests.png", full_page=True)
        await page.context.close()
