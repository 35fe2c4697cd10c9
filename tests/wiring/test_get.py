"""Questions over the connections of requests, against a pod that does exactly what its script says."""

from __future__ import annotations

import asyncio

import pytest

from router.feeds.ask import Get, Unanswered
from router.proxy import question
from router.proxy.upstream import UpstreamPool
from router.types import Pod, PodSpeed
from router.wiring.get import get_over
from tests.proxy.test_upstream import GENEROUS, OK, PATIENCE_S, Call, Script, answering, serving, silent, whole

pytestmark = [pytest.mark.net, pytest.mark.anyio]

POD = Pod(id="a", url="http://a", engine="vllm", speed=PodSpeed(1.0, 0.02, 0.0))
ENDLESS = b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n" + b"x" * 100


def over(pool: UpstreamPool) -> Get:
    return get_over(lambda pod: pool)


async def test_questions_and_requests_share_connections() -> None:
    """One is enough for as long as they come one after the other."""
    async with serving(answering(OK)) as (pod, pool):
        for _ in range(3):
            assert await over(pool)(POD, "/metrics", PATIENCE_S) == b"ok"
            assert await whole(pool) == (200, b"ok")
        assert pod.connections == 1


async def test_it_is_asked_in_plain_bytes_under_the_pods_prefix() -> None:
    """An engine behind a path is asked there."""
    asked = list[bytes]()

    async def script(call: Call) -> None:
        asked.append(await call.request())
        await call.answer(OK)

    async with serving(script) as (pod, _):
        pool = UpstreamPool("a", f"http://127.0.0.1:{pod.port}/engine/", GENEROUS)
        assert await over(pool)(POD, "/metrics", PATIENCE_S) == b"ok"
        pool.close()
    host = f"host: 127.0.0.1:{pod.port}".encode()
    assert asked[0].split(b"\r\n")[:3] == [b"GET /engine/metrics HTTP/1.1", host, b"accept-encoding: identity"]


async def test_whatever_is_not_200_is_no_answer() -> None:
    """The reason names path and status; the connection is as good as before."""
    async with serving(answering(OK.replace(b"200", b"503"))) as (pod, pool):
        for _ in range(2):
            with pytest.raises(Unanswered, match="/metrics was answered with 503"):
                await over(pool)(POD, "/metrics", PATIENCE_S)
        assert pod.connections == 1


async def hung_up_on(call: Call) -> None:
    await call.request()
    call.reset()


async def trickling(call: Call) -> None:
    """Never silent for long, and never done."""
    await call.request()
    await call.answer(ENDLESS)
    while True:
        await call.answer(b"x")


@pytest.mark.parametrize("script", [silent, trickling, hung_up_on], ids=["silent", "trickling", "reset"])
async def test_what_does_not_come_to_its_end_in_time_is_no_answer(script: Script) -> None:
    """Neither before its first byte nor inside; and the pod sees the end of it."""
    async with serving(script) as (pod, pool):
        with pytest.raises(Unanswered) as caught:
            await over(pool)(POD, "/metrics", 0.05)
        assert not caught.value.refused
        await pod.wait_for_ends()


async def test_a_pod_where_nobody_listens_does_not_answer() -> None:
    """A refused connection."""
    async with serving(silent) as (pod, _):
        port = pod.port
    with pytest.raises(Unanswered, match="cannot be reached") as caught:
        await over(UpstreamPool("a", f"http://127.0.0.1:{port}", GENEROUS))(POD, "/metrics", PATIENCE_S)
    assert caught.value.refused


async def test_an_answer_too_long_to_be_one_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """And hung up on."""
    monkeypatch.setattr(question, "MOST_BYTES", 99)

    async def script(call: Call) -> None:
        await call.request()
        await call.answer(ENDLESS)
        await call.hung_up()

    async with serving(script) as (pod, pool):
        with pytest.raises(Unanswered, match="without end"):
            await over(pool)(POD, "/metrics", PATIENCE_S)
        await pod.wait_for_ends()


async def test_whoever_stops_asking_hangs_up_at_once() -> None:
    """In the middle of an answer; what comes later has a connection of its own."""
    begun = asyncio.Event()

    async def script(call: Call) -> None:
        await call.request()
        await call.answer(ENDLESS)
        begun.set()
        await call.hung_up()

    async with serving(script, answering(OK)) as (pod, pool), asyncio.timeout(PATIENCE_S):
        asking = asyncio.ensure_future(over(pool)(POD, "/metrics", 10 * PATIENCE_S))
        await begun.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await pod.wait_for_ends()
        assert await over(pool)(POD, "/metrics", PATIENCE_S) == b"ok"
        assert pod.connections == 2
