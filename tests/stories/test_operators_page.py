"""The operators' page over real connections: snapshots while requests are served, and an end when the router stops."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
from structlog.testing import capture_logs

from loadtest.mock_engine.faults import Fault, FaultKind
from tests.kit.deadlines import DEADLINE_S
from tests.stories.conftest import Deploy

pytestmark = [pytest.mark.net, pytest.mark.anyio]

CHAT = [{"role": "user", "content": "Which pod holds my prefix? This question is long enough to fill a block or two."}]
WORDS = ("id", "model", "pod", "policy", "workload", "result", "prompt_tokens")


async def snapshots(client: httpx.AsyncClient) -> AsyncIterator[dict[str, Any]]:
    """The snapshots of one viewer, until the router ends the stream."""
    async with asyncio.timeout(DEADLINE_S), client.stream("GET", "/ui/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        async for line in answer.aiter_lines():
            if line:
                yield msgspec.json.decode(line.removeprefix("data: "))


async def test_the_page_and_its_data_are_served(deploy: Deploy) -> None:
    """The first snapshots have the pods, later ones the request, its decision and its tokens."""
    async with deploy() as deployment:
        page = await deployment.admin.get("/ui")
        assert page.status_code == 200 and "sha256-" in page.headers["content-security-policy"]
        assert page.text.startswith("<!doctype html>")
        root = await deployment.admin.get("/")
        assert (root.status_code, root.headers["location"]) == (307, "/ui")
        answer = await deployment.chat(CHAT)
        async for found in snapshots(deployment.admin):
            if found["decisions"] and "result" in found["decisions"][0]:
                break
        assert len(found["pods"]) == 2
        assert found["models"] == ["demo"]
        assert found["decisions"][0]["id"] == answer.headers["x-request-id"]
        assert found["since_start"]["requests"] == 1 and found["since_start"]["token_shares"]["available"] == 0


async def test_the_page_has_the_words_of_the_log(deploy: Deploy, capsys: pytest.CaptureFixture[str]) -> None:
    """They describe a request, and the state of a pod with its reason."""
    with capture_logs() as lines:
        async with deploy(pods=1) as deployment:
            await deployment.chat(CHAT)
            deployment.engines[0].inject(Fault(kind=FaultKind.REFUSE))
            await deployment.until(lambda: any(line.get("new") == "ejected" for line in lines))
            found = await anext(snapshots(deployment.admin))
    request = next(json.loads(line) for line in capsys.readouterr().err.splitlines() if '"request"' in line)
    decision, pod = found["decisions"][0], found["pods"][0]
    assert {name: decision[name] for name in WORDS} == {name: request[name] for name in WORDS}
    assert pod["state"] == next(line["new"] for line in lines if line.get("new") == "ejected")
    assert pod["state_reason"] in {line.get("reason") for line in lines if line.get("pod") == pod["id"]}


async def test_a_viewer_does_not_delay_the_end_of_the_router(deploy: Deploy) -> None:
    """Its stream is completed, not cut off."""
    async with (
        deploy(pods=1, wait=False) as deployment,
        httpx.AsyncClient(base_url=deployment.admin.base_url, timeout=DEADLINE_S) as client,
    ):
        seen: list[dict[str, Any]] = []
        watching = asyncio.create_task(_collect(snapshots(client), seen))
        await deployment.until(lambda: bool(seen))
        assert deployment.server is not None
        deployment.server.should_exit = True
        await asyncio.wait_for(watching, DEADLINE_S)


async def _collect(events: AsyncIterator[dict[str, Any]], seen: list[dict[str, Any]]) -> None:
    async for event in events:
        seen.append(event)
