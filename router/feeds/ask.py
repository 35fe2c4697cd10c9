"""How is a pod asked something off the request path?

One shared HTTP client and one deadline for the whole exchange. A question that is not answered in time, or not with
200, raises `Unanswered`. This file never reads an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

import httpx
import msgspec

from router.engines.engine_catalog import ENGINES
from router.feeds.transport import SOCKET, PoolPerOrigin
from router.types import Pod

_JSON = {"content-type": "application/json"}
_READ = httpx.ByteStream(b"")


Get: TypeAlias = Callable[[Pod, str, float], Awaitable[bytes]]
"""The body of a pod's answer to a GET of a path, within so many seconds. Raises `Unanswered`."""


class Unanswered(Exception):
    """The pod did not answer as asked. `refused`: nothing listens there, so no process was asked at all."""

    def __init__(self, why: str, *, refused: bool = False) -> None:
        super().__init__(why)
        self.refused = refused


def open_client() -> httpx.AsyncClient:
    """A client for all feeds: no proxy, no compression to unpack. Idle connections are dropped before engines do."""
    tls = httpx.create_ssl_context()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=3.0)
    transport = PoolPerOrigin(lambda at: httpx.AsyncHTTPTransport(verify=tls, limits=limits, uds=at or None))
    return httpx.AsyncClient(
        transport=transport, trust_env=False, headers={"accept-encoding": "identity"}, timeout=None
    )


async def get(client: httpx.AsyncClient, pod: Pod, path: str, timeout_s: float) -> bytes:
    """The body of `pod`'s answer to a GET. Raises `Unanswered`."""
    request = client.build_request("GET", pod.url + path, extensions={SOCKET: pod.socket})
    return await _exchange(client, request, timeout_s)


async def get_url(client: httpx.AsyncClient, url: str, timeout_s: float) -> bytes:
    """The body of what answers a GET at `url`: another port of a pod's host. Raises `Unanswered`."""
    return await _exchange(client, client.build_request("GET", url), timeout_s)


async def post(client: httpx.AsyncClient, pod: Pod, path: str, body: Mapping[str, Any], timeout_s: float) -> bytes:
    """The body of the answer to a POST that is pinned to the pod's rank. Raises `Unanswered`."""
    headers = {**_JSON, **ENGINES[pod.engine].extra_headers(pod)}
    request = client.build_request(
        "POST", pod.url + path, content=msgspec.json.encode(body), headers=headers, extensions={SOCKET: pod.socket}
    )
    return await _exchange(client, request, timeout_s)


async def _exchange(client: httpx.AsyncClient, request: httpx.Request, timeout_s: float) -> bytes:
    try:
        async with asyncio.timeout(timeout_s):
            answer = await client.send(request)
    except httpx.ConnectError as error:
        raise Unanswered(f"no connection: {error}", refused=True) from error
    except httpx.HTTPError as error:
        raise Unanswered(f"{type(error).__name__}: {error}") from error
    except TimeoutError as error:
        raise Unanswered(f"no answer within {timeout_s:g} s") from error
    answer.stream = _READ  # it leads back to the answer: a cycle, of forty objects a question
    if answer.status_code != httpx.codes.OK:
        raise Unanswered(f"{request.url.path} was answered with {answer.status_code}")
    return answer.content
