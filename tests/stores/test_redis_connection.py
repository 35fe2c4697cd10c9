"""Connections to every kind of deployment, with no more permissions than the README grants."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError
from structlog.testing import capture_logs

from router.admission.sharing import CeilingReport, MeterSharing
from router.config.index_schema import RedisIndex
from router.errors import ConfigError
from router.feeds.shared_rows import SharedCalibration, SharedDrains, SharedQuotas, SharedResponses, SharedWork
from router.fleet.drains import Drain, Drains
from router.fleet.ledger import Ledger
from router.index.cluster import EntryKind
from router.index.holders import HolderFacts
from router.index.stored_responses import StoredResponse
from router.policy.calibration import Calibration
from router.stores.holder_writer import HolderWriter, WriteResult
from router.stores.index_reader import IndexReader
from router.stores.redis_connection import RedisConnection, read_credentials, redis_error_text
from router.stores.redis_schema import Keys
from router.types import BlockChange, Generation, InFlight, Tier
from tests.redis_process import address_of
from tests.redis_servers.server import (
    RedisCluster,
    RedisSentinel,
    RedisServer,
    server_kinds,
    speaks_tls,
    tls_material,
    until,
)

net = [pytest.mark.anyio, pytest.mark.net]

KEYS = Keys("warmroute")
GENERATION = Generation(model="m", revision="r", block_size_tokens=16)
FACTS = HolderFacts(url="http://pod:8000")
BLOCKS = list(range(1, 100))
SCHEMA = Path(__file__).parents[2] / "router/stores/README.md"


@pytest.fixture(params=server_kinds())
def kind(request: pytest.FixtureRequest) -> str:
    """Each installed server."""
    return str(request.param)


def acl_of_the_readme() -> list[str]:
    """The commands as pasted from the README."""
    return [line for line in SCHEMA.read_text("utf-8").splitlines() if line.startswith("ACL SETUSER")]


@asynccontextmanager
async def connected(url: str, **options: object) -> AsyncIterator[RedisConnection]:
    """A connection with an address from a configuration."""
    connection = RedisConnection(address_of(url, **options, timeout_s=20))
    try:
        yield connection
    finally:
        await connection.close()


async def publish_and_read(
    connection: RedisConnection, router: RedisConnection | None = None, holder: str = "pod"
) -> None:
    """What publishers write and routers read."""
    router = router or connection
    writer = HolderWriter(connection, KEYS, GENERATION, holder, holder_ttl_s=30)
    assert await writer.begin(EntryKind.EMPTY, FACTS, take_over=True) is WriteResult.OK
    assert await writer.apply([BlockChange(Tier.GPU, True, BLOCKS)], complete=True) is WriteResult.OK
    assert await writer.beat(complete=True) is WriteResult.OK
    reader = IndexReader(router, KEYS)
    assert await reader.generations() == [GENERATION]
    row = (await reader.rows(GENERATION))[holder]
    assert row.blocks[Tier.GPU] == len(BLOCKS)
    read = [blocks async for _, _, blocks in reader.blocks(GENERATION, holder, row)]
    assert sorted(block for piece in read for block in piece) == BLOCKS
    entries = await reader.entries(GENERATION, b"0-0")
    assert [entry.kind for _, entry in entries[:2] if entry] == [EntryKind.EMPTY, EntryKind.CHANGE]
    assert await reader.last_entry(GENERATION) == entries[-1][0]
    await share_everything(router)
    assert await writer.retire() is WriteResult.OK


async def no_pods() -> None:
    """There are none to apply drains to."""


async def share_everything(router: RedisConnection) -> None:
    """What routers share."""
    assert await SharedWork(router, KEYS, "router", Ledger()).rows({"a": InFlight()}) == {}
    await SharedCalibration(router, KEYS, Calibration(), lambda: ["org/model"]).exchange()
    responses = SharedResponses(router, KEYS)
    responses.add(StoredResponse("r", "a", "m", 0.0))
    await responses.exchange()
    assert await responses.find("r")
    book = SharedQuotas(router, KEYS, "router", MeterSharing())
    assert (await book.grants([CeilingReport("m", 10, 0, 5)])).members == 1
    await book.leave()
    drains = Drains()
    drains.change("rack=r12", Drain(0.0, "ada"))
    assert await SharedDrains(router, KEYS, drains, no_pods).share()


# --- addresses ---


def test_files_and_variables_override_the_urls_credentials() -> None:
    """And `tls` also applies to redis://."""
    config = address_of("redis://me:sesame@one", username_env="HOME", tls={"verify_host": False})
    assert read_credentials(config) == (os.environ["HOME"], "sesame")
    secure = options_of(config)
    assert secure["ssl_cert_reqs"] and not secure["ssl_check_hostname"]
    assert options_of(address_of("rediss://one"))["ssl_check_hostname"]
    assert "ssl_check_hostname" not in options_of(address_of("redis://one"))


def options_of(config: RedisIndex) -> Mapping[str, Any]:
    """What a client passes to its connections."""
    found: Mapping[str, Any] = RedisConnection(config).client.connection_pool.connection_kwargs
    return found


def test_secrets_are_never_printed() -> None:
    """Configurations are logged."""
    assert "sesame" not in repr(address_of("redis://me:sesame@one"))


