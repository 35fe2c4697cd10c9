"""The Redis servers of other tests start, respond, fail over, and stop."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sys
from pathlib import Path

import pytest
import redis.asyncio
from redis import exceptions
from redis.asyncio.sentinel import Sentinel

from tests.redis_servers.server import (
    HOST,
    RedisCluster,
    RedisSentinel,
    RedisServer,
    binaries,
    speaks_tls,
    tls_material,
    until,
)

pytestmark = [pytest.mark.anyio, pytest.mark.net]


@pytest.fixture(params=sorted(binaries()))
def kind(request: pytest.FixtureRequest) -> str:
    """Each installed server."""
    return str(request.param)


@pytest.mark.parametrize(
    ("options", "remembered"), [({}, None), ({"appendonly": "yes", "appendfsync": "always"}, b"held")]
)
async def test_a_killed_server_can_be_started_again(
    kind: str, options: dict[str, str], remembered: bytes | None
) -> None:
    """On the same port, with its persistent data only."""
    async with RedisServer(kind, options) as server, server.client() as client:
        await client.set("block", "held")
        server.kill()
        with pytest.raises(exceptions.ConnectionError):
            await client.ping()
        await server.start()
        assert await client.get("block") == remembered


async def test_a_paused_server_responds_after_resume(kind: str) -> None:
    """It can also be restarted while paused."""
    async with RedisServer(kind) as server, server.client(socket_timeout=0.05) as hasty, server.client() as patient:
        server.pause()
        with pytest.raises(exceptions.TimeoutError):
            await hasty.ping()
        server.resume()
        assert await patient.ping()
        server.pause()
        await server.restart()
        assert await patient.ping()


async def test_the_url_has_the_password(kind: str) -> None:
    """Connections without it are rejected."""
    async with RedisServer(kind, {"requirepass": "sesame"}) as server, server.client(password=None) as stranger:
        async with redis.asyncio.Redis.from_url(server.url) as client:
            assert await client.ping()
        with pytest.raises(exceptions.AuthenticationError):
            await stranger.ping()


async def test_a_server_without_a_default_user_counts_as_started(kind: str, tmp_path: Path) -> None:
    """Although it rejects the default user."""
    (tmp_path / "users.acl").write_text("user default off\nuser router on >sesame ~* +@all\n")
    server = RedisServer(kind, {"aclfile": f"{tmp_path}/users.acl"})
    async with server, server.client(username="router", password="sesame") as router:
        assert await router.ping()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the openssl command makes the certificates")
@pytest.mark.parametrize("kind", [each for each in binaries() if speaks_tls(each)])
async def test_a_tls_server_is_trusted_with_its_authority(kind: str, tmp_path: Path) -> None:
    """For its address and its name, and by no other client."""
    async with RedisServer(kind, tls=tls_material(tmp_path)) as server:
        async with server.client() as by_address, server.client(host="localhost") as by_name:
            assert await by_address.ping()
            assert await by_name.ping()
        async with server.client(ssl_ca_certs=None) as stranger:
            with pytest.raises(exceptions.ConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
                await stranger.ping()


async def test_the_error_of_a_failed_start_has_the_log(kind: str) -> None:
    """Its folder is removed."""
    server = RedisServer(kind, {"no-such-option": "1"})
    with pytest.raises(RuntimeError, match="no-such-option"):
        await server.__aenter__()
    assert not server.folder.exists()


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv (util-linux) asks for the death signal")
async def test_a_server_dies_with_a_test_process_that_is_killed(
    kind: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """Although that process could not clean up."""
    program = f"""
import asyncio
from tests.redis_servers.server import RedisServer
async def main():
    async with RedisServer({kind!r}) as server:
        print(server.port, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())"""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=-1, cwd=pytestconfig.rootpath, env=environment
    )
    assert owner.stdout is not None
    port = int(await owner.stdout.readline())
    owner.kill()
    await owner.wait()

    async def is_refused() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((HOST, port)) != 0

    await until(is_refused)


async def test_the_masters_of_a_cluster_share_its_keys(kind: str) -> None:
    """A client finds all of them from one."""
    async with RedisCluster(kind) as cluster:
        host, port = cluster.nodes[0]
        async with redis.asyncio.RedisCluster(host=host, port=port) as client:
            for block in range(30):
                await client.set(f"block {block}", block)
        for master in cluster.masters:
            async with master.client() as client:
                assert await client.dbsize() > 0


async def test_the_sentinel_replaces_a_killed_master(kind: str) -> None:
    """Clients of the sentinel find the written data there."""
    async with RedisSentinel(kind) as group:
        async with group.master.client() as client:
            await client.set("block", "held")
            await client.wait(1, 5000)
        assert not await group.is_promoted()
        await group.kill_master()
        await until(group.is_promoted)
        sentinel = Sentinel([group.address])  # type: ignore[no-untyped-call]
        async with sentinel.sentinels[0], sentinel.master_for(group.master_name) as client:
            assert await client.get("block") == b"held"
