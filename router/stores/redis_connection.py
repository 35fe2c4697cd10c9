"""Connections to Redis 7 or Valkey: single server, Sentinel or Cluster, with TLS and ACL users.

Commands have a timeout and are not retried here; callers decide how to retry.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import redis.asyncio
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import AuthenticationError, NoPermissionError, NoScriptError

from router.addresses import join_address
from router.errors import ConfigError

RedisClient: TypeAlias = Any
"""`redis.asyncio.Redis` or `RedisCluster`: unrelated types with the same commands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Secret:
    """A user name or password: a value, or a file or environment variable that is read for each connection."""

    value: str = field(default="", repr=False)
    file: str | None = None
    variable: str | None = None

    def read(self) -> str:
        """The current value. Raises `ConfigError`."""
        try:
            if self.file is not None:
                return Path(self.file).read_text("utf-8").strip()
            return os.environ[self.variable] if self.variable is not None else self.value
        except (OSError, ValueError) as error:  # the name may be the secret itself
            reason = getattr(error, "strerror", "not UTF-8 text")
            raise ConfigError(f"Redis credentials: the file that is named cannot be read: {reason}") from None
        except KeyError:
            raise ConfigError("Redis credentials: the environment variable that is named is not set") from None


class _Credentials(CredentialProvider):
    def __init__(self, username: Secret | None, password: Secret | None) -> None:
        self._username = username
        self._password = password

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        try:
            password = self._password.read() if self._password else ""
            return (self._username.read(), password) if self._username else (password,)
        except ConfigError as error:
            raise AuthenticationError(str(error)) from error

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return self.get_credentials()


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisAddress:
    """Address and credentials. `nodes`: the server, the sentinels, or some nodes of the cluster."""

    nodes: tuple[tuple[str, int], ...]
    mode: Literal["single", "sentinel", "cluster"] = "single"
    master: str = ""
    database: int = 0
    username: Secret | None = None
    password: Secret | None = None
    tls: Mapping[str, Any] = field(default_factory=dict)
    """Options of the client."""


class RedisConnection:
    """A client for one address. A command that exceeds `timeout_s` raises `redis.RedisError`."""

    def __init__(self, address: RedisAddress, *, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.nodes = ",".join(join_address(*node) for node in address.nodes)
        self.client: RedisClient
        self._sentinels: Sequence[RedisClient] = ()
        options = _options(address, timeout_s)
        if address.mode == "cluster":
            nodes = [ClusterNode(host, port) for host, port in address.nodes]
            options["retry"] = Retry(NoBackoff(), 2)  # the client uses these retries to find a slot's new master
            self.client = RedisCluster(startup_nodes=nodes, **options)
            return
        options["db"] = address.database
        if address.mode == "sentinel":
            to_sentinels = {"socket_timeout": timeout_s, **address.tls}
            sentinel = Sentinel(address.nodes, sentinel_kwargs=to_sentinels, **options)  # type: ignore[no-untyped-call]
            self.client, self._sentinels = sentinel.master_for(address.master), sentinel.sentinels
        else:
            host, port = address.nodes[0]
            self.client = redis.asyncio.Redis(host=host, port=port, **options)

    async def script(self, lua: str, keys: Sequence[str], args: Sequence[object], suffix: str = "") -> Any:
        """Run a script, by its digest if the server has it. With the suffix `_RO`, the right to read suffices."""
        digest = hashlib.sha1(lua.encode(), usedforsecurity=False).hexdigest()
        try:
            return await self.client.execute_command("EVALSHA" + suffix, digest, len(keys), *keys, *args)
        except NoScriptError:
            return await self.client.execute_command("EVAL" + suffix, lua, len(keys), *keys, *args)

    async def read(self, lua: str, key: str, *args: object) -> Any:
        """Run a script that reads one key."""
        return await self.script(lua, [key], args, "_RO")

    async def may_write(self, sorted_set: str) -> bool:
        """Whether this user may write the key. Changes nothing."""
        try:
            await self.client.zrem(sorted_set, "")
        except NoPermissionError:
            return False
        return True

    async def touch(self, key: str, member: bytes | str) -> None:
        await self.client.zadd(key, {member: time.time()})

    async def close(self) -> None:
        for client in (self.client, *self._sentinels):
            await client.aclose()


def redis_error_text(error: Exception) -> str:
    """The error without the arguments of a command, which may be a password, and without a client's attributes."""
    text = str(error).partition(", with args")[0].partition(" : <")[0]
    return f"{text:.200}".rstrip(".") or type(error).__name__


def _options(address: RedisAddress, timeout_s: float) -> dict[str, Any]:
    options: dict[str, Any] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
        "client_name": "warmroute",
        **address.tls,
    }
    if address.username or address.password:
        options["credential_provider"] = _Credentials(address.username, address.password)
    return options
