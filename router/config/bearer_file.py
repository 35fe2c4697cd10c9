"""Reads bearer tokens from a file, again when the file changes."""

from __future__ import annotations

import hmac
from pathlib import Path

import structlog

from router.config.file_stamp import FileStamp, stamp_of
from router.config.listen_schema import AdminListen
from router.errors import ConfigError

MAX_FILE_BYTES = 64 * 1024

log = structlog.get_logger()


class BearerFile:
    """The tokens in a file, one a line: with two of them, a token is rotated without a gap. A file that becomes
    unreadable accepts no token. Raises `ConfigError` if it has none at first. `key` is the file's in router.yaml."""

    def __init__(self, path: str, key: str) -> None:
        self._path = Path(path)
        self._stamp: FileStamp | None = None
        self._tokens: tuple[bytes, ...] = ()
        try:
            self._refresh()
        except OSError as error:
            raise ConfigError(f"{key}: cannot read {path}: {error.strerror}") from error
        if not self._tokens:
            raise ConfigError(f"{key}: {path} contains no token; write one on a line of its own")

    def accepts(self, token: bytes) -> bool:
        """Whether the file contains this token. Compares in constant time."""
        try:
            self._refresh()
        except OSError as error:
            if self._stamp:
                log.error("bearer tokens cannot be read", file=str(self._path), error=str(error))
            self._stamp, self._tokens = None, ()
        return any(hmac.compare_digest(token, known) for known in self._tokens)

    def _refresh(self) -> None:
        stamp = stamp_of(self._path)
        if stamp is None or stamp != self._stamp:
            with self._path.open("rb") as file:
                lines = file.read(MAX_FILE_BYTES).splitlines()
            self._tokens = tuple(line.strip() for line in lines if line.strip())
            self._stamp = stamp


def admin_tokens(listen: AdminListen) -> BearerFile | None:
    """The tokens that the admin listener accepts; None if it needs none. Raises `ConfigError`."""
    return BearerFile(listen.bearer_file, "admin.bearer_file") if listen.bearer_file else None
