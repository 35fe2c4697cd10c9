"""How do feeds ask pods over the connections of requests?

Feeds know no connections, and connections know no feeds: here the one is given to the other. This file never reads an
answer.
"""

from __future__ import annotations

from collections.abc import Callable

from router.errors import ConnectFailed, UpstreamError
from router.feeds.ask import Get, Unanswered
from router.proxy.question import ask
from router.proxy.upstream import UpstreamPool
from router.types import Pod


def get_over(pool_of: Callable[[Pod], UpstreamPool]) -> Get:
    """A GET over the pod's own pool."""

    async def get(pod: Pod, path: str, timeout_s: float) -> bytes:
        try:
            return await ask(pool_of(pod), path, timeout_s)
        except UpstreamError as error:
            nobody = isinstance(error, ConnectFailed) and not isinstance(error.__cause__, TimeoutError)
            raise Unanswered(str(error), refused=nobody) from error

    return get
