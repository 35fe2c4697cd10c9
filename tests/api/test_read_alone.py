"""A large body is read in one turn of the event loop and decided in another."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from router.frontends.http.exchange import Exchange
from router.frontends.http.openai_edge import READ_ALONE_BYTES
from router.request.context import RequestContext
from tests.api.test_openai_edge import Client, make_edge


async def begun(*sizes: int) -> list[int]:
    """In which order requests begin whose bodies have these sizes and come in one turn."""
    order: list[int] = []

    async def forward(_context: RequestContext, client: Exchange) -> None:
        order.append(cast(Any, client).number)

    edge, tasks = make_edge(forward=forward), []
    for number, size in enumerate(sizes):
        client = cast(Any, Client())
        client.number = number
        client.body = b'{"model":"m","query":"' + b"x" * size + b'"}'
        tasks.append(asyncio.create_task(edge.serve(client.sent_to(edge))))
    await asyncio.gather(*tasks)
    return order


@pytest.mark.anyio
async def test_others_come_between_the_reading_and_the_decision_of_a_large_body() -> None:
    assert await begun(READ_ALONE_BYTES, 1) == [1, 0]
    assert await begun(1, 1) == [0, 1]
