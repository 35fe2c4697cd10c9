"""Probes and scrapes over the connections of requests, against a scripted pod."""

from __future__ import annotations

import asyncio
import errno
import gc

import pytest

from router.errors import ConnectFailed, UpstreamBroken, UpstreamError
from router.frontends.http import upstream
from router.frontends.http.upstream import UpstreamPool, UpstreamPools
from router.guards import Bound
from tests.kit.closed_port import closed_port
from tests.kit.deadlines import DEADLINE_S, GENEROUS
from tests.kit.raw_pods import OK, Call, Script, answering, silent
from tests.kit.scenes import make_pod
from tests.proxy.test_attempt import no_free_file
from tests.proxy.test_upstream import serving, whole

pytestmark = [pytest.mark.net, pytest.mark.anyio]

ENDLESS = b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n" + b"x" * 100


async def test_fetches_and_requests_share_connections() -> None:
    """One is enough while they follow each other."""
    async with serving(answering(OK)) as (pod, pool):
        for _ in range(3):
            assert await pool.fetch("/metrics", DEADLINE_S) == b"ok"
            assert await whole(pool) == (200, b"ok")
        assert pod.connections == 1


async def test_a_fetch_requests_plain_bytes_under_the_pods_prefix() -> None:
    """The URL of a pod may have a path."""
    requests = list[bytes]()

    async def script(call: Call) -> None:
        requests.append(await call.request())
        await call.answer(OK)

    async with serving(script) as (pod, _):
        pool = UpstreamPool("a", f"http://127.0.0.1:{pod.port}/engine/", GENEROUS)
        assert await pool.fetch("/metrics", DEADLINE_S) == b"ok"
        pool.close()
    host = f"host: 127.0.0.1:{pod.port}".encode()
    assert requests[0].split(b"\r\n")[:3] == [b"GET /engine/metrics HTTP/1.1", host, b"accept-encoding: identity"]


async def test_any_status_but_200_is_an_error() -> None:
    """The message names path and status; the connection is reused."""
    async with serving(answering(OK.replace(b"200", b"503"))) as (pod, pool):
        for _ in range(2):
            with pytest.raises(UpstreamBroken, match="503 Service Unavailable from /metrics"):
                await pool.fetch("/metrics", DEADLINE_S)
        assert pod.connections == 1


async def hung_up_on(call: Call) -> None:
    await call.request()
    call.reset()


async def trickling(call: Call) -> None:
    """Sends a byte now and then, without an end."""
    await call.request()
    await call.answer(ENDLESS)
    while True:
        await call.answer(b"x")


@pytest.mark.parametrize("script", [silent, trickling, hung_up_on], ids=["silent", "trickling", "reset"])
async def test_an_unfinished_response_is_an_error_at_the_deadline(script: Script) -> None:
    """Before its first byte and inside the body; the connection is closed."""
    async with serving(script) as (pod, pool):
        with pytest.raises(UpstreamError) as caught:
            await pool.fetch("/metrics", 0.05)
        assert not isinstance(caught.value, ConnectFailed)
        await pod.wait_for_ends()


async def test_a_closed_port_is_refused() -> None:
    """Unlike a connection that times out, this proves that no process serves there."""
    with closed_port() as port, pytest.raises(ConnectFailed, match="cannot connect") as caught:
        await UpstreamPool("a", f"http://127.0.0.1:{port}", GENEROUS).fetch("/metrics", DEADLINE_S)
    assert caught.value.refused


async def test_a_name_that_is_unknown_for_lack_of_files_is_no_fault_of_the_pod() -> None:
    """The resolver reads files and opens sockets; its error does not say that it could not."""
    pool = UpstreamPool("a", "http://pod.invalid:1", GENEROUS)
    "pod.invalid".encode("idna")  # imports the codec, which is a file
    with no_free_file(), pytest.raises(ConnectFailed) as caught:
        await pool.fetch("/health", DEADLINE_S)
    assert caught.value.local
    with pytest.raises(ConnectFailed) as caught:
        await pool.fetch("/health", DEADLINE_S)
    assert not caught.value.local


