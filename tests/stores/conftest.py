"""Tests of stores share one server."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from router.stores.redis_connection import RedisConnection
from tests.kit.shared_server import server, started_server
from tests.redis_process import RedisProcess, address_of

__all__ = ["server", "started_server"]


@pytest.fixture
async def connection(server: RedisProcess) -> AsyncIterator[RedisConnection]:
    """A connection to it."""
    made = RedisConnection(address_of(server.url, timeout_s=20))
    yield made
    await made.close()
