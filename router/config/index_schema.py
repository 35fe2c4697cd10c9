"""Configuration of the cluster index and of `warmroute publish`: the sections `index` and `publish` of router.yaml.

The URL of a Redis may contain a password: no error message contains any part of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias
from urllib.parse import unquote

from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt, SecretStr, model_validator

from router.addresses import HostPort, read_address
from router.config.load import FilePath, HttpUrl, SecretPath, SecretVariable, Strict

DEFAULT_PORT = 6379


@dataclass(frozen=True, slots=True)
class RedisUrlParts:
    """The parts of `redis[s]://[user[:password]@]host[:port][,host[:port]...][/database]`."""

    nodes: tuple[HostPort, ...]
    database: int
    username: str
    password: str = field(repr=False)
    is_tls: bool


def split_redis_url(url: SecretStr) -> RedisUrlParts:
    """The parts of the URL. Raises `ValueError`."""
    text = url.get_secret_value()
    scheme, separator, rest = text.partition("://")
    if scheme not in ("redis", "rediss") or not separator:
        raise ValueError("a Redis URL must start with redis:// or rediss://")
    if not text.isprintable() or " " in text:
        raise ValueError("a Redis URL must not contain spaces or control characters; percent-encode them")
    authority, _, database = rest.partition("/")
    credentials, _, servers = authority.rpartition("@")
    username, _, password = credentials.partition(":")
    if database and not (database.isascii() and database.isdecimal()):
        raise ValueError("the database in a Redis URL must be a number; percent-encode / in the password")
    return RedisUrlParts(
        nodes=tuple(map(_node, servers.split(","))),
        database=int(database or 0),
        username=unquote(username),
        password=unquote(password),
        is_tls=scheme == "rediss",
    )


def _node(server: str) -> HostPort:
    try:
        return read_address(server, DEFAULT_PORT)
    except ValueError:
        raise ValueError(
            "a Redis URL needs host[:port] for each server, an IPv6 address in brackets and without a zone; "
            "percent-encode :/?#[]@ in the password"
        ) from None


def _checked(url: SecretStr) -> SecretStr:
    split_redis_url(url)
    return url


RedisUrl: TypeAlias = Annotated[SecretStr, AfterValidator(_checked)]
"""A setting with such a URL. It is printed as asterisks."""


class RedisTls(Strict):
    """TLS files for Redis. Without `ca_file`, the system's certificate authorities are used."""

    ca_file: FilePath | None = None
    cert_file: FilePath | None = None
    key_file: SecretPath | None = None
    verify_host: bool = True


class RedisIndex(Strict):
    """The Redis that holds the cluster index, and how the router replicates it."""

    url: RedisUrl
    """redis[s]://[user[:password]@]host[:port][,host[:port]...][/database]; several hosts: sentinels, or cluster.
    Prefer `password_file` or `password_env` to a password in the URL."""
    mode: Literal["single", "sentinel", "cluster"] = "single"
    master: str = ""
    """Name of the master; required with `mode: sentinel`."""
    username_file: SecretPath | None = None
    username_env: SecretVariable | None = None
    password_file: SecretPath | None = None
    password_env: SecretVariable | None = None
    """Credentials are read again for every connection, so they can be rotated."""
    tls: RedisTls | None = None
    namespace: str = "warmroute"
    """Prefix of every key. Must be the same for all routers and publishers of a fleet."""
    timeout_s: PositiveFloat = 2.0
    """Timeout of one Redis command, off the request path."""
    holder_ttl_s: PositiveFloat = 15.0
    """A holder whose publisher sends nothing for this long leaves the index."""
    max_replica_bytes: PositiveInt = 2 * 1024**3
    """Memory limit of the in-memory replica: 16 to 54 bytes per block and holder with up to 64 holders."""
    max_stale_s: PositiveFloat = 300.0
    """While Redis is unavailable, the replica is used up to this age."""
    ready_timeout_s: NonNegativeFloat = 10.0
    """Startup waits this long for the index and the self-tests, then serves without them; not while Redis is away."""

    @model_validator(mode="after")
    def _sentinel_needs_a_master(self) -> RedisIndex:
        if self.mode == "sentinel" and not self.master:
            raise ValueError("`mode: sentinel` requires the name of the master, for example `master: mymaster`")
        return self


