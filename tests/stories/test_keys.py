"""Keys, tokens and passwords: who gets in with them, and that no part of one is printed."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import openai
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
from loadtest.mock_engine.mock_engine import MockEngine, running_engines
from router.admission.tenant import Tenant, salt_of
from router.config.schema import Edge
from router.feeds.signing_keys import DISCOVERY
from tests.admission.oidc_tokens import jwk, key_set, token
from tests.kit.deadlines import DEADLINE_S
from tests.redis_process import RedisProcess, redis_process
from tests.redis_servers.server import binaries, free_port
from tests.stories.conftest import Deploy, Deployment, opening

pytestmark = [pytest.mark.net, pytest.mark.anyio]
PAGES = ("/metrics", "/admin/pods", "/admin/policies", "/readyz", "/v1/models", "/admin/explain/request-1")


# --- tokens of an identity provider ---


CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
KEY = "opaque-key"
OF_OTHER = (404, "model_not_found")


@dataclass
class Provider:
    """A small identity provider: its discovery document and its keys."""

    keys: list[dict[str, Any]] = field(default_factory=lambda: [jwk("one")])
    fetches: int = 0
    url: str = ""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(asyncio.IncompleteReadError):  # a router that stops hangs up
            await self._answer(reader, writer)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(DEADLINE_S):
            path = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
        self.fetches += 1
        body = key_set(*self.keys)
        if path == DISCOVERY:
            body = json.dumps({"issuer": self.url, "jwks_uri": f"{self.url}/keys"}).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)

    def token(self, kid: str = "one", **claims: Any) -> str:
        """One of it, valid for ten minutes."""
        return token(kid, **{"iss": self.url, "exp": int(time.time()) + 600, **claims}).decode()


@asynccontextmanager
async def running(provider: Provider, port: int = 0) -> AsyncIterator[Provider]:
    """Run it; on leaving, nothing answers any more."""
    server = await asyncio.start_server(provider.answer, "127.0.0.1", port)
    provider.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield provider
    finally:
        server.close()


def tenants(folder: Path, provider: Provider, more: str = "") -> Path:
    """A file with a tenant that may use the model and one that may not."""
    file = folder / "tenants.yaml"
    file.write_text(f"""
tenants: [{{name: acme, keys: [{sha256(KEY.encode()).hexdigest()}]}}, {{name: other, models: []}}]
oidc:
- {{issuer: "{provider.url}", audiences: [warmroute]{more}}}
""")
    return file


async def post(deployment: Deployment, key: str) -> tuple[int, str]:
    """Status and error code of a chat."""
    headers = {"authorization": f"Bearer {key}", "x-request-id": "request-1"}
    answer = await deployment.client.post("/v1/chat/completions", json=CHAT, headers=headers)
    return answer.status_code, "" if answer.status_code == 200 else answer.json()["error"]["code"]


async def test_a_token_is_admitted_as_its_tenant(deploy: Deploy, tmp_path: Path) -> None:
    """From the first request on; keys of tenants work as before. The SDK of OpenAI sends a token as its key."""
    async with running(Provider()) as provider, deploy(1, tenants=tenants(tmp_path, provider)) as deployment:
        found = [await post(deployment, key) for key in (provider.token(), provider.token(tenant="other"), KEY)]
        assert found == [(200, ""), OF_OTHER, (200, "")]
        assert await post(deployment, provider.token(tenant="nobody")) == (403, "access_denied")
        assert await post(deployment, provider.token(aud="another")) == (401, "invalid_api_key")
        async with openai.AsyncOpenAI(base_url=f"{deployment.url}/v1", api_key=provider.token()) as client:
            assert (await client.chat.completions.create(**CHAT)).choices


async def test_no_part_of_a_token_is_printed(deploy: Deploy, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Valid or not: not in the log, on pages or in receipts."""
    receipts = tmp_path / "receipts.jsonl"
    async with running(Provider()) as provider:
        file = tenants(tmp_path, provider)
        async with deploy(1, tenants=file, receipts=receipts) as deployment:
            sent = [provider.token(), provider.token("unknown"), provider.token(aud="x"), provider.token(exp=1)]
            answers = [
                await deployment.client.post(
                    "/v1/chat/completions", json=CHAT, headers={"x-api-key": one, "x-request-id": "request-1"}
                )
                for one in sent
            ]
            assert [answer.status_code for answer in answers] == [200, 401, 401, 401]
            pages = [(await deployment.admin.get(page)).text for page in PAGES]
    logs = capfd.readouterr()
    seen = [
        *pages,
        *(f"{answer.headers}{answer.text}" for answer in answers),
        logs.out + logs.err,
        receipts.read_text(),
    ]
    assert "keys of identity provider fetched" in seen[-2] and '"request-1"' in seen[-2] and "request-1" in seen[-1]
    parts = [part for one in sent for part in one.split(".")]
    assert not [part for part in parts if any(part in text for text in seen)]


# --- keys of engines ---


KEYED = {"api_key": "engine-key"}


async def test_all_requests_to_a_pod_have_the_routers_key(deploy: Deploy, tmp_path: Path) -> None:
    """Probes, self-test, scrapes and requests; the engine refuses everything else. The client's own key is not used,
    also where it would be forwarded."""
    key = tmp_path / "key"
    key.write_text("engine-key\n")

    def reach(engine: MockEngine) -> dict[str, Any]:
        return {"url": engine.url, "auth": {"bearer_file": str(key)}}

    edge = Edge(forward_headers=("authorization",))
    async with deploy(pods=1, engine=KEYED, reach=reach, edge=edge) as deployment:
        deployment.client.headers["authorization"] = "Bearer client-key"
        first, second = [await deployment.chat(opening("coves")) for _ in range(2)]
        assert (first.status_code, second.status_code) == (200, 200)
        assert int(second.headers["x-warmroute-cached-tokens"]) > 0
        await deployment.until(lambda: deployment.program.fleet.snapshot.pods[0].load.scraped_at_s > 0)


# --- what is printed ---


CANARY = "canary7sesame"
CLIENT_KEY = "sk-canary-of-a-client"
TOKEN = "canary-header.canary-claims.canary-signature"
TENANT = "canary-tenant"
CLIENT_SALT = "canary-salt"
SALTS = {CLIENT_SALT, salt_of(TENANT, ""), Tenant(salt=salt_of(TENANT, "")).salted(CLIENT_SALT)}
DIGEST = sha256(CLIENT_KEY.encode()).hexdigest()
PLAN = FleetPlan(pods=1, num_blocks=512, time_scale=0.0)
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
