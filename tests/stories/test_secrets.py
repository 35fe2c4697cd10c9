"""A running router with a Redis that requires a password never prints it: not in logs, pages, receipts or errors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from loadtest.commands.child_processes import (
    FleetPlan,
    RouterUrls,
    child,
    configured_router,
    router_config,
)
from loadtest.mock_engine.mock_config import MockEngineConfig
from loadtest.mock_engine.mock_engine import running_engines
from router.admission.tenant import Tenant, salt_of
from tests.kit.deadlines import DEADLINE_S
from tests.redis_process import RedisProcess, redis_process
from tests.redis_servers.server import binaries, free_port

pytestmark = [pytest.mark.net, pytest.mark.anyio]

CANARY = "canary7sesame"
CLIENT_KEY = "sk-canary-of-a-client"
TOKEN = "canary-header.canary-claims.canary-signature"
TENANT = "canary-tenant"
CLIENT_SALT = "canary-salt"
SALTS = {CLIENT_SALT, salt_of(TENANT, ""), Tenant(salt=salt_of(TENANT, "")).salted(CLIENT_SALT)}
DIGEST = sha256(CLIENT_KEY.encode()).hexdigest()
PLAN = FleetPlan(pods=1, num_blocks=512, time_scale=0.0)
PAGES = ("/metrics", "/admin/pods", "/admin/policies", "/readyz", "/v1/models", "/admin/explain/request-1")
OWN_FILES = ("router.yaml", "key", "tenants.yaml")
"""Files that the test has written."""


@pytest.fixture
def redis() -> Iterator[RedisProcess]:
    """A server that requires the canary as its password."""
    with redis_process(next(iter(binaries())), requirepass=CANARY) as server:
        yield server


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not await holds():
            await asyncio.sleep(0.05)


async def test_a_running_router_and_publisher_print_no_secret(
    engine_config: Callable[..., MockEngineConfig], redis: RedisProcess, tmp_path: Path
) -> None:
    """While Redis accepts and refuses its password; nor keys of pods and clients, digests of keys, or salts."""
    seen: dict[str, str] = {}
    async with running_engines([engine_config()]) as engines:
        url = redis.url.replace("redis://", f"redis://:{CANARY}@")
        config = router_config([engine.url for engine in engines], PLAN) | settings(url, tmp_path)
        config["models"][0]["fast_tokenizer"] = False  # takes two seconds to load
        config["pods"][0]["auth"] = {"bearer_file": key_file(tmp_path)}
        async with (
            configured_router("router", config, tmp_path, free_port(), free_port()) as router,
            httpx.AsyncClient() as client,
        ):
            port = free_port()
            options = ["publish", "--config", str(tmp_path / "router.yaml"), "--port", str(port)]
            with child("publisher", options, tmp_path) as publisher:
                seen |= await pages(client, router)
                seen |= await wrong_requests(client, router, url)

                async def refused() -> bool:
                    logs = (publisher.log, tmp_path / "router.log")
                    return all(b"invalid username-password pair" in log.read_bytes() for log in logs)

                await change_password(redis.port)
                await until(refused)
                seen |= {f"{name} without Redis": text for name, text in (await pages(client, router)).items()}
    seen |= files(tmp_path)
    assert len(seen["receipts.jsonl"]) > 100 and len(seen["router.log"]) > 100
    secrets = {CANARY, CLIENT_KEY, DIGEST, *TOKEN.split("."), *SALTS}
    assert not [name for name, text in seen.items() if any(secret in text for secret in secrets)]


def files(folder: Path) -> dict[str, str]:
    """All files that the processes have written."""
    return {path.name: path.read_text() for path in folder.iterdir() if path.name not in OWN_FILES}


def key_file(folder: Path) -> str:
    """A file with the key for a pod."""
    file = folder / "key"
    file.write_text(CANARY)
    return str(file)


def settings(url: str, folder: Path) -> dict[str, Any]:
    """Sections of the router's configuration."""
    provider = f"oidc: [{{issuer: 'http://127.0.0.1:{free_port()}', audiences: [router]}}]"
    (folder / "tenants.yaml").write_text(f"tenants: [{{name: {TENANT}, keys: [{DIGEST}]}}]\n{provider}\n")
    receipts = {"file": str(folder / "receipts.jsonl")}
    return {
        "index": {"redis": {"url": url, "ready_timeout_s": 1}},
        "receipts": receipts,
        "tenants": "tenants.yaml",
    }


async def pages(client: httpx.AsyncClient, router: RouterUrls) -> dict[str, str]:
    """All pages of the router, after a request with a key."""
    body = {"model": PLAN.model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
    body["cache_salt"] = CLIENT_SALT
    headers = {"authorization": f"Bearer {CLIENT_KEY}", "x-request-id": "request-1"}
    answer = await client.post(f"{router.public}/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    refused = await client.get(f"{router.public}/v1/models", headers={"authorization": f"Bearer {TOKEN}"})
    assert refused.status_code == 401
    found = {f"{url}{path}": (await client.get(f"{url}{path}")).text for url in router for path in PAGES}
    return found | {"answer": f"{answer.headers}{answer.text}{refused.headers}{refused.text}"}


async def wrong_requests(client: httpx.AsyncClient, router: RouterUrls, url: str) -> dict[str, str]:
    """Answers to admin calls with a secret in the wrong place."""
    bodies = [{"url": f"http://me:{CANARY}@h"}, {"url": f"http://:{CANARY}"}, {"urll": url}, {"url": [url]}, [url], url]
    answers = [await client.post(f"{router.admin}/admin/pods", json=body) for body in bodies]
    assert {answer.status_code for answer in answers} == {400}
    return {f"answer to {number}": answer.text for number, answer in enumerate(answers)}


async def change_password(port: int) -> None:
    """Refuse the password from now on, and close all connections."""
    async with Redis(port=port, password=CANARY) as admin:
        await admin.config_set("requirepass", "another")
        await admin.client_kill_filter(_type="normal", skipme=True)
