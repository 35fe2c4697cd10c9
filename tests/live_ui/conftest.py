"""A headless Chromium, and a router in front of mock engines that serves chats all the time."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtest.commands.child_processes import FleetPlan, child, configured_router, free_port, mock_fleet, router_config
from loadtest.traffic.chat_workload import sessions
from loadtest.traffic.load_driver import drive

HOME = Path(os.environ.get("WARMROUTE_LIVE_UI_HOME", Path.home() / ".cache" / "warmroute" / "ui"))
SCREENSHOTS = HOME / "screenshots"
HOSTILE = "<img src=x onerror=window.hacked=1>\"'"
"""The id of a pod."""
TOKEN = "a-token-of-the-operators"
PLAN = FleetPlan(pods=6, num_blocks=2560)

sys.path.insert(0, str(HOME / "site"))


@pytest.fixture(scope="session")
async def admin_url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """The admin listener of a router under load, one of whose pods has a hostile id."""
    folder = tmp_path_factory.mktemp("fleet")
    async with mock_fleet(PLAN, folder) as pods:
        config = router_config(pods, PLAN) | {"policy": "cost_aware"}
        config["pods"][0]["id"] = HOSTILE
        async with configured_router("router", config, folder) as urls:
            loading = asyncio.create_task(_load(urls.public))
            try:
                yield urls.admin
            finally:
                loading.cancel()
                await asyncio.gather(loading, return_exceptions=True)


@pytest.fixture
async def signed_url(tmp_path: Path) -> AsyncIterator[str]:
    """The admin listener of a router without pods that requires `TOKEN`."""
    tokens, config, port = tmp_path / "tokens", tmp_path / "router.yaml", free_port()
    tokens.write_text(TOKEN + "\n")
    config.write_text(json.dumps({"pods": [], "admin": {"bearer_file": str(tokens)}}))
    arguments = ["serve", "--config", str(config), "--port", str(free_port()), "--admin-port", str(port)]
    with child("signed", arguments, tmp_path) as router:
        url = f"http://127.0.0.1:{port}"

        async def answers() -> bool | None:
            async with httpx.AsyncClient(trust_env=False) as client:
                try:
                    return (await client.get(f"{url}/ui")).status_code == 200 or None
                except httpx.TransportError:
                    return None

        await router.until(answers)
        yield url


async def _load(url: str) -> None:
    """Serve sessions until cancelled."""
    seed = 1
    while True:
        await drive(url, PLAN.model, sessions(seed, duration_s=60, sessions_per_s=2.0), lambda *_: None)
        seed += 1


@pytest.fixture(scope="session")
async def browser() -> AsyncIterator[Any]:
    from playwright.async_api import async_playwright

    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    async with async_playwright() as playwright:
        found = await playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        yield found
        await found.close()


@pytest.fixture(scope="session")
def axe() -> str:
    """The source of axe-core."""
    return (HOME / "package" / "axe.min.js").read_text()