@pytest.mark.parametrize("secret", [{"password_file": "/no/such/file"}, {"username_env": "NO_SUCH_VARIABLE"}])
def test_a_missing_secret_says_whether_a_file_or_a_variable_was_named(secret: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"Redis credentials: the (file|environment variable) that is named"):
        read_credentials(address_of("redis://one", **secret))


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
                    await publish_and_read(connection, holder=holder)

    async def test_a_sentinel_that_changes_the_master(self, kind: str) -> None:
        """The same connection continues with the new master."""
        async with RedisSentinel(kind) as group:
            host, port = group.address
            options = {"mode": "sentinel", "master": group.master_name}
            async with connected(f"redis://{host}:{port}", **options) as connection:
                await publish_and_read(connection)
                await group.kill_master()
                with pytest.raises((RedisError, OSError)):
                    await publish_and_read(connection)
                await until(group.is_promoted)

                async def goes_on() -> bool:
                    await connection.client.delete(*await connection.client.keys("*") or ["none"])
                    await publish_and_read(connection)
                    return True

                await until(goes_on)

    @pytest.mark.skipif(shutil.which("openssl") is None, reason="the openssl command makes the certificates")
    async def test_tls_with_a_private_ca(self, kind: str, tmp_path: Path) -> None:
        """Clients without its file do not connect."""
        if not speaks_tls(kind):
            pytest.skip("the wheel of Valkey has no TLS; CI tests it with Redis 7")
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

    @pytest.fixture
    async def users(self, kind: str) -> AsyncIterator[tuple[RedisConnection, RedisConnection]]:
        """The publishers' and the routers' connection, with the users of the README."""
        async with RedisServer(kind) as server:
            async with server.client() as admin:
                for line in acl_of_the_readme():
                    assert await admin.execute_command(*line.split())
            urls = (server.url.replace("redis://", f"redis://{name}:secret@") for name in ("publisher", "router"))
            publisher_url, router_url = urls
            async with connected(publisher_url) as publisher, connected(router_url) as router:
                yield publisher, router

    async def test_the_users_of_the_readme_have_all_required_permissions(
        self, users: tuple[RedisConnection, RedisConnection]
    ) -> None:
        """And none for other keys."""
        publisher, router = users
        await publish_and_read(publisher, router)
        await share_everything(router)
        for connection in users:
            with pytest.raises(RedisError, match=r"(?i)permission"):
                await connection.client.get("somebody-elses")
            with pytest.raises(RedisError, match=r"(?i)permission"):
                await connection.client.flushall()

    @pytest.mark.parametrize(
        "key",
        [
            KEYS.routers,
            KEYS.drains,
            KEYS.quota_members,
            KEYS.quota("tenant\0m\0PROMPT"),
            KEYS.quota("a}:b"),
            KEYS.response("resp_1"),
            KEYS.calibration("org/model"),
        ],
    )
    async def test_a_publisher_can_neither_write_nor_read_what_routers_share(
        self, users: tuple[RedisConnection, RedisConnection], key: str
    ) -> None:
        """By command, or in a script."""
        publisher, router = users
        for attempt in (
            publisher.client.set(key, "forged"),
            publisher.client.get(key),
            publisher.client.rename(KEYS.scopes, key),
            publisher.client.copy(KEYS.scopes, key),
            publisher.script("return redis.call('SET', KEYS[1], 'forged')", [key], []),
            publisher.script("return redis.call('SET', ARGV[1], 'forged')", [], [key]),
        ):
            with pytest.raises(RedisError, match=r"(?i)permission|can't access"):
                await attempt
        assert not await router.client.exists(key)
        with pytest.raises(NoPermissionError):  # names of tenants and ids of responses
            await publisher.client.scan()

    async def test_a_router_cannot_write_what_publishers_write(
        self, users: tuple[RedisConnection, RedisConnection]
    ) -> None:
        """Which proves that it is not their user."""
        publisher, router = users
        writer = HolderWriter(router, KEYS, GENERATION, "forged", holder_ttl_s=30)
        with pytest.raises(NoPermissionError):
            await writer.begin(EntryKind.EMPTY, FACTS, take_over=True)
        assert await publisher.may_write(KEYS.scopes) and not await router.may_write(KEYS.scopes)

    async def test_the_owner_of_a_response_is_read_only_with_users_of_their_own(
        self, users: tuple[RedisConnection, RedisConnection], kind: str
    ) -> None:
        """A publisher with the routers' user can name any tenant. Responses that belong to nobody are found."""
        _, router = users
        everything = ("~*", "+@all", "on", "nopass")
        async with RedisServer(kind) as server, server.client() as admin, connected(server.url) as shared:
            assert await admin.execute_command("ACL", "SETUSER", "default", *everything)
            for connection, found in ((router, {"owned", "free"}), (shared, {"free"})):
                responses = SharedResponses(connection, KEYS)
                responses.add(StoredResponse("owned", "pod", "m", 0.0, "tenant a"))
                responses.add(StoredResponse("free", "pod", "m", 0.0))
                await responses.exchange()
                with capture_logs() as lines:
                    for _ in range(2):
                        assert {each for each in ("owned", "free") if await responses.find(each)} == found
                assert len(lines) == (connection is shared)

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
            await publish_and_read(connection, holder="after")

    async def test_a_missing_secret_at_run_time_is_a_redis_error(self, kind: str, tmp_path: Path) -> None:
        """So that it is retried like any other."""
        async with RedisServer(kind, {"requirepass": "old"}) as server:
            url, gone = f"redis://127.0.0.1:{server.port}", str(tmp_path / "gone")
            connection = RedisConnection(address_of(url, password_file=gone, timeout_s=20))
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
