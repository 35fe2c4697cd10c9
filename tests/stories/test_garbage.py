"""What does a client leave behind that only the search for reference cycles would find?

Nothing: such searches stop the router, for the longer the more there is."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from weakref import ref

import httpx
import pytest

from tests.stories.conftest import City, OpenCity
from tests.stories.test_failures import SLOW
from tests.stories.test_first_light import opening

pytestmark = [pytest.mark.net, pytest.mark.anyio]


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Cycles stay for as long as the test lasts."""
    gc.disable()
    yield
    gc.enable()


async def visit(city: City, *, leave: bool) -> list[ref[object]]:
    """One client with a connection of its own, which reads a stream to the end or leaves after its first piece. Returns
    what the router had for it: its connections' ends and the tasks that served."""
    assert city.server
    body = {"model": "demo", "messages": opening("dunes"), "max_tokens": 20, "stream": True}
    before = set(city.server.server_state.connections)
    async with (
        httpx.AsyncClient(base_url=city.url, trust_env=False) as client,
        client.stream("POST", "/v1/chat/completions", json=body) as answer,
    ):
        connections = city.server.server_state.connections - before
        left: list[ref[object]] = [ref(one) for one in (*connections, *city.server.server_state.tasks)]
        async for _ in answer.aiter_raw():
            if leave:
                break
    return left


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("leave", [False, True])
async def test_clients_that_are_gone_leave_no_cycles(open_city: OpenCity, leave: bool) -> None:
    """Neither those that read everything nor those that left."""
    async with open_city(pods=1, engine=SLOW) as city:
        for _ in range(2):
            left = await visit(city, leave=leave)
            assert len(left) == 2
            await city.until(lambda left=left: not any(one() for one in left))
