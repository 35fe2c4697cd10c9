"""The operators' page in a browser: every view, at two widths and in two colour schemes, and hostile names."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.live_ui.conftest import HOSTILE, SCREENSHOTS, TOKEN

pytestmark = [pytest.mark.net, pytest.mark.anyio]

DEADLINE_MS, DEADLINE_S = 20_000, 180
VIEWS = ("now", "requests", "prefixes", "policies", "health")


async def opened(browser: Any, url: str, path: str = "/ui", **options: Any) -> Any:
    """A page in a context of its own. `page.faults` are its errors and its requests to other places."""
    context = await browser.new_context(**options)
    context.set_default_timeout(DEADLINE_MS)
    page = await context.new_page()
    page.faults = []
    page.on("console", lambda message: page.faults.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: page.faults.append(str(error)))
    page.on("dialog", lambda dialog: page.faults.append(dialog.message))
    page.on("request", lambda asked: None if asked.url.startswith((url, "data:")) else page.faults.append(asked.url))
    await page.goto(f"{url}{path}")
    return page


async def show(page: Any, view: str) -> None:
    """Open a view with data; one of its requests or a preview, where it has them."""
    await page.click(f"nav a[href='#{view}']")
    if view == "now":
        await page.wait_for_selector(".tile")
        await page.wait_for_selector("#worth td.good, #worth td.bad")
        await page.wait_for_selector("#chart-legend li:has-text('%')")
    if view == "requests":
        await page.locator("#recent tr:has(td:text-is('ok')) a").last.click()
        await page.wait_for_selector("#request .bar.actual")
    if view == "prefixes":
        await page.wait_for_selector("#prefixes th[scope=row]")
    if view == "policies":
        await page.wait_for_selector("#active details")
        await page.fill("#whatif-text", "Which pod holds my prefix?")
        await page.click("#whatif button")
        await page.wait_for_selector("#whatif-result .bar")
    if view == "health":
        await page.wait_for_selector("#phases th:has-text('settle')")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
async def test_every_view_is_readable_and_accessible(
    browser: Any, admin_url: str, axe: str, width: int, scheme: str
) -> None:
    """Nothing is wider than the screen, axe-core finds nothing, nothing comes from elsewhere."""
    async with asyncio.timeout(DEADLINE_S):
        page = await opened(browser, admin_url, viewport={"width": width, "height": 800}, color_scheme=scheme)
        for view in VIEWS:
            await show(page, view)
            await page.screenshot(path=SCREENSHOTS / f"{view}-{width}-{scheme}.png", full_page=True)
            assert await page.evaluate("document.documentElement.scrollWidth") <= width, view
            await page.evaluate(axe)
            found = await page.evaluate("axe.run().then((found) => found.violations)")
            assert [(one["id"], [node["html"] for node in one["nodes"]][:3]) for one in found] == [], view
        assert page.faults == []
        await page.context.close()


async def test_figures_that_are_missing_say_why_and_what_to_switch_on(browser: Any, admin_url: str) -> None:
    """The engines report neither cached tokens nor usage, and prompts were not read."""
    async with asyncio.timeout(DEADLINE_S):
        async with (
            httpx.AsyncClient(trust_env=False) as client,
            client.stream("GET", f"{admin_url}/ui/events") as events,
        ):
            line = await anext(line async for line in events.aiter_lines() if line.startswith("data: "))
        snapshot = json.loads(line.removeprefix("data: "))
        for figures in (snapshot["since_start"], snapshot["last_minute"]):
            figures |= {"requests": 4, "unread_prompts": 4, "saved_s": {}, "saved_gpu_s": {}}
            figures["token_shares"] |= {"delivered": None}
            one = {"requests": 4, "failures": 0, "ttft_s": {"count": 4, "p50": 0.1, "p95": 0.2}, "tpot_s": {}}
            figures["classes"] = {"chat": one}
        page = await browser.new_page()
        body = f"data: {json.dumps(snapshot)}\n\n"
        await page.route("**/ui/events", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
        await page.goto(f"{admin_url}/ui")
        await page.wait_for_selector("#classes td")
        delivered, tpot = await page.inner_text("#no-delivered"), await page.inner_text("#no-tpot")
        assert "--enable-prompt-tokens-details" in delivered and "--enable-cache-report" in delivered
        assert "TPOT is unknown" in tpot
        assert "no prompt was read" in await page.inner_text("#worth")
        await page.close()


async def test_names_that_contain_html_are_text(browser: Any, admin_url: str) -> None:
    """The id of a pod everywhere, and a request id in the address."""
    async with asyncio.timeout(DEADLINE_S):
        page = await opened(browser, admin_url)
        await show(page, "now")
        assert await page.locator(".tile h4 span").first.text_content() == HOSTILE
        for view in VIEWS[1:]:
            await show(page, view)
        await page.goto(f"{admin_url}/ui#requests/%3Cimg%20src%3Dx%20onerror%3Dwindow.hacked%3D1%3E")
        await page.wait_for_selector("#request-error:has-text('<img src=x')")
        assert await page.evaluate("[window.hacked, document.images.length]") == [None, 0]
        refused = await page.evaluate("(() => { try { document.body.innerHTML = 'x'; } catch { return true; } })()")
        assert refused is True
        await page.context.close()


async def test_the_page_is_used_by_keyboard(browser: Any, admin_url: str) -> None:
    """A view is opened with Tab and Enter; then its heading has the focus."""
    async with asyncio.timeout(DEADLINE_S):
        page = await opened(browser, admin_url)
        await page.wait_for_selector(".tile")
        for _ in range(3):  # the link to the content, Now, Requests
            await page.keyboard.press("Tab")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("#title-requests:focus")
        await page.focus("#recent a")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("#request .bar")
        assert (await page.evaluate("document.activeElement.textContent")).startswith("Request ")
        await page.context.close()


async def test_a_request_is_found_by_its_id_and_shows_its_retries(browser: Any, admin_url: str) -> None:
    """By keyboard, at the width of a phone: candidates, the runner-up, expected and actual TTFT, and what failed."""

    async def with_a_failure(route: Any) -> None:
        found = await (await route.fetch()).json()
        failure = {"pod": "pod-9", "error": "connect_failed", "message": "refused"}
        found["receipt"]["failures"] = [failure]
        await route.fulfill(json=found)

    async with asyncio.timeout(DEADLINE_S):
        page = await opened(browser, admin_url, viewport={"width": 360, "height": 800})
        await page.route("**/admin/explain/*", with_a_failure)
        await page.goto(f"{admin_url}/ui#requests")
        request_id = await page.locator("#recent tr:has(td:text-is('ok')) a").last.text_content()
        await page.focus("#search-id")
        await page.keyboard.type(request_id)
        await page.keyboard.press("Enter")
        await page.wait_for_selector("#request .bar.actual")
        shown = await page.locator("#request").inner_text()
        for wanted in (request_id, "chosen", "runner-up", "expected", "actual", "pod-9: connect_failed, refused"):
            assert wanted in shown
        assert await page.evaluate("document.documentElement.scrollWidth") <= 360
        for name in ("Costs in milliseconds", "Inputs of the formulas", "Time in each phase"):
            await page.locator(f"summary:has-text('{name}')").focus()
            await page.keyboard.press("Enter")
        await page.screenshot(path=SCREENSHOTS / "request-360-open.png", full_page=True)
        assert await page.evaluate("document.documentElement.scrollWidth") <= 360
        await page.context.close()


async def test_operators_sign_in_with_a_token(browser: Any, signed_url: str) -> None:
    """A wrong one is refused; a right one lasts until the operator signs out, also when the page is loaded again."""
    async with asyncio.timeout(DEADLINE_S):
        page = await opened(browser, signed_url)
        await page.fill("#token", "wrong")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("#signin-error:has-text('not accept')")
        await page.fill("#token", TOKEN)
        await page.keyboard.press("Enter")
        await page.wait_for_selector("#dot.live")
        await page.reload()
        await page.wait_for_selector("#dot.live")
        await page.click("#signout")
        await page.wait_for_selector("#signin:visible")
        assert await page.evaluate("sessionStorage.length") == 0
        await page.context.close()
