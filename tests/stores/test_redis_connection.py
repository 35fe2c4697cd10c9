"""Connections to every kind of deployment, with no more permissions than the README grants."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from redis.exceptions import AuthenticationError, RedisError

from router.errors import ConfigError
from router.index.cluster import EntryKind
from router.index.holders import HolderFacts
from router.stores.holder_writer import HolderWriter, WriteResult
from router.stores.index_reader import IndexReader
from router.stores.redis_connection import RedisConnection, Secret, Tls, redis_error_text
from router.stores.redis_schema import Keys
from router.stores.shared_state import SharedFact, SharedRows
from router.types import BlockChange, Generation, InFlight, Tier
from tests.redis_process import address_of
from tests.redis_servers.server import (
    RedisCluster,
    RedisSentinel,
    RedisServer,
    binaries,
    speaks_tls,
    tls_material,
    until,
)

net = [pytest.mark.anyio, pytest.mark.net]

KEYS = Keys("warmroute")
GENERATION = Generation(model="m", revision="r", block_size_tokens=16)
FACTS = HolderFacts(url="http://pod:8000")
BLOCKS = list(range(1, 100))
FACT = SharedFact(
    name="",
    key="routers",
    ttl_s=1,
    interval_s=1,
    row=dict[str, InFlight],
    own=dict[str, InFlight],
    merge=lambda rows: None,
)
SCHEMA = Path(__file__).parents[2] / "router/stores/README.md"


@pytest.fixture(params=sorted(binaries()))
def kind(request: pytest.FixtureRequest) -> str:
    """Each installed server."""
    return str(request.param)


def acl_of_the_readme() -> str:
    """The command as pasted from the README."""
    return next(line for line in SCHEMA.read_text("utf-8").splitlines() if line.startswith("ACL SETUSER"))


@asynccontextmanager
async def connected(url: str, **options: object) -> AsyncIterator[RedisConnection]:
    """A connection with an address from a configuration."""
    connection = RedisConnection(address_of(url, **options), timeout_s=2)
    try:
        yield connection
    finally:
        await connection.close()


async def publish_and_read(connection: RedisConnection, holder: str = "pod") -> None:
    """All operations of publishers and routers."""
    writer = HolderWriter(connection, KEYS, GENERATION, holder, holder_ttl_s=30)
    assert await writer.begin(EntryKind.EMPTY, FACTS, take_over=True) is WriteResult.OK
    assert await writer.apply([BlockChange(Tier.GPU, True, BLOCKS)], complete=True) is WriteResult.OK
    assert await writer.beat(complete=True) is WriteResult.OK
    reader = IndexReader(connection, KEYS)
    assert await reader.generations() == [GENERATION]
    row = (await reader.rows(GENERATION))[holder]
    assert row.blocks[Tier.GPU] == len(BLOCKS)
    read = [blocks async for _, blocks in reader.blocks(GENERATION, holder, row)]
    assert sorted(block for piece in read for block in piece) == BLOCKS
    entries = await reader.entries(GENERATION, b"0-0", wait_ms=1, count=10)
    assert [entry.kind for _, entry in entries[:2] if entry] == [EntryKind.EMPTY, EntryKind.CHANGE]
    assert await SharedRows(connection, KEYS, "router", FACT).exchange({"a": InFlight()}) == {}
    assert await writer.retire() is WriteResult.OK


# --- addresses ---


def test_files_and_variables_override_the_urls_credentials() -> None:
    """And `tls` also applies to redis://."""
    address = address_of("redis://me:sesame@one", username_env="HOME", tls={"verify_host": False})
    assert (address.username, address.password) == (Secret(variable="HOME"), Secret(value="sesame"))
    assert address.tls == Tls(verify_host=False)
    assert address_of("rediss://one").tls == Tls()


def test_secrets_are_never_printed() -> None:
    """Configurations are logged."""
    assert "sesame" not in repr(address_of("redis://me:sesame@one"))


@pytest.mark.parametrize("secret", [Secret(file="/no/such/file"), Secret(variable="NO_SUCH_VARIABLE")])
def test_a_missing_secret_says_whether_a_file_or_a_variable_was_named(secret: Secret) -> None:
    with pytest.raises(ConfigError, match=r"Redis credentials: the (file|environment variable) that is named"):
        secret.read()


# --- deployments ---


