"""One Valkey for each process of pytest; Redis 7 as well in CI. A test that kills or configures a server starts its own
(`tests/redis_process.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache

import pytest
import redis

from tests.redis_process import RedisProcess, redis_process
from tests.redis_servers.server import server_kinds


@pytest.fixture(scope="session")
def started_server() -> Iterator[Callable[[str], RedisProcess]]:
    """Starts the only server of a kind, once."""
    with ExitStack() as stack:
        yield cache(lambda kind: stack.enter_context(redis_process(kind)))


@pytest.fixture(params=server_kinds())
def server(request: pytest.FixtureRequest, started_server: Callable[[str], RedisProcess]) -> RedisProcess:
    """An empty server of each kind, which the tests of this process share."""
    found = started_server(str(request.param))
    with redis.Redis.from_url(found.url) as client:
        client.flushall()
        client.script_flush()
    return found
