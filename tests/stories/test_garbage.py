"""Finished requests leave no reference cycles.

The garbage collector stops the router for longer the more objects it must search.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from weakref import ref

import httpx
import pytest

from tests.stories.conftest import Deploy, Deployment
from tests.stories.test_failures import SLOW
from tests.stories.test_first_light import opening

pytestmark = [pytest.mark.net, pytest.mark.anyio]


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Disable the cycle collector for the test."""
    gc.disable()
    yield
    gc.enable()


async def visit(deployment: Deployment, *, leave: bool) -> list[ref[object]]:
    """One client with its own connection reads a stream to the end, or leaves after its first piece. Returns the
    router's objects for it: both ends of the connection and the tasks."""
    assert deployment.server
    body = {"model": "demo", "messages": opening("dunes"), "max_tokens": 20, "stream": True}
    before = set(deployment.server.server_state.connections)
    async with (
        httpx.AsyncClient(base_url=deployment.url, trust_env=False) as client,
        client.stream("POST", "/v1/chat/completions", json=body) as answer,
    ):
        connections = deployment.server.server_state.connections - before
        left: list[ref[object]] = [ref(one) for one in (*connections, *deployment.server.server_state.tasks)]
        async for _ in answer.aiter_raw():
            if leave:
                break
    return left


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("leave", [False, True])
async def test_disconnected_clients_leave_no_reference_cycles(deploy: Deploy, leave: bool) -> None:
    """Neither complete nor abandoned streams."""
    async with deploy(pods=1, engine=SLOW) as deployment:
        for _ in range(2):
            left = await visit(deployment, leave=leave)
            assert len(left) == 2
            await deployment.until(lambda left=left: not any(one() for one in left))
