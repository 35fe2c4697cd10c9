"""Connections to Redis 7 or Valkey: single server, Sentinel or Cluster, with TLS and ACL users.

Commands have a timeout and are not retried here; callers decide how to retry.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import redis.asyncio
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import AuthenticationError, NoPermissionError, NoScriptError

from router.addresses import join_address
from router.config.index_schema import RedisIndex, RedisTls, split_redis_url
from router.errors import ConfigError

RedisClient: TypeAlias = Any
"""`redis.asyncio.Redis` or `RedisCluster`: unrelated types with the same commands."""


class _Credentials(CredentialProvider):
    def __init__(self, config: RedisIndex) -> None:
        self._config = config

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        try:
            username, password = read_credentials(self._config)
        except ConfigError as error:
            raise AuthenticationError(str(error)) from error
        return (username, password) if username else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return self.get_credentials()


def read_credentials(config: RedisIndex) -> tuple[str, str]:
    """The current user name and password, read again for each connection: those of files and variables override the
    URL's. Raises `ConfigError`."""
    url = split_redis_url(config.url)
    username = _secret(config.username_file, config.username_env, url.username)
    return username, _secret(config.password_file, config.password_env, url.password)


def _secret(file: str | None, variable: str | None, value: str) -> str:
    try:
        if file:
            return Path(file).read_text("utf-8").strip()
        return os.environ[variable] if variable else value
    except (OSError, ValueError) as error:  # the name may be the secret itself
        reason = getattr(error, "strerror", "not UTF-8 text")
        raise ConfigError(f"Redis credentials: the file that is named cannot be read: {reason}") from None
    except KeyError:
        raise ConfigError("Redis credentials: the environment variable that is named is not set") from None


class RedisConnection:
    """A client of one server, Sentinel or cluster. A command that exceeds `timeout_s` raises `redis.RedisError`."""

    def __init__(self, config: RedisIndex) -> None:
        url, self.timeout_s = split_redis_url(config.url), config.timeout_s
        self.nodes = ",".join(join_address(*node) for node in url.nodes)
        self.client: RedisClient
        self._sentinels: Sequence[RedisClient] = ()
        tls = _tls_options(config.tls or RedisTls()) if url.is_tls or config.tls else {}
        options = _options(config, tls)
        if config.mode == "cluster":
            nodes = [ClusterNode(host, port) for host, port in url.nodes]
            options["retry"] = Retry(NoBackoff(), 2)  # the client uses these retries to find a slot's new master
            self.client = RedisCluster(startup_nodes=nodes, **options)
            return
        options["db"] = url.database
        if config.mode == "sentinel":
            to_sentinels = {"socket_timeout": self.timeout_s, **tls}
            sentinel = Sentinel(url.nodes, sentinel_kwargs=to_sentinels, **options)  # type: ignore[no-untyped-call]
            self.client, self._sentinels = sentinel.master_for(config.master), sentinel.sentinels
        else:
            host, port = url.nodes[0]
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


def _tls_options(tls: RedisTls) -> dict[str, Any]:
    return {
        "ssl": True,
        "ssl_ca_certs": tls.ca_file,
        "ssl_certfile": tls.cert_file,
        "ssl_keyfile": tls.key_file,
        "ssl_check_hostname": tls.verify_host,
    }


def _options(config: RedisIndex, tls: Mapping[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {
        "socket_timeout": config.timeout_s,
        "socket_connect_timeout": config.timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
        "client_name": "warmroute",
        **tls,
    }
    url = split_redis_url(config.url)
    files = config.username_file, config.username_env, config.password_file, config.password_env
    if any((*files, url.username, url.password)):
        options["credential_provider"] = _Credentials(config)
    return options


def connect(config: RedisIndex) -> RedisConnection:
    """Raises `ConfigError` if a secret cannot be read now."""
    read_credentials(config)
    return RedisConnection(config)
