"""In which order requests are refused: what costs least, and what says least to a stranger, comes first."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, cast

import pytest

from router.admission.quotas import Quota
from router.admission.tenant import Tenant
from router.config.schema import Limits
from router.frontends.http.exchange import Exchange
from router.request.context import RequestContext
from tests.admission.test_gate import KEY, gate_of
from tests.api.test_openai_edge import make_edge
from tests.api.test_protocol import connected, read_answer
from tests.kit.cores import CoreOfPods

pytestmark = [pytest.mark.anyio, pytest.mark.net]

ACME = Tenant(name="acme", quotas=(Quota(requests_per_minute=1),))
CAUSES = {"full": 503, "large": 413, "stranger": 401, "spent": 429, "malformed": 400}
"""The status by the cause, in the order in which they are looked at."""


async def forever(_context: RequestContext, _client: Exchange) -> None:
    await asyncio.Event().wait()


def use_up(core: CoreOfPods) -> None:
    """Count the only request that the tenant has."""
    context = core.context()
    context.tenant = ACME
    assert core.core.charges is not None
    with suppress(StopIteration):
        core.core.charges.begin(context, cast(Any, None)).send(None)


@pytest.mark.parametrize("first", range(len(CAUSES)))
async def test_each_cause_comes_before_the_later_ones(first: int) -> None:
    """The request has the first cause and all later ones. Only the last one needs the body, which is not sent before
    the router asks for it."""
    causes, core = list(CAUSES)[first:], CoreOfPods([])
    edge = cast(
        Any,
        make_edge(core=core, limits=Limits(max_in_flight=1, max_body_bytes=100), forward=forever, gate=gate_of(ACME)),
    )
    edge.connections = set()
    if "spent" in causes:
        use_up(core)
    if "full" in causes:
        edge.in_flight.add("others", 1.0, 2)
    async with connected(edge) as (reader, writer):
        length, key = 1000 if "large" in causes else 1, b"unknown" if "stranger" in causes else KEY
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\nexpect: 100-continue\r\n"
        writer.write(head + b"authorization: Bearer %b\r\ncontent-length: %d\r\n\r\n" % (key, length))
        if causes == ["malformed"]:
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
            writer.write(b"{")
        answer, _ = await read_answer(reader)
        assert answer.startswith(b"HTTP/1.1 %d " % CAUSES[causes[0]])


async def test_a_spent_quota_is_refused_as_often_as_it_is_asked() -> None:
    """Nothing is counted by it."""
    core = CoreOfPods([])
    edge = cast(Any, make_edge(core=core, forward=forever, gate=gate_of(ACME)))
    edge.connections = set()
    use_up(core)
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\nauthorization: Bearer %b\r\ncontent-length: 1\r\n\r\n" % KEY
    )
    for _ in range(3):
        async with connected(edge) as (reader, writer):
            writer.write(head)
            answer, _ = await read_answer(reader)
            assert answer.startswith(b"HTTP/1.1 429 ") and b"x-ratelimit-remaining-requests: 0" in answer
    endpoint, result = "/v1/chat/completions", "rate_limit_exceeded"
    assert core.counted("warmroute_requests_total", endpoint=endpoint, result=result) == 3
    assert edge.body_memory.bytes == 0
