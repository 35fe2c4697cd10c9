"""The HTTP client for requests of the publisher.

Uses httpx with one deadline for the whole exchange, and raises errors of `router.errors`. Requests, probes and scrapes
use `proxy/upstream.py`, whose connections cost a tenth of the CPU.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import httpx

from router.config.pod_keys import key_headers
from router.errors import ConnectFailed, UpstreamBroken, UpstreamTimeout, unexpected_status
from router.types import Pod, PodId

Fetch: TypeAlias = Callable[[Pod, str, float], Awaitable[bytes]]
"""GET a path of a pod within a timeout in seconds; returns the body of a 200 response. Raises `UpstreamError`."""

MAX_RESPONSE_BYTES = 16 * 1024 * 1024
"""A larger response is an error."""
_SOCKET = "socket"
"""Name of a request extension: path of the Unix socket to connect to. Absent or empty: the network."""


class SocketTransport(httpx.AsyncBaseTransport):
    """Sends a request over the network, or over the Unix socket in its extension."""

    def __init__(self) -> None:
        self._tls = httpx.create_ssl_context()
        self._by_socket: dict[str, httpx.AsyncHTTPTransport] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        socket = request.extensions.get(_SOCKET, "")
        transport = self._by_socket.get(socket)
        if transport is None:
            # Connections must expire before engines close them, after 5 s.
            limits = httpx.Limits(max_connections=None, keepalive_expiry=3.0)
            transport = httpx.AsyncHTTPTransport(verify=self._tls, limits=limits, uds=socket or None)
            self._by_socket[socket] = transport
        return await transport.handle_async_request(request)

    async def aclose(self) -> None:
        for transport in self._by_socket.values():
            await transport.aclose()


def open_client() -> httpx.AsyncClient:
    """A client that ignores proxy environment variables and requests uncompressed bodies."""
    headers = {"accept-encoding": "identity"}
    return httpx.AsyncClient(transport=SocketTransport(), trust_env=False, headers=headers, timeout=None)


async def get(client: httpx.AsyncClient, pod: Pod, path: str, timeout_s: float) -> bytes:
    """The body of the pod's 200 response to a GET. Raises `UpstreamError`."""
    headers = key_headers(pod.bearer_file)
    request = client.build_request("GET", pod.url + path, headers=headers, extensions={_SOCKET: pod.socket})
    return await exchange(client, request, pod.id, timeout_s)


async def get_url(client: httpx.AsyncClient, url: str, timeout_s: float, *, bearer_file: str = "") -> bytes:
    """The body of the 200 response to a GET of any URL. Raises `UpstreamError`."""
    return await exchange(client, client.build_request("GET", url, headers=key_headers(bearer_file)), "", timeout_s)


async def exchange(client: httpx.AsyncClient, request: httpx.Request, pod: PodId, timeout_s: float) -> bytes:
    """The body of the 200 response to `request`. Raises `UpstreamError`."""
    path = request.url.path
    try:
        async with asyncio.timeout(timeout_s):
            response = await client.send(request, stream=True)
            try:
                body = await _body(response)
            finally:
                await response.aclose()
    except httpx.ConnectError as error:
        raise ConnectFailed(f"{path}: cannot connect: {error}", pod=pod, refused=True) from error
    except httpx.HTTPError as error:
        raise UpstreamBroken(f"{path}: {type(error).__name__}: {error!s:.200}", pod=pod) from error
    except TimeoutError as error:
        raise UpstreamTimeout(f"{path}: no response within {timeout_s:g} s", pod=pod) from error
    if response.status_code != httpx.codes.OK:
        raise unexpected_status(response.status_code, path, pod)
    if len(body) > MAX_RESPONSE_BYTES:
        raise UpstreamBroken(f"{path}: response is larger than {MAX_RESPONSE_BYTES} bytes", pod=pod)
    return body


async def _body(response: httpx.Response) -> bytes:
    """The body; incomplete beyond `MAX_RESPONSE_BYTES`."""
    body = bytearray()
    async for piece in response.aiter_bytes():
        body += piece
        if len(body) > MAX_RESPONSE_BYTES:
            break
    return bytes(body)
