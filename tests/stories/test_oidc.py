"""A router that accepts tokens of an identity provider, over real sockets."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import openai
import pytest

from router.feeds.signing_keys import DISCOVERY
from tests.admission.oidc_tokens import jwk, key_set, token
from tests.kit.deadlines import DEADLINE_S
from tests.stories.conftest import Deploy, Deployment

pytestmark = [pytest.mark.net, pytest.mark.anyio]
CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
KEY = "opaque-key"
OF_OTHER = (404, "model_not_found")
PAGES = ("/metrics", "/admin/pods", "/readyz", "/admin/explain/request-1")


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
