"""Many requests at once delay those of others only by the few that begin in one turn of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

from router.frontends.http.exchange import Exchange
from router.frontends.http.fair_starts import COST_BYTES, MAX_COST
from router.frontends.http.openai_edge import READ_ALONE_BYTES
from router.request.context import RequestContext
from tests.api.test_openai_edge import Client, make_edge

BURST = 5 * MAX_COST


async def begun(*owners: str, bodies: Sequence[bytes] = (), gone: int | None = None) -> list[tuple[str, int]]:
    """Who begins, and which of the clients: all have sent a request in one turn of the loop. The client `gone` leaves
    at once."""
    order: list[tuple[str, int]] = []

    async def forward(_context: RequestContext, client: Exchange) -> None:
        order.append((client.received.owner, cast(Any, client).number))

    edge = make_edge(forward=forward)
    tasks = []
    for number, owner in enumerate(owners):
        client = cast(Any, Client())
        client.number, client.disconnected, client.received.owner = number, number == gone, owner
        client.received.body = bodies[number] if bodies else client.received.body
        tasks.append(asyncio.create_task(edge.serve(client)))
    if gone is not None:
        await asyncio.sleep(0)
        tasks[gone].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not edge._starts._waiting and not edge.in_flight.used
    return order


@pytest.mark.anyio
async def test_a_burst_of_one_client_lets_others_begin_before_its_end() -> None:
    """And keeps its own order."""
    order = await begun(*["evil"] * BURST, "good")
    assert order.index(("good", BURST)) == MAX_COST
    assert [number for owner, number in order if owner == "evil"] == list(range(BURST))


@pytest.mark.anyio
async def test_large_requests_of_a_burst_count_by_their_size() -> None:
    body = b'{"model":"m","query":"' + b"x" * (3 * COST_BYTES) + b'"}'
    order = await begun(*["evil"] * BURST, "good", bodies=[body] * BURST + [b'{"model":"m"}'])
    assert order.index(("good", BURST)) == MAX_COST // 4


@pytest.mark.anyio
async def test_others_come_between_the_reading_and_the_decision_of_a_large_body() -> None:
    small, large = (b'{"model":"m","query":"' + b"x" * size + b'"}' for size in (1, READ_ALONE_BYTES))
    assert await begun("large", "small", bodies=(large, small)) == [("small", 1), ("large", 0)]
    assert await begun("first", "second", bodies=(small, small)) == [("first", 0), ("second", 1)]


@pytest.mark.anyio
async def test_clients_whom_nobody_can_tell_apart_begin_at_once() -> None:
    """Such as all those behind one proxy."""
    assert (await begun(*[""] * BURST, "good")).index(("good", BURST)) == BURST


@pytest.mark.anyio
@pytest.mark.parametrize("gone", [MAX_COST, MAX_COST + 1, BURST - 1])
async def test_a_client_that_leaves_while_it_waits_keeps_no_place(gone: int) -> None:
    order = await begun(*["evil"] * BURST, gone=gone)
    assert [number for _, number in order] == [number for number in range(BURST) if number != gone]
