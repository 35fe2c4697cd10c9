"""How does a client's request get to a pod?

One leg: the client's request, with its own body or one made of it, on its way to one pod, with the headers that the pod
may see. The legs of a split are told apart by their bodies alone. This file never reads an answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from router.engines.engine_catalog import ENGINES
from router.proxy.downstream import Inbound
from router.proxy.headers import request_message, upstream_headers
from router.proxy.upstream import Reply, UpstreamPool
from router.types import Pod


class UpstreamSender:
    """Sends. With `trust_engine_fields`, clients may steer engines by headers."""

    def __init__(self, pool: Callable[[Pod], UpstreamPool], *, trust_engine_fields: bool) -> None:
        self._pool = pool
        self._trusted = trust_engine_fields

    def send(self, inbound: Inbound, pod: Pod, body: bytes) -> Awaitable[Reply]:
        """Await the head of the answer. Raises `UpstreamError`."""
        pool = self._pool(pod)
        return pool.exchange(self._message(inbound, pod, pool, body))

    def send_once(self, inbound: Inbound, pod: Pod, body: Callable[[], bytes]) -> Awaitable[Reply]:
        """The same for a body that no pod may get twice; it is asked for at the last moment."""
        pool = self._pool(pod)
        return pool.exchange_once(lambda: self._message(inbound, pod, pool, body()))

    def _message(self, inbound: Inbound, pod: Pod, pool: UpstreamPool, body: bytes) -> bytes:
        headers = upstream_headers(inbound.headers, trusted=self._trusted)
        headers += (
            (b"x-request-id", inbound.id.encode("latin-1", "replace")),
            (b"x-forwarded-for", inbound.peer.encode()),
        )
        for name, value in ENGINES[pod.engine].extra_headers(pod).items():
            headers.append((name.encode(), value.encode()))
        return request_message(inbound.method, pool.path_prefix + inbound.target, pool.host_header, headers, body)