class TestDeployments:
    """One set of keys and scripts works on all of them."""

    pytestmark = net

    async def test_a_single_server(self, kind: str) -> None:
        """Also with another database."""
        async with RedisServer(kind) as server, connected(server.url.removesuffix("0") + "5") as connection:
            await publish_and_read(connection)
            async with server.client(db=0) as other:
                assert await other.dbsize() == 0

    async def test_a_cluster(self, kind: str) -> None:
        """No script crosses slots, and one node is enough to find all masters."""
        async with RedisCluster(kind) as cluster:
            host, port = cluster.nodes[0]
            async with connected(f"redis://{host}:{port}", mode="cluster") as connection:
                for holder in ("a", "b", "c"):
                    await publish_and_read(connection, holder)

    async def test_a_sentinel_that_changes_the_master(self, kind: str) -> None:
        """The same connection continues with the new master."""
        async with RedisSentinel(kind) as group:
            host, port = group.address
            options = {"mode": "sentinel", "master": group.master_name}
            async with connected(f"redis://{host}:{port}", **options) as connection:
                await publish_and_read(connection)
                group.master.kill()
                with pytest.raises((RedisError, OSError)):
                    await publish_and_read(connection)
                await until(group.is_promoted)

                async def goes_on() -> bool:
                    await connection.client.delete(*await connection.client.keys("*") or ["none"])
                    await publish_and_read(connection)
                    return True

                await until(goes_on)

    @pytest.mark.skipif(shutil.which("openssl") is None, reason="the openssl command makes the certificates")
    @pytest.mark.parametrize("kind", [each for each in binaries() if speaks_tls(each)])
    async def test_tls_with_a_private_ca(self, kind: str, tmp_path: Path) -> None:
        """Clients without its file do not connect."""
        files = tls_material(tmp_path)
        async with RedisServer(kind, tls=files) as server:
            async with connected(server.url, tls={"ca_file": str(files.ca)}) as connection:
                await publish_and_read(connection)
            async with connected(server.url) as stranger:
                with pytest.raises(RedisError, match="CERTIFICATE_VERIFY_FAILED"):
                    await stranger.client.ping()


class TestUsers:
    """User names and passwords from files or the environment, which can change without a restart."""

    pytestmark = net

    async def test_the_user_of_the_readme_has_all_required_permissions(self, kind: str) -> None:
        """And none for other keys."""
        line = acl_of_the_readme()
        async with RedisServer(kind) as server:
            async with server.client() as admin:
                assert await admin.execute_command(*line.split())
            url = server.url.replace("redis://", "redis://warmroute:secret@")
            async with connected(url) as connection:
                await publish_and_read(connection)
                with pytest.raises(RedisError, match=r"(?i)permission"):
                    await connection.client.get("somebody-elses")
                with pytest.raises(RedisError, match=r"(?i)permission"):
                    await connection.client.flushall()

    async def test_a_rotated_password_is_read_again(self, kind: str, tmp_path: Path) -> None:
        """With the next connection."""
        secret = tmp_path / "password"
        secret.write_text("old\n")
        async with (
            RedisServer(kind, {"requirepass": "old"}) as server,
            server.client() as admin,
            connected(f"redis://127.0.0.1:{server.port}", password_file=str(secret)) as connection,
        ):
            await publish_and_read(connection)
            await admin.config_set("requirepass", "new")
            await admin.client_kill_filter(_type="normal", skipme=True)
            with pytest.raises(RedisError):
                await connection.client.ping()
                await connection.client.ping()
            secret.write_text("new\n")
            await publish_and_read(connection, "after")

    async def test_a_missing_secret_at_run_time_is_a_redis_error(self, kind: str, tmp_path: Path) -> None:
        """So that it is retried like any other."""
        address = replace(address_of("redis://127.0.0.1:1"), password=Secret(file=str(tmp_path / "gone")))
        async with RedisServer(kind, {"requirepass": "old"}) as server:
            connection = RedisConnection(replace(address, nodes=(("127.0.0.1", server.port),)), timeout_s=1)
            with pytest.raises(AuthenticationError, match="the file that is named cannot be read: No such file"):
                await connection.client.ping()
            await connection.close()


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (RedisError("Error 111 connecting to a:1. Connect call failed ('a', 1)."), "Connect call failed ('a', 1)"),
        (RedisError("ERR unknown command 'AUTH', with args beginning with: 'secret'"), "ERR unknown command 'AUTH'"),
        (RedisError("No master found for 'm' : <redis.asyncio.client.Redis(secret)>"), "No master found for 'm'"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_an_error_is_one_sentence_without_arguments_of_the_command(error: Exception, shown: str) -> None:
    """These may be a password."""
    text = redis_error_text(error)
    assert text.endswith(shown) and "secret" not in text
