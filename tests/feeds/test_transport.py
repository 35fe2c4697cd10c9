"""One pool an origin."""

from __future__ import annotations

import httpx
import pytest

from router.feeds.transport import SOCKET, UNUSED_S, PoolPerOrigin

pytestmark = pytest.mark.anyio


class Pool(httpx.AsyncBaseTransport):
    """Remembers what it was asked, and whether it was closed."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.closed = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(str(request.url))
        return httpx.Response(200)

    async def aclose(self) -> None:
        self.closed = True


class World:
    """A client, its pools in the order of their opening, and its clock."""

    def __init__(self) -> None:
        self.pools: list[Pool] = []
        self.sockets: list[str] = []
        self.now_s = 0.0
        self.client = httpx.AsyncClient(transport=PoolPerOrigin(self._open, lambda: self.now_s))

    def _open(self, socket: str) -> Pool:
        self.sockets.append(socket)
        self.pools.append(Pool())
        return self.pools[-1]


async def test_each_origin_has_its_own_pool() -> None:
    """Scheme, host and port tell them apart; paths do not."""
    world = World()
    for url in ("http://a/x", "http://b/x", "http://a/y", "http://a:81/x", "https://a/x"):
        await world.client.get(url)
    assert [pool.asked for pool in world.pools] == [
        ["http://a/x", "http://a/y"],
        ["http://b/x"],
        ["http://a:81/x"],
        ["https://a/x"],
    ]
    await world.client.aclose()
    assert all(pool.closed for pool in world.pools)


async def test_a_unix_socket_has_its_own_pool() -> None:
    """Whatever it is called there."""
    world = World()
    for socket in ("", "/run/a", "/run/b", "/run/a"):
        await world.client.send(world.client.build_request("GET", "http://a/", extensions={SOCKET: socket}))
    assert world.sockets == ["", "/run/a", "/run/b"]


async def test_the_pools_of_pods_that_are_gone_are_closed() -> None:
    """When another pod appears; a pool that is still used stays open."""
    world = World()
    await world.client.get("http://gone/")
    await world.client.get("http://here/")
    world.now_s = UNUSED_S
    await world.client.get("http://here/")
    world.now_s = UNUSED_S + 1
    await world.client.get("http://new/")
    assert [pool.closed for pool in world.pools] == [True, False, False]
    await world.client.get("http://here/")
    assert len(world.pools) == 3
