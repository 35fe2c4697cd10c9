"""The site of `docs/` in a browser, as `make docs` builds it: two widths, two colour schemes, and its search."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.live_ui.conftest import SCREENSHOTS
from tests.live_ui.test_page import opened

pytestmark = [pytest.mark.net, pytest.mark.anyio]

ROOT = Path(__file__).parents[2]
PAGES = (
    "index",
    "questions",
    "first-fleet",
    "how-it-decides",
    "tenants",
    "sizing",
    "troubleshooting",
    "reference/configuration",
    "repository/helm/RUNBOOK",
    "repository/loadtest/results/index",
)


@pytest.fixture(scope="module")
def site_url() -> Iterator[str]:
    subprocess.run(["make", "-o", ".venv/.ready", "docs"], cwd=ROOT, check=True)
    with ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(ROOT / "site"))
    ) as server:
        Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
async def test_pages_are_readable_and_accessible(
    browser: Any, site_url: str, axe: str, width: int, scheme: str
) -> None:
    """Nothing is wider than the screen, axe-core finds nothing, nothing comes from elsewhere."""
    page = await opened(browser, site_url, "/", viewport={"width": width, "height": 800}, color_scheme=scheme)
    for name in PAGES:
        await page.goto(f"{site_url}/{name}.html")
        await page.wait_for_selector("h1")
        await page.screenshot(path=SCREENSHOTS / f"site-{name.replace('/', '-')}-{width}-{scheme}.png")
        assert await page.evaluate("document.documentElement.scrollWidth") <= width, name
        await page.evaluate(axe)
        found = await page.evaluate("axe.run().then((found) => found.violations)")
        assert [(one["id"], [node["html"] for node in one["nodes"]][:3]) for one in found] == [], name
    assert page.faults == []
    await page.context.close()


async def test_the_search_finds_the_page_that_answers(browser: Any, site_url: str) -> None:
    page = await opened(browser, site_url, "/")
    await page.keyboard.press("/")
    await page.keyboard.type("drain a pod")
    await page.wait_for_selector(".md-search-result__link[href*='operate.html']")
    assert page.faults == []
    await page.context.close()
