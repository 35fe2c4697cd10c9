"""How is a pod asked something over the connections that its requests use?

For what is asked many times a second, or for a request that waits: a fraction of what a general HTTP client costs. This
file never reads an answer.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from router.errors import UpstreamBroken, UpstreamTimeout
from router.proxy.headers import HeaderList, request_message
from router.proxy.relay import read_all
from router.proxy.upstream import UpstreamPool

MOST_BYTES = 16 * 1024 * 1024
"""Of an answer: a hundred times what engines say of themselves."""
_PLAIN: HeaderList = [(b"accept-encoding", b"identity")]
_JSON: HeaderList = [*_PLAIN, (b"content-type", b"application/json")]


async def ask(pool: UpstreamPool, path: str, timeout_s: float, json: bytes | None = None) -> bytes:
    """The body of the answer to a GET under the pod's path prefix, or to a POST of `json`; one deadline for it all.

    Raises `UpstreamError`, also where it is answered with anything but 200."""
    method, headers = ("GET", _PLAIN) if json is None else ("POST", _JSON)
    message = request_message(method, pool.path_prefix + path.encode(), pool.host_header, headers, json or b"")
    try:
        async with asyncio.timeout(timeout_s):
            reply = await pool.exchange(message)
            body = await read_all(reply, MOST_BYTES)
    except TimeoutError as error:
        raise UpstreamTimeout(f"pod {pool.pod}: no answer within {timeout_s:g} s", pod=pool.pod) from error
    if reply.status != HTTPStatus.OK:
        raise UpstreamBroken(f"pod {pool.pod}: {path} was answered with {reply.status}", pod=pool.pod)
    return body
