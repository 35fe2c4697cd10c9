"""Checks and splits the URL of a Redis, which may contain a password.

No error message contains any part of the URL.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, TypeAlias
from urllib.parse import unquote, urlsplit

from pydantic import AfterValidator, SecretStr

DEFAULT_PORT = 6379


@dataclass(frozen=True, slots=True)
class RedisUrlParts:
    """The parts of `redis[s]://[user[:password]@]host[:port][,host[:port]...][/database]`."""

    nodes: tuple[tuple[str, int], ...]
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
        nodes=tuple(_node(server) for server in servers.split(",")),
        database=int(database or 0),
        username=unquote(username),
        password=unquote(password),
        is_tls=scheme == "rediss",
    )


def _node(server: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{server}")
        host, port = parts.hostname, parts.port
    except ValueError:  # its message contains the value
        host, port = None, None
    if not host or parts.query or parts.fragment or parts.netloc != server:
        raise ValueError("a Redis URL needs host[:port] for each server; percent-encode :/?#[]@ in the password")
    return host, DEFAULT_PORT if port is None else port


def _checked(url: SecretStr) -> SecretStr:
    split_redis_url(url)
    return url


RedisUrl: TypeAlias = Annotated[SecretStr, AfterValidator(_checked)]
"""A setting with such a URL. It is printed as asterisks."""
