"""The HTTP client for requests of the publisher.

Uses httpx with one deadline for the whole exchange, and raises errors of `router.errors`. Requests, probes and scrapes
use `proxy/upstream.py`, whose connections cost a tenth of the CPU.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import httpx

from router.config.pod_keys import key_headers
from router.config.pod_tls import tls_of
from router.errors import ConnectFailed, UpstreamBroken, UpstreamTimeout, unexpected_status
from router.types import NO_TLS_FILES, Pod, PodId

Fetch: TypeAlias = Callable[[Pod, str, float], Awaitable[bytes]]
"""GET a path of a pod within a timeout in seconds; returns the body of a 200 response. Raises `UpstreamError`."""

MAX_RESPONSE_BYTES = 16 * 1024 * 1024
"""A larger response is an error."""
_SOCKET = "socket"
"""Name of a request extension: path of the Unix socket to connect to. Absent or empty: the network."""
_TLS = "tls_files"
"""Name of a request extension: the `PodTls` of the pod."""


class SocketTransport(httpx.AsyncBaseTransport):
    """Sends a request over the network, or over the Unix socket in its extension."""

    def __init__(self) -> None:
        self._transports: dict[tuple[str, ssl.SSLContext], httpx.AsyncHTTPTransport] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        socket = request.extensions.get(_SOCKET, "")
        tls = tls_of(request.extensions.get(_TLS, NO_TLS_FILES)).current()
        transport = self._transports.get((socket, tls))
        if transport is None:
            # Connections must expire before engines close them, after 5 s.
            limits = httpx.Limits(max_connections=None, keepalive_expiry=3.0)
            transport = httpx.AsyncHTTPTransport(verify=tls, limits=limits, uds=socket or None)
            self._transports[socket, tls] = transport
        return await transport.handle_async_request(request)

    async def aclose(self) -> None:
        for transport in self._transports.values():
            await transport.aclose()


def open_client() -> httpx.AsyncClient:
    """A client that ignores proxy environment variables and requests uncompressed bodies."""
    headers = {"accept-encoding": "identity"}
    return httpx.AsyncClient(transport=SocketTransport(), trust_env=False, headers=headers, timeout=None)


async def get(client: httpx.AsyncClient, pod: Pod, path: str, timeout_s: float) -> bytes:
    """The body of the pod's 200 response to a GET. Raises `UpstreamError`."""
    headers = key_headers(pod.bearer_file, pod.bearer_env)
    request = client.build_request("GET", pod.url + path, headers=headers, extensions=_reach(pod))
    return await exchange(client, request, pod.id, timeout_s)


async def get_url(client: httpx.AsyncClient, url: str, timeout_s: float, *, pod: Pod | None = None) -> bytes:
    """The body of the 200 response to a GET of any URL. With `pod`, with its credentials. Raises `UpstreamError`."""
    headers = key_headers(pod.bearer_file, pod.bearer_env) if pod else {}
    extensions = {_TLS: pod.tls} if pod else {}
    return await exchange(
        client, client.build_request("GET", url, headers=headers, extensions=extensions), "", timeout_s
    )


def _reach(pod: Pod) -> dict[str, Any]:
    """The request extensions that say how to connect to the pod."""
    return {_SOCKET: pod.socket, _TLS: pod.tls}


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
