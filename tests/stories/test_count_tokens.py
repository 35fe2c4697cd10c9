"""The router counts the tokens of Anthropic's messages itself, where its pods were shown to count alike."""

from __future__ import annotations

from typing import Any

import pytest

from router.types import Endpoint
from tests.stories.conftest import Deploy

pytestmark = [pytest.mark.net, pytest.mark.anyio]

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
