"""Connections to pods, against a scripted pod."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from router.config.schema import Limits
from router.errors import ConnectFailed, UpstreamBroken, UpstreamTimeout
from router.frontends.http import upstream
from router.frontends.http.connection import READ_PAUSE_BYTES
from router.frontends.http.headers import HeaderRules, request_message
from router.frontends.http.upstream import IDLE_EXPIRY_S, Reply, UpstreamPool, UpstreamSender
from router.request.inbound import Head
from tests.kit.closed_port import closed_port
from tests.kit.deadlines import DEADLINE_S, GENEROUS
from tests.kit.raw_pods import OK, Call, RawPod, Script, answering, answering_once, resetting, silent
from tests.kit.scenes import make_pod

pytestmark = [pytest.mark.net, pytest.mark.anyio]

POD = make_pod(url="http://pod-a")


@asynccontextmanager
async def serving(
    *scripts: Script, timeouts: Limits = GENEROUS, host: str = "127.0.0.1"
) -> AsyncIterator[tuple[RawPod, UpstreamPool]]:
    pod = RawPod(scripts)
    server = await asyncio.start_server(pod, host, 0)
    pod.port = server.sockets[0].getsockname()[1]
    pool = UpstreamPool("a", f"http://{f'[{host}]' if ':' in host else host}:{pod.port}", timeouts)
    try:
        yield pod, pool
    finally:
        pool.close()
        server.close()
        await server.wait_closed()


@asynccontextmanager
async def serving_at(path: Path, *scripts: Script) -> AsyncIterator[tuple[RawPod, UpstreamPool]]:
    """Over a Unix socket."""
    pod = RawPod(scripts)
    server = await asyncio.start_unix_server(pod, path)
    pool = UpstreamPool("a", "http://pod-a:8000/prefix", GENEROUS, str(path))
    try:
        yield pod, pool
    finally:
        pool.close()
        server.close()
        await server.wait_closed()


def message(pool: UpstreamPool, body: bytes = b"{}") -> bytes:
    return request_message("POST", b"/v1/x", pool.host_header, [], body)


async def body_of(reply: Reply) -> bytes:
    pieces = []
    while piece := await reply.read():
        pieces.append(piece)
    return b"".join(pieces)


async def whole(pool: UpstreamPool) -> tuple[int, bytes]:
    """One whole exchange."""
    reply = await pool.exchange(message(pool))
    try:
        return reply.status, await body_of(reply)
    finally:
        reply.close()


# --- what goes well ---


async def test_one_connection_serves_many_exchanges() -> None:
    """In sequence."""
    async with serving(answering(OK)) as (pod, pool):
        for _ in range(5):
            assert await whole(pool) == (200, b"ok")
        assert pod.connections == 1


async def test_concurrent_exchanges_have_separate_connections() -> None:
    """Both are kept."""
    async with serving(answering(OK)) as (pod, pool):
        for _ in range(2):
            replies = [await pool.exchange(message(pool)) for _ in range(2)]
            for reply in replies:
                assert await body_of(reply) == b"ok"
                reply.close()
        assert pod.connections == 2


@pytest.mark.parametrize(
    ("pieces", "body"),
    [
        ([OK], b"ok"),
        ([OK[at : at + 1] for at in range(len(OK))], b"ok"),
        (
            [bytes([each]) for each in b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"]
            + [b"1\r\n%c\r\n" % each for each in b"hello"]
            + [b"0\r\n\r\n"],
            b"hello",
        ),
        ([b"HTTP/1.1 100 Continue\r\n\r\n", OK], b"ok"),
        ([b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + OK], b"ok"),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"], b""),
    ],
    ids=["whole", "byte by byte", "chunks of a byte", "100", "100 and 103", "empty"],
)
async def test_a_response_is_read_in_any_form(pieces: list[bytes], body: bytes) -> None:
    """Its connection is reused."""
    async with serving(answering(*pieces)) as (pod, pool):
        for _ in range(2):
            assert await whole(pool) == (200, body)
        assert pod.connections == 1


async def test_informational_headers_are_not_those_of_the_response() -> None:
    """Names are in lower case."""
    early = b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
    final = b"HTTP/1.1 404 Not Found\r\nX-Mine: 1\r\ncontent-length: 0\r\n\r\n"
    async with serving(answering(early, final)) as (_, pool):
        reply = await pool.exchange(message(pool))
        assert (reply.status, reply.headers) == (404, [(b"x-mine", b"1"), (b"content-length", b"0")])
        reply.close()


async def test_a_response_may_end_with_its_connection() -> None:
    """Without length or chunks it is complete when the pod closes the connection properly."""
    async with serving(answering_once(b"HTTP/1.1 200 OK\r\n\r\nhel", b"lo")) as (pod, pool):
        assert await whole(pool) == (200, b"hello")
        assert await whole(pool) == (200, b"hello")
        assert pod.connections == 2


async def test_connection_close_is_followed() -> None:
    """The connection is not reused, even while it is open."""
    closing = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok"
    async with serving(answering(closing)) as (pod, pool):
        assert await whole(pool) == await whole(pool) == (200, b"ok")
        assert pod.connections == 2


async def test_a_pod_can_have_an_ipv6_address() -> None:
    """In brackets, as in URLs."""
    try:
        async with serving(answering(OK), host="::1") as (_, pool):
            assert pool.host_header.startswith(b"[::1]:")
            assert await whole(pool) == (200, b"ok")
    except OSError:
        pytest.skip("this machine has no IPv6")


async def test_a_slow_client_slows_the_pod() -> None:
    """Little more than the limit is buffered; the rest arrives when it is read."""
    size = 64 * READ_PAUSE_BYTES
    sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def script(call: Call) -> None:
        call.writer.transport.set_write_buffer_limits(0)
        await call.request()
        await call.answer(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size, b"x" * size)
        sent.set_result(None)
        await call.hung_up()

    async with serving(script) as (_, pool):
        reply = await pool.exchange(message(pool))
        connection = reply._connection
        async with asyncio.timeout(DEADLINE_S):
            while not connection._paused:
                await asyncio.sleep(0)
        assert connection._buffered_bytes <= 2 * READ_PAUSE_BYTES
        assert not sent.done()
        assert len(await body_of(reply)) == size
        reply.close()


# --- kept-alive connections ---


async def test_a_closed_idle_connection_is_replaced() -> None:
    """The pod closed it between two exchanges."""
    async with serving(answering_once(OK), answering(OK)) as (pod, pool):
        assert await whole(pool) == (200, b"ok")
        await pod.wait_for_ends()
        assert await whole(pool) == (200, b"ok")
        assert pod.connections == 2


async def then_reset(call: Call) -> None:
    """One response, then a reset on the next request."""
    await call.request()
    await call.answer(OK)
    await resetting(call)


async def test_a_kept_alive_connection_that_closes_on_the_request_is_replaced_once() -> None:
    """Without a byte of a response, the pod has most likely not seen the request."""
    async with serving(then_reset, answering(OK)) as (pod, pool):
        assert await whole(pool) == await whole(pool) == (200, b"ok")
        assert pod.connections == 2


async def test_a_connection_is_replaced_only_once() -> None:
    """A new connection that closes as well is an error of the pod."""
    async with serving(then_reset, resetting) as (pod, pool):
        await whole(pool)
        with pytest.raises(UpstreamBroken, match="pod a"):
            await whole(pool)
        assert pod.connections == 2


async def test_a_kept_alive_connection_that_closes_inside_a_response_is_not_replaced() -> None:
    """The pod has seen the request."""

    async def script(call: Call) -> None:
        await call.request()
        await call.answer(OK)
        await call.request()
        await call.answer(b"HTTP/1.1 200 OK\r\ncontent")

    async with serving(script) as (pod, pool):
        await whole(pool)
        with pytest.raises(UpstreamBroken, match="inside the headers"):
            await whole(pool)
        assert pod.connections == 1


async def test_idle_connections_are_closed_before_the_pod_closes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines close them after 5 s."""
    assert IDLE_EXPIRY_S < 5
    async with serving(answering(OK)) as (pod, pool):
        await whole(pool)
        monkeypatch.setattr("router.frontends.http.upstream.IDLE_EXPIRY_S", 0.0)
        pool.expire_idle()
        await pod.wait_for_ends()
        await whole(pool)
        assert pod.connections == 2


