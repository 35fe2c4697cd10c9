"""`make screenshots`: writes the pictures of `docs/observe.md`: the operators' page over a live fleet of mock engines.

python -m tests.live_ui.screenshots [FOLDER]     every view, light, dark and at the width of a phone, for a look
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from loadtest.commands.child_processes import FleetPlan, configured_router, mock_fleet, router_config, temporary_folder
from loadtest.traffic.chat_workload import sessions
from loadtest.traffic.load_driver import drive
from tests.live_ui.conftest import HOME

sys.path.insert(0, str(HOME / "site"))
PICTURES = Path(__file__).resolve().parents[2] / ".github"
PLAN = FleetPlan(pods=6, num_blocks=2560)
LOAD_S, SESSIONS_PER_S = 90.0, 2.0
DEADLINE_MS = 20_000
WIDE, PHONE, HEIGHT, README_HEIGHT = 1280, 360, 800, 1640
VIEWS = ("now", "requests", "prefixes", "policies", "health")
Picture = tuple[str, int, str]
README: tuple[Picture, ...] = (
    ("now", WIDE, "light"),
    ("requests", WIDE, "dark"),
    ("prefixes", WIDE, "light"),
    ("now", PHONE, "dark"),
)
"""(view, width, colour scheme) of each picture of `docs/observe.md`."""


async def main(folder: Path | None) -> None:
    """Serve requests for `LOAD_S`, then take the pictures: of the page, or into a folder of every view."""
    from playwright.async_api import async_playwright

    every: list[Picture] = [
        (view, width, scheme) for view in VIEWS for width in (WIDE, PHONE) for scheme in ("light", "dark")
    ]
    async with AsyncExitStack() as stack:
        temporary = stack.enter_context(temporary_folder("screenshots"))
        pods = await stack.enter_async_context(mock_fleet(PLAN, temporary))
        admin = {"gpu_hour_price": 2.5, "currency": "USD"}
        config = router_config(pods, PLAN) | {"admin": admin, "receipts": {"prompts": True}}
        urls = await stack.enter_async_context(configured_router("router", config, temporary))
        loading = asyncio.create_task(_load(urls.public))
        playwright = await stack.enter_async_context(async_playwright())
        browser = await playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        try:
            (folder or PICTURES).mkdir(parents=True, exist_ok=True)
            await _take(browser, urls.admin, folder or PICTURES, every if folder else README)
        finally:
            await browser.close()
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)


async def _load(url: str) -> None:
    """Serve sessions until cancelled."""
    await drive(url, PLAN.model, sessions(7, duration_s=3600, sessions_per_s=SESSIONS_PER_S), lambda *_: None)


async def _take(browser: Any, url: str, folder: Path, pictures: Iterable[Picture]) -> None:
    """Open a page for each width and scheme, and after `LOAD_S` take its pictures."""
    wanted: dict[tuple[int, str], list[str]] = {}
    for view, width, scheme in pictures:
        wanted.setdefault((width, scheme), []).append(view)
    pages = {}
    for width, scheme in wanted:
        context = await browser.new_context(viewport={"width": width, "height": HEIGHT}, color_scheme=scheme)
        context.set_default_timeout(DEADLINE_MS)
        pages[width, scheme] = await context.new_page()
        await pages[width, scheme].goto(f"{url}/ui")
    await asyncio.sleep(LOAD_S)
    for (width, scheme), views in wanted.items():
        page = pages[width, scheme]
        await page.bring_to_front()
        for view in views:
            await _show(page, view)
            height = await page.evaluate("document.body.scrollHeight")
            height = height if folder != PICTURES else min(height, README_HEIGHT)
            await page.set_viewport_size({"width": width, "height": height})  # tiles out of sight are not drawn
            await page.screenshot(path=folder / f"page-{view}-{width}-{scheme}.png")
            await page.set_viewport_size({"width": width, "height": HEIGHT})


async def _show(page: Any, view: str) -> None:
    """Open a view when it has data, in Requests one of the requests, in Policies a preview."""
    await page.click(f"nav a[href='#{view}']")
    if view == "requests":
        await page.locator("#recent tr:has(td:text-is('ok')) a").last.click()
        await page.wait_for_selector("#request .bar.actual")
    if view == "policies":
        await page.wait_for_selector("#active details")
        await page.fill("#whatif-text", "Which pod holds my prefix?")
        await page.click("#whatif button")
        await page.wait_for_selector("#whatif-result .bar")
    if view == "health":
        await page.wait_for_selector("#phases th:has-text('settle')")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
