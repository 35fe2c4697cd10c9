"""Tenants with quotas, over real sockets: what a refused client sees, and three routers that share them over Redis."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from loadtest.commands.child_processes import JSON_CALL
from tests.stories.conftest import Deploy

pytestmark = [pytest.mark.net, pytest.mark.anyio]
CHAT = "/v1/chat/completions"
CLIENT = {"authorization": "Bearer key-acme"}


@pytest.fixture
def tenants(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a file with the tenant `acme` and these quotas."""

    def write(quotas: str) -> Path:
        file = tmp_path / "tenants.yaml"
        digest = sha256(b"key-acme").hexdigest()
        file.write_text(f"tenants:\n- {{name: acme, keys: [{digest}], quotas: [{quotas}]}}\n")
        return file

    return write


async def chat(client: httpx.AsyncClient, text: str = "Hello", **fields: object) -> httpx.Response:
    body = {"model": "demo", "messages": [{"role": "user", "content": text}], "max_tokens": 4, **fields}
    return await client.post(CHAT, json=body, headers=CLIENT)


def limits_in(answer: httpx.Response, prefix: str = "x-ratelimit-") -> dict[str, str]:
    return {name.removeprefix(prefix): value for name, value in answer.headers.items() if name.startswith(prefix)}


async def test_an_openai_client_sees_its_limits_and_when_to_retry(
    deploy: Deploy, tenants: Callable[[str], Path]
) -> None:
    """In headers of answers and of the 429, which its SDK understands."""
    file = tenants("{requests_per_minute: 2, output_tokens_per_minute: 1000}")
    async with deploy(1, tenants=file) as deployment:
        first = limits_in(await chat(deployment.client))
        assert first.items() >= {"limit-requests": "2", "remaining-requests": "1", "limit-tokens": "1000"}.items()
        assert first["remaining-tokens"] == "996" and first["reset-requests"] == "1m1s"
        second = limits_in(await chat(deployment.client))
        assert (second["remaining-requests"], second["remaining-tokens"]) == ("0", "992")
        refused = await chat(deployment.client)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["type"]) == (429, "rate_limit_exceeded", "requests")
        assert 55 <= int(refused.headers["retry-after"]) <= 61
        assert limits_in(refused)["remaining-requests"] == "0"
        async with openai.AsyncOpenAI(base_url=f"{deployment.url}/v1", api_key="key-acme", max_retries=0) as client:
            with pytest.raises(openai.RateLimitError):
                await client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "Hi"}])
        text = (await deployment.admin.get("/metrics", headers=JSON_CALL)).text
        assert 'warmroute_quota_refusals_total{limit="requests",tenant="acme"} 2.0' in text


async def test_an_anthropic_client_sees_its_limits(deploy: Deploy, tenants: Callable[[str], Path]) -> None:
    """With the names and the error of that API."""
    file = tenants("{requests_per_minute: 1, uncached_prompt_tokens_per_minute: 5000, output_tokens_per_minute: 1000}")
    async with deploy(1, tenants=file) as deployment:
        body: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        served = await deployment.client.post("/v1/messages", json=body, headers=CLIENT)
        found = limits_in(served, "anthropic-ratelimit-")
        assert served.status_code == 200 and found["requests-limit"] == "1" and found["input-tokens-limit"] == "5000"
        assert found["output-tokens-remaining"] == "996" and datetime.fromisoformat(found["requests-reset"]).tzinfo
        refused = await deployment.client.post("/v1/messages", json=body, headers=CLIENT)
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
        async with anthropic.AsyncAnthropic(base_url=deployment.url, api_key="key-acme", max_retries=0) as client:
            with pytest.raises(anthropic.RateLimitError):
                await client.messages.create(**body)


async def test_cached_prompt_tokens_cost_nothing(deploy: Deploy, tenants: Callable[[str], Path]) -> None:
    """What a request really cost corrects what was expected: the second prompt is cached nearly completely."""
    text = "A long document about stamps. " * 60
    async with deploy(1, tenants=tenants("{uncached_prompt_tokens_per_minute: 2000}")) as deployment:
        left = []
        for _ in range(4):
            assert (await chat(deployment.client, text)).status_code == 200
            left.append(int(limits_in(await chat(deployment.client, "Hi", max_tokens=1))["remaining-tokens"]))
        assert left[0] < 1700 and left[0] - left[-1] < 100
        refused = await chat(deployment.client, "Another one about coins. " * 600)
        error = refused.json()["error"]
        assert (refused.status_code, error["type"]) == (429, "tokens") and "never" in error["message"]
        assert refused.headers["x-should-retry"] == "false" and "retry-after" not in refused.headers
