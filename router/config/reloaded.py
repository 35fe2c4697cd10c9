"""Keeps a value that is read from files, and reads it again when they change."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, TypeVar

import structlog

from router.config.file_stamp import FileStamp, stamps_of
from router.errors import ConfigError

T = TypeVar("T")

log = structlog.get_logger()


class Reloaded(Generic[T]):
    """The value that `read` returns for these files. While it raises `ConfigError`, the last value stays in use, each
    call of `current` tries again, and the log has one line for each new problem, with `event`. `first`: the value until
    the files were read once."""

    def __init__(self, read: Callable[[], T], *files: str | None, event: str, first: T | None = None) -> None:
        self._read = read
        self._files = files
        self._event = event
        self._value = first
        self._stamps: tuple[FileStamp | None, ...] | None = None
        self.error = ""
        """Why the files cannot be used now."""
        self.failed_since_s: float | None = None
        """Unix time since when they cannot."""

    def current(self) -> T:
        """The value. Raises `ConfigError` if there is none yet."""
        stamps = stamps_of(*self._files)
        if self._value is None or self.error or stamps != self._stamps:
            self._value = self._read_again(self._value)
            self._stamps = stamps
        return self._value

    def _read_again(self, last: T | None) -> T:
        try:
            found = self._read()
        except ConfigError as error:
            if last is None:
                raise
            if str(error) != self.error:
                log.error(self._event, error=str(error))
            self.error, self.failed_since_s = str(error), self.failed_since_s or time.time()
            return last
        if self._stamps is not None:
            log.info("files read again", files=[file for file in self._files if file])
        self.error, self.failed_since_s = "", None
        return found