async def test_a_resolver_without_files_may_say_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its `EAI_SYSTEM` becomes an `OSError` with the errno of some call before."""

    async def confused(*_: object, **__: object) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    pool = UpstreamPool("a", "http://pod.invalid:1", GENEROUS)
    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", confused, raising=False)
    with no_free_file(), pytest.raises(ConnectFailed) as caught:
        await pool.fetch("/health", DEADLINE_S)
    assert caught.value.local


async def test_a_response_over_the_limit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection is closed."""
    monkeypatch.setattr(upstream, "RESPONSE", Bound("response", 99))

    async def script(call: Call) -> None:
        await call.request()
        await call.answer(ENDLESS)
        await call.hung_up()

    async with serving(script) as (pod, pool):
        with pytest.raises(UpstreamBroken, match="at most 99 are read"):
            await pool.fetch("/metrics", DEADLINE_S)
        await pod.wait_for_ends()


async def test_a_cancelled_fetch_closes_its_connection_at_once() -> None:
    """Inside a response; a later fetch uses a new connection."""
    begun = asyncio.Event()

    async def script(call: Call) -> None:
        await call.request()
        await call.answer(ENDLESS)
        begun.set()
        await call.hung_up()

    async with serving(script, answering(OK)) as (pod, pool), asyncio.timeout(DEADLINE_S):
        asking = asyncio.ensure_future(pool.fetch("/metrics", 10 * DEADLINE_S))
        await begun.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await pod.wait_for_ends()
        assert await pool.fetch("/metrics", DEADLINE_S) == b"ok"
        assert pod.connections == 2


async def test_pools_open_on_first_use_and_close_with_their_pod() -> None:
    """One pool for each pod."""
    async with serving(answering(OK), answering(OK)) as (pod, _):
        pools = UpstreamPools(GENEROUS)
        served = make_pod(url=f"http://127.0.0.1:{pod.port}")
        assert await pools.fetch(served, "/metrics", DEADLINE_S) == b"ok"
        pool = pools.of(served)
        assert pools.of(served) is pool
        pools.remove("a")
        await pod.wait_for_ends()
        assert pools.of(served) is not pool
        pools.close()


async def test_a_fetch_cancelled_while_it_connects_closes_its_connection() -> None:
    """In any turn of the loop."""
    async with serving(silent) as (pod, pool):
        for turns in range(1, 30):
            fetching = asyncio.ensure_future(pool.fetch("/metrics", 10 * DEADLINE_S))
            for _ in range(turns):
                await asyncio.sleep(0)
            fetching.cancel()
            await asyncio.wait([fetching])
            assert fetching.cancelled()
        gc.collect()
        await pod.wait_for_ends(pod.connections)


async def test_a_post_is_json_for_the_rank_of_a_pod_and_a_url_needs_no_pod() -> None:
    """A header selects the rank of a shared port."""
    requests = list[bytes]()

    async def script(call: Call) -> None:
        while True:
            requests.append(await call.request())
            await call.answer(OK)

    async with serving(script, script) as (pod, _), asyncio.timeout(DEADLINE_S):
        pools, url = UpstreamPools(GENEROUS), f"http://127.0.0.1:{pod.port}"
        served = make_pod(url=url, dp_rank=1)
        assert await pools.post(served, "/tokenize", {"prompt": "é"}, DEADLINE_S) == b"ok"
        assert await pools.get_url(f"{url}/query/?a=b", DEADLINE_S) == b"ok"
        pools.close()
    assert b"x-data-parallel-rank: 1" in requests[0].lower() and "é".encode() in requests[0]
    assert requests[1].startswith(b"GET /query/?a=b HTTP/1.1")
