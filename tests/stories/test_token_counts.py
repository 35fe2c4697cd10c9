"""The router counts tokens itself, where its pods were shown to count alike."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from router.types import Endpoint
from tests.stories.conftest import Deploy, Deployment

pytestmark = [pytest.mark.net, pytest.mark.anyio]


# --- messages of Anthropic ---


BODY: dict[str, Any] = {
    "model": "demo",
    "system": [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}, {"type": "text", "text": "Be brief."}],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "How long is this?"}]}],
}
CHAT = {
    "model": "demo",
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How long is this?"}],
}


async def test_tokens_are_counted_without_a_request_to_a_pod(deploy: Deploy) -> None:
    """As many as the engine counts for the chat that it makes of the body."""
    async with deploy(pods=1, probes={"self_test": False}, wait=False) as deployment:
        await deployment.until(deployment.all_trusted)
        answer = await deployment.client.post("/v1/messages/count_tokens", json=BODY)
        chat = await deployment.client.post("/v1/chat/completions", json=CHAT | {"max_tokens": 1})
        count = chat.json()["usage"]["prompt_tokens"]
        assert answer.json() == {"input_tokens": count, "context_management": {"original_input_tokens": count}}
        assert "x-warmroute-pod" not in answer.headers
        assert answer.headers["x-request-id"]
        metrics = (await deployment.admin.get("/metrics")).text
        assert f'endpoint="{Endpoint.COUNT_TOKENS.value}"' in metrics


# --- /tokenize ---


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Wie lang ist das? 東京"}]
LONG = "The quick brown fox jumps over the lazy dog. " * 5_000
"""More tokens than one piece of an answer has."""


async def _both(deployment: Deployment, body: dict[str, Any]) -> tuple[httpx.Response, httpx.Response]:
    """The answers of the router and of an engine."""
    body = {"model": "demo", **body}
    async with httpx.AsyncClient(base_url=deployment.engines[0].url) as engine:
        return await deployment.client.post("/tokenize", json=body), await engine.post("/tokenize", json=body)


KNOWN: list[dict[str, Any]] = [
    {"messages": MESSAGES},
    {"messages": MESSAGES, "add_generation_prompt": False},
    {"prompt": "Hello, world"},
    {"prompt": "Hello, world", "add_special_tokens": False},
    {"prompt": ""},
    {"prompt": LONG},
]
UNKNOWN: list[dict[str, Any]] = [
    {"messages": MESSAGES, "return_token_strs": True},
    {"messages": MESSAGES, "prompt": "both"},
    {"messages": []},
    {"prompt": ["one", "two"]},
    {"prompt": None},
    {},
]
"""More than tokens, and bodies that the engine may refuse, with its own words."""


async def test_the_router_answers_as_its_pods_do(deploy: Deploy) -> None:
    """With the same fields and tokens, without a request to a pod, unless it does not know the answer."""
    async with deploy(pods=1, engine={"max_model_len": 65_536}) as deployment:
        for body in KNOWN + UNKNOWN:
            own, engine = await _both(deployment, body)
            assert (own.status_code, own.json()) == (engine.status_code, engine.json()), body
            assert ("x-warmroute-pod" in own.headers) == (body in UNKNOWN), body
            assert own.headers["x-request-id"]
            assert body in UNKNOWN or own.json()["count"] == len(own.json()["tokens"])


async def test_unproven_tokens_come_from_a_pod(deploy: Deploy) -> None:
    """The pod's context is too short for the self-test, so nothing is proven."""
    async with deploy(pods=1, engine={"max_model_len": 64}, wait=False) as deployment:
        await deployment.until(lambda: deployment.ready() == 1)
        passed, _ = await _both(deployment, {"messages": MESSAGES})
        assert passed.headers["x-warmroute-pod"]
        assert passed.json()["tokens"]