async def test_a_limited_number_of_idle_connections_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are closed at once."""
    monkeypatch.setattr(upstream, "MAX_IDLE_CONNECTIONS", 2)
    async with serving(answering(OK)) as (pod, pool):
        replies = await asyncio.gather(*(pool.exchange(message(pool)) for _ in range(4)))
        for reply in replies:
            await body_of(reply)
            reply.close()
        assert len(pool._idle) == 2
        assert pod.connections == 4
        await pod.wait_for_ends(2)


async def test_closing_a_reply_twice_returns_its_connection_once() -> None:
    """Otherwise two exchanges would share it."""
    async with serving(answering(OK)) as (pod, pool):
        reply = await pool.exchange(message(pool))
        await body_of(reply)
        reply.close()
        reply.close()
        first, second = await pool.exchange(message(pool)), await pool.exchange(message(pool))
        assert pod.connections == 2
        for each in (first, second):
            assert await body_of(each) == b"ok"
            each.close()


async def test_a_connection_is_closed_that_is_given_back_after_its_pod_is_removed() -> None:
    async with serving(answering(OK)) as (pod, pool):
        reply = await pool.exchange(message(pool))
        pool.close()
        assert await body_of(reply) == b"ok"
        reply.close()
        await pod.wait_for_ends(1)


async def test_bytes_after_a_response_end_the_connection() -> None:
    """In the same packet or later."""
    forged = b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nforged"
    async with serving(answering_once(OK + forged), answering(OK)) as (pod, pool):
        assert await whole(pool) == (200, b"ok")
        assert await whole(pool) == (200, b"ok")
        assert pod.connections == 2

    go = asyncio.Event()

    async def unasked(call: Call) -> None:
        await call.request()
        await call.answer(OK)
        await go.wait()
        await call.answer(forged)
        await call.hung_up()

    async with serving(unasked, answering(OK)) as (pod, pool):
        assert await whole(pool) == (200, b"ok")
        go.set()
        await pod.wait_for_ends()
        assert await whole(pool) == (200, b"ok")
        assert pod.connections == 2


# --- what a pod may get only once ---


async def test_exchange_once_uses_a_new_connection() -> None:
    """After the close of a kept-alive one it is unknown whether the pod has seen the request."""
    async with serving(answering(OK)) as (pod, pool):
        await whole(pool)
        reply = await pool.exchange_once(lambda: message(pool))
        assert await body_of(reply) == b"ok"
        reply.close()
        assert pod.connections == 2


async def test_exchange_once_makes_its_message_after_connecting() -> None:
    """If that fails, the connection is closed."""

    def refuse() -> bytes:
        assert pod.connections <= 1
        raise ValueError("too late")

    async with serving(silent) as (pod, pool):
        with pytest.raises(ValueError, match="too late"):
            await pool.exchange_once(refuse)
        await pod.wait_for_ends()


async def test_exchange_once_is_never_repeated() -> None:
    """A pod that closes without a response may have begun."""
    async with serving(resetting) as (pod, pool):
        with pytest.raises(UpstreamBroken, match="pod a"):
            await pool.exchange_once(lambda: message(pool))
        assert pod.connections == 1


# --- what goes wrong ---


async def test_a_closed_port_is_a_failed_connection() -> None:
    """Nothing was sent, so any candidate may be tried."""
    with closed_port() as port, pytest.raises(ConnectFailed, match="pod a: cannot connect") as caught:
        pool = UpstreamPool("a", f"http://127.0.0.1:{port}", GENEROUS)
        await pool.exchange(message(pool))
    assert caught.value.pod == "a"


@pytest.mark.parametrize(
    "script",
    [
        resetting,
        answering_once(),
        answering_once(b"HTTP/1.1 200"),
        answering_once(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n"),
        answering_once(b"\x16\x03\x01 not http\r\n\r\n"),
        answering_once(b"HTTP/1.1 200 OK\r\ncontent-length: two\r\n\r\n"),
        answering_once(b"HTTP/1.1 100 Continue\r\n\r\n"),
    ],
    ids=["reset", "closed", "in the status", "in the headers", "garbage", "bad length", "only 100"],
)
async def test_incomplete_headers_are_an_error_of_the_pod(script: Script) -> None:
    """On a new connection, without a retry."""
    async with serving(script) as (pod, pool):
        with pytest.raises(UpstreamBroken, match="pod a") as caught:
            await pool.exchange(message(pool))
        assert caught.value.pod == "a"
        assert pod.connections == 1


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n"


async def test_headers_over_the_limit_end_the_connection() -> None:
    """A pod that sends headers without an end holds no more memory than the limit, and no request until a timeout."""

    async def script(call: Call) -> None:
        await call.request()
        await call.answer(b"HTTP/1.1 200 OK\r\n" + b"x: %b\r\n" % (b"y" * 1000) * (READ_PAUSE_BYTES // 1000 + 1))
        await call.hung_up()

    async with serving(script) as (pod, pool), asyncio.timeout(DEADLINE_S):
        with pytest.raises(UpstreamBroken, match="pod a: headers are larger than the limit"):
            await pool.exchange(message(pool))
        await pod.wait_for_ends()


async def test_interim_responses_without_an_end_are_an_error_of_the_pod() -> None:
    async def script(call: Call) -> None:
        await call.request()
        await call.answer(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" * 40 + b"HTTP/1.1 204 No Content\r\n\r\n")
        await call.hung_up()

    async with serving(script) as (pod, pool), asyncio.timeout(DEADLINE_S):
        with pytest.raises(UpstreamBroken, match="interim responses are more than the limit"):
            await pool.exchange(message(pool))
        await pod.wait_for_ends()


async def test_headers_below_the_limit_are_read() -> None:
    """Also where the body follows later."""
    many = b"".join(b"x-%d: y\r\n" % number for number in range(200))

    async def script(call: Call) -> None:
        await call.request()
        await call.answer(b"HTTP/1.1 200 OK\r\n" + many + b"content-length: 2\r\n\r\n")
        await call.answer(b"ok")

    async with serving(script) as (_, pool):
        reply = await pool.exchange(message(pool))
        assert len(reply.headers) == 201
        assert await body_of(reply) == b"ok"


@pytest.mark.parametrize(
    "script",
    [
        answering_once(CHUNKED),
        answering_once(CHUNKED + b"5\r\nwor"),
        answering_once(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhello"),
        answering_once(CHUNKED + b"nonsense\r\n"),
    ],
    ids=["between chunks", "mid-chunk", "short of its length", "garbage"],
)
async def test_a_truncated_response_is_an_error_after_its_last_piece(script: Script) -> None:
    """Received pieces are read first."""
    async with serving(script) as (_, pool):
        reply = await pool.exchange(message(pool))
        seen = b""
        with pytest.raises(UpstreamBroken):
            while piece := await reply.read():
                seen += piece
        assert seen.startswith(b"hello")
        reply.close()


async def test_a_reset_does_not_complete_a_response() -> None:
    """A response without a length is complete only when the pod closes the connection properly."""
    seen = asyncio.Event()

    async def script(call: Call) -> None:
        await call.request()
        await call.answer(b"HTTP/1.1 200 OK\r\n\r\nhello")
        await seen.wait()
        call.reset()

    async with serving(script) as (_, pool):
        reply = await pool.exchange(message(pool))
        assert await reply.read() == b"hello"
        seen.set()
        with pytest.raises(UpstreamBroken):
            await reply.read()
        reply.close()


async def test_no_headers_in_time_is_a_timeout_and_closes() -> None:
    """At once."""
    brief = Limits(connect_timeout_s=DEADLINE_S, first_byte_timeout_s=0.02, idle_timeout_s=DEADLINE_S)
    async with serving(silent, timeouts=brief) as (pod, pool):
        with pytest.raises(UpstreamTimeout, match="did not respond within"):
            await pool.exchange(message(pool))
        await pod.wait_for_ends()


async def test_silence_inside_a_response_is_a_timeout() -> None:
    """After the received pieces."""

    async def script(call: Call) -> None:
        await call.request()
        await call.answer(CHUNKED)
        await call.hung_up()

    brief = Limits(connect_timeout_s=DEADLINE_S, first_byte_timeout_s=DEADLINE_S, idle_timeout_s=0.02)
    async with serving(script, timeouts=brief) as (pod, pool):
        reply = await pool.exchange(message(pool))
        assert await reply.read() == b"hello"
        with pytest.raises(UpstreamTimeout, match="sent nothing"):
            await reply.read()
        reply.close()
        await pod.wait_for_ends()


# --- leaving ---


async def test_a_cancelled_exchange_closes_its_connection_at_once() -> None:
    """While the pod prefills, so that it stops."""
    async with serving(silent, timeouts=GENEROUS) as (pod, pool):
        asking = asyncio.ensure_future(pool.exchange(message(pool)))
        async with asyncio.timeout(DEADLINE_S):
            while not pod.connections:
                await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await pod.wait_for_ends()


async def test_closing_an_unread_response_closes_the_connection_at_once() -> None:
    """This stops the engine; draining would not. The next exchange uses a new connection."""

    async def script(call: Call) -> None:
        await call.request()
        await call.answer(CHUNKED)
        await call.hung_up()

    async with serving(script, answering(OK)) as (pod, pool):
        reply = await pool.exchange(message(pool))
        assert await reply.read() == b"hello"
        reply.close()
        await pod.wait_for_ends()
        assert await whole(pool) == (200, b"ok")
        assert pod.connections == 2


async def test_a_pod_with_a_unix_socket_is_reached_over_it(tmp_path: Path) -> None:
    """The host header is that of its URL; connections are kept alive."""
    requests: list[bytes] = []

    async def script(call: Call) -> None:
        while True:
            requests.append(await call.request())
            await call.answer(OK)

    async with serving_at(tmp_path / "pod.sock", script) as (pod, pool):
        assert [await whole(pool), await whole(pool)] == [(200, b"ok")] * 2
        assert pod.connections == 1
        assert b"\r\nhost: pod-a:8000\r\n" in requests[0]


async def test_a_missing_unix_socket_is_a_failed_connection(tmp_path: Path) -> None:
    """The next candidate is tried."""
    pool = UpstreamPool("a", "http://pod-a", GENEROUS, str(tmp_path / "none.sock"))
    with pytest.raises(ConnectFailed, match="pod a: cannot connect"):
        await pool.exchange(message(pool))


@pytest.mark.parametrize(("url", "port"), [("http://pod", 80), ("https://pod", 443), ("https://pod:8443", 8443)])
def test_the_port_follows_from_the_scheme(url: str, port: int) -> None:
    assert UpstreamPool("a", url, GENEROUS)._port == port


@pytest.mark.parametrize("own", [{"bearer_file": "FILE"}, {"bearer_env": "ENGINE_KEY"}], ids=["file", "variable"])
async def test_a_refusal_of_the_routers_key_is_not_the_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: dict[str, str]
) -> None:
    """Wherever the key comes from."""
    (tmp_path / "key").write_text("k")
    monkeypatch.setenv("ENGINE_KEY", "k")
    credentials: Any = {name: value.replace("FILE", str(tmp_path / "key")) for name, value in own.items()}
    pod = make_pod(url="", **credentials)
    async with serving(answering(OK.replace(b"200 OK", b"401 Unauthorized"))) as (scripted, _):
        pool = UpstreamPool("a", f"http://127.0.0.1:{scripted.port}", GENEROUS, served=pod)
        with pytest.raises(UpstreamBroken) as caught:
            await whole(pool)
    assert caught.value.status == 401


@pytest.mark.parametrize("key", ["k", ""])
async def test_requests_have_the_pods_credentials_instead_of_the_clients(tmp_path: Path, key: str) -> None:
    """Clients' requests, probes and scrapes have them. A forwarded credential passes only to a pod without a key."""
    seen, file = list[bytes](), tmp_path / "key"
    file.write_text(key or "unused")

    async def script(call: Call) -> None:
        seen.append(await call.request())
        await call.answer(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok")

    head = Head("r", "POST", b"/v1/x", [(b"authorization", b"Bearer client")])
    async with serving_at(tmp_path / "pod.sock", script):
        pod = make_pod(url="", bearer_file=str(file) if key else "")
        pool = UpstreamPool("a", "http://pod-a", GENEROUS, str(tmp_path / "pod.sock"), pod)
        sender = UpstreamSender(lambda _: pool, HeaderRules(forward=["authorization"]))
        reply = await sender.send(head, POD, b"{}")
        reply.close()
        await pool.fetch("/health", DEADLINE_S)
        pool.close()
    expected = b"authorization: Bearer k" if key else b"authorization: Bearer client"
    assert [head.count(b"authorization: ") for head in seen] == [1, 1 if key else 0]
    assert expected in seen[0] and (not key or expected in seen[1])
