"""Checks and splits the URL of a Redis, which may contain a password.

No error message contains any part of the URL.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, TypeAlias
from urllib.parse import unquote

from pydantic import AfterValidator, SecretStr

from router.addresses import HostPort, read_address

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
