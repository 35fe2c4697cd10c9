"""HTTP requests of the publisher, and their errors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.errors import ConnectFailed, UpstreamBroken, UpstreamTimeout
from router.feeds import http_client
from router.feeds.http_client import get, open_client
from router.types import Pod

pytestmark = pytest.mark.anyio
MakePod = Callable[..., Pod]
Network = Any


async def test_get_returns_the_body(network: Network, make_pod: MakePod) -> None:
    """Under the pod's own path prefix."""
    network["a"].answers["/prefix/metrics"] = b"up 1"
    pod = make_pod("a", url="http://a/prefix")
    assert await get(network.client, pod, "/metrics", 1.0) == b"up 1"


async def test_any_status_but_200_is_an_error(network: Network, make_pod: MakePod) -> None:
    """The message names path and status."""
    network["a"].statuses["/health"] = 503
    with pytest.raises(UpstreamBroken, match="503 Service Unavailable from /health") as caught:
        await get(network.client, make_pod("a"), "/health", 1.0)
    assert caught.value.pod == "a"


async def test_a_closed_port_is_refused(network: Network, make_pod: MakePod) -> None:
    """A broken exchange is a different error."""
    network["a"].refuses = True
    with pytest.raises(ConnectFailed) as caught:
        await get(network.client, make_pod("a"), "/health", 1.0)
    assert caught.value.refused

    def broken(request: httpx.Request) -> bytes:
        raise httpx.RemoteProtocolError("cut", request=request)

    network["b"].answers["/health"] = broken
    with pytest.raises(UpstreamBroken, match="cut"):
        await get(network.client, make_pod("b"), "/health", 1.0)


async def test_a_response_has_a_limit(network: Network, make_pod: MakePod, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod could send without an end."""
    monkeypatch.setattr(http_client, "MAX_RESPONSE_BYTES", 5)
    network["a"].answers["/health"] = b"12345"
    assert await get(network.client, make_pod("a"), "/health", 1.0) == b"12345"
    network["a"].answers["/health"] = b"123456"
    with pytest.raises(UpstreamBroken, match="larger than 5 bytes"):
        await get(network.client, make_pod("a"), "/health", 1.0)


async def test_the_whole_exchange_has_one_deadline(network: Network, make_pod: MakePod) -> None:
    """A pod that accepts the connection and never responds."""
    network["a"].hangs.add("/health")
    with pytest.raises(UpstreamTimeout, match=r"within 0\.001 s"):
        await get(network.client, make_pod("a"), "/health", 0.001)


async def test_the_client_requests_plain_bytes_and_ignores_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pods are inside the cluster."""
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.invalid:3128")
    async with open_client() as client:
        assert client.headers["accept-encoding"] == "identity"
        assert client.trust_env is False


@pytest.mark.net
async def test_a_pod_with_a_unix_socket_is_reached_over_it(make_pod: MakePod, tmp_path: Path) -> None:
    """Its URL gives only the host header and the path prefix."""
    path = str(tmp_path / "s")

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        await writer.drain()
        writer.close()

    async with await asyncio.start_unix_server(respond, path), open_client() as client:
        assert await get(client, make_pod("a", socket=path), "/health", 5.0) == b"ok"


async def test_requests_have_the_pods_credentials(network: Network, make_pod: MakePod, tmp_path: Path) -> None:
    """None for a pod without a key."""
    key, seen = tmp_path / "key", list[str | None]()
    key.write_text("k")

    def answer(request: httpx.Request) -> bytes:
        seen.append(request.headers.get("authorization"))
        return b"done"

    network["a"].answers["/x"] = answer
    for pod in (make_pod("a", bearer_file=str(key)), make_pod("a")):
        await get(network.client, pod, "/x", 1.0)
    assert seen == ["Bearer k", None]
