"""The servers that other tests build on: they come up, answer, change hands, and die."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import redis.asyncio
from redis.asyncio.sentinel import Sentinel
from redis.exceptions import ConnectionError, RedisError, TimeoutError

from tests.redis_servers.server import RedisCluster, RedisSentinel, RedisServer, binaries, tls_material, until

pytestmark = [pytest.mark.anyio, pytest.mark.net]


@pytest.fixture(params=sorted(binaries()))
def kind(request: pytest.FixtureRequest) -> str:
    """Each server that exists here."""
    return str(request.param)


async def test_a_server_forgets_all_when_it_is_killed(kind: str) -> None:
    """And comes back on the same port."""
    async with RedisServer(kind) as server, server.client(decode_responses=True) as client:
        await client.set("block", "held")
        server.kill()
        with pytest.raises(ConnectionError):
            await client.ping()
        await server.start()
        assert await client.get("block") is None


async def test_a_server_that_appends_remembers_what_a_killed_one_wrote(kind: str) -> None:
    """Options reach the server, and the folder outlives the process."""
    options = {"appendonly": "yes", "appendfsync": "always"}
    async with RedisServer(kind, options) as server, server.client(decode_responses=True) as client:
        await client.set("block", "held")
        server.kill()
        await server.start()
        assert await client.get("block") == "held"
        await server.restart()
        assert await client.get("block") == "held"


async def test_a_paused_server_answers_when_it_goes_on(kind: str) -> None:
    """Not before."""
    async with RedisServer(kind) as server, server.client(socket_timeout=0.05) as hasty, server.client() as patient:
        server.pause()
        with pytest.raises(TimeoutError):
            await hasty.ping()
        server.resume()
        assert await patient.ping()


async def test_a_paused_server_can_be_stopped(kind: str) -> None:
    """No test hangs on its own slow Redis."""
    async with RedisServer(kind) as server, server.client() as client:
        server.pause()
        await server.stop()
        with pytest.raises(ConnectionError):
            await client.ping()


async def test_the_url_carries_the_password(kind: str) -> None:
    """A locked server counts as up, and its URL opens it."""
    async with RedisServer(kind, {"requirepass": "sesame"}) as server:
        async with redis.asyncio.Redis.from_url(server.url) as client:
            assert await client.ping()
        async with server.client(password=None) as stranger:
            with pytest.raises(RedisError, match="Authentication required"):
                await stranger.ping()


async def test_a_server_with_users_counts_as_up_though_it_refuses_us(kind: str, tmp_path: Path) -> None:
    """Only the users of its list come in."""
    (tmp_path / "users.acl").write_text("user default off\nuser router on >sesame ~* +@all\n")
    async with RedisServer(kind, {"aclfile": f"{tmp_path}/users.acl"}) as server:
        async with server.client(username="router", password="sesame") as client:
            assert await client.ping()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the openssl command makes the certificates")
async def test_a_tls_server_is_trusted_by_who_knows_its_authority(kind: str, tmp_path: Path) -> None:
    """By its address and by its name, and by nobody else."""
    async with RedisServer(kind, tls=tls_material(tmp_path)) as server:
        async with server.client() as by_address, server.client(host="localhost") as by_name:
            assert await by_address.ping()
            assert await by_name.ping()
        async with redis.asyncio.Redis.from_url(server.url) as stranger:
            with pytest.raises(ConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
                await stranger.ping()


async def test_a_server_that_cannot_start_says_why_and_leaves_nothing(kind: str) -> None:
    """Neither a wait for the deadline nor a folder."""
    server = RedisServer(kind, {"no-such-option": "1"})
    with pytest.raises(RuntimeError, match="no-such-option"):
        await server.__aenter__()
    assert not server.folder.exists()


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="util-linux asks the kernel for the death signal")
async def test_a_server_dies_with_the_process_that_started_it(kind: str) -> None:
    """Even when that is killed and can clean nothing up."""
    program = f"""
import asyncio
from tests.redis_servers.server import RedisServer
async def main():
    async with RedisServer({kind!r}) as server:
        print(server.port, server.folder, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        port, folder = parent.stdout.readline().split()
        parent.kill()

    async def is_refused() -> bool:
        async with redis.asyncio.Redis(port=int(port), retry=None) as client:
            try:
                return not await client.ping()
            except ConnectionError:
                return True

    await until(is_refused)
    shutil.rmtree(folder)


async def test_a_cluster_serves_keys_of_every_master(kind: str) -> None:
    """Its client finds all three from one."""
    async with RedisCluster(kind) as cluster:
        host, port = cluster.nodes[0]
        async with redis.asyncio.RedisCluster(host=host, port=port, decode_responses=True) as client:
            assert len(client.get_primaries()) == 3
            for block in range(30):
                await client.set(f"block {block}", block)
            assert [await client.get(f"block {block}") for block in range(30)] == [str(block) for block in range(30)]


async def test_a_killed_master_hands_over_to_its_replica(kind: str) -> None:
    """The sentinel says so, and what was written is still there."""
    async with RedisSentinel(kind) as group:
        sentinel = Sentinel([group.address])  # type: ignore[no-untyped-call]
        assert await group.master_port() == group.master.port
        async with group.master.client() as client:
            await client.set("block", "held")
            await client.wait(1, 5000)
        group.master.kill()

        async def is_promoted() -> bool:
            return await group.master_port() == group.replica.port

        await until(is_promoted)
        async with sentinel.master_for(group.master_name) as client:
            assert await client.get("block") == b"held"
        for node in sentinel.sentinels:
            await node.aclose()