class Index(Strict):
    """Where the router learns of cached blocks, and limits of its caches and predictions."""

    redis: RedisIndex | None = None
    """The cluster index. Without it, each router uses only its own KV events and predictions."""
    tokens_cache_bytes: PositiveInt = 64 * 1024 * 1024
    """Per model: memory for the tokens of known texts. Incremental prompts use the same amount again."""
    incremental_prompts: bool = True
    """Render and encode only the new messages of a chat that continues a known one."""
    predicted_ttl_s: PositiveFloat = 30.0
    """How long a prompt counts as cached after its first token, on a pod that will confirm it by KV events."""
    no_events_ttl_s: PositiveFloat = 1200.0
    """The same for pods that publish no KV events."""
    no_events_capacity_tokens: PositiveInt = 400_000
    """Assumed KV capacity of a pod that publishes neither KV events nor its capacity."""


class MooncakeStore(Strict):
    """A Mooncake store, read from its master's list of keys."""

    kind: Literal["mooncake"]
    url: HttpUrl
    """The master's HTTP admin port."""
    model: str
    """The model of this configuration whose KV the store holds."""
    key_prefix: str = ""
    """Prefix of the store's keys: usually the model name or path in the engines' configuration. Default: `model`."""
    id: str = "mooncake"
    group: int = 0
    poll_interval_s: PositiveFloat = 2.0
    readable_by: str = "*"
    """`*` if every pod of the model can read the store, or the name of the only host that can."""


class LmcacheServers(Strict):
    """LMCache servers (multiprocess mode) that use this publisher as their coordinator."""

    kind: Literal["lmcache"]
    model: str
    """The model of this configuration."""
    engine_model_name: str = ""
    """The model name or path in the engines' configuration. Default: `model`."""
    group: int = 0


class StandardBackend(Strict):
    """A cache tier that sends standardised KV events to `POST /kv-events`."""

    kind: Literal["standard"]
    backend: str
    """Its backend_id."""
    model: str
    url: HttpUrl | None = None
    """The pod that owns the cache. Exclusive with `readable_by`."""
    readable_by: str = ""
    """For a store: `*`, or the name of the host that can read it. Exclusive with `url`."""

    @model_validator(mode="after")
    def _has_one_owner(self) -> StandardBackend:
        if (self.url is None) is (not self.readable_by):
            raise ValueError("set either url (the pod that owns the cache) or readable_by (for a store), not both")
        return self


class TierTtl(Strict):
    """Seconds, by tier of a pod."""

    cpu: PositiveFloat = 3600.0
    disk: PositiveFloat = 3600.0
    remote: PositiveFloat = 3600.0


StoreConfig = Annotated[MooncakeStore | LmcacheServers | StandardBackend, Field(discriminator="kind")]


class Publish(Strict):
    """Settings of `warmroute publish`, which also reads models, pods and index.redis."""

    stores: tuple[StoreConfig, ...] = ()
    """Caches that do not belong to a single pod."""
    ttl: TierTtl = TierTtl()
    """Blocks announced in these tiers expire after this time: some tiers never announce a removal."""
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 9470
    """Listener for health, metrics and incoming KV events."""
    heartbeat_s: PositiveFloat = 5.0
    flush_interval_ms: PositiveFloat = 20.0
    """Changes are collected for this long before they are written to Redis."""
    reload_jitter_s: NonNegativeFloat = 1.0
    """After a loss of Redis, each publisher reloads at a random time within this interval."""
