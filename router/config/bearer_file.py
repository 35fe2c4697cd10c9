"""Reads bearer tokens from a file, again when the file changes."""

from __future__ import annotations

import hmac
from functools import partial

from router.config.load import read_named
from router.config.schema import AdminListen
from router.config.watched_file import watched
from router.errors import ConfigError


class BearerFile:
    """The tokens in a file, one a line: with two of them, a token is rotated without a gap. A file that becomes
    unreadable accepts no token. Raises `ConfigError` if it has none at first. `key` is the file's in router.yaml."""

    def __init__(self, path: str, key: str) -> None:
        self._file = watched(partial(_read_tokens, path, key), path, event="bearer tokens cannot be read")
        self._file.current()

    def accepts(self, token: bytes) -> bool:
        """Whether the file contains this token. Compares in constant time."""
        tokens = self._file.current()
        return not self._file.error and any(hmac.compare_digest(token, known) for known in tokens)


def _read_tokens(path: str, key: str) -> list[bytes]:
    tokens = list(filter(None, map(bytes.strip, read_named(key, path).splitlines())))
    if not tokens:
        raise ConfigError(f"{key}: {path} contains no token; write one on a line of its own")
    return tokens


def admin_tokens(listen: AdminListen) -> BearerFile | None:
    """The tokens that the admin listener accepts; None if it needs none. Raises `ConfigError`."""
    return BearerFile(listen.bearer_file, "admin.bearer_file") if listen.bearer_file else None
