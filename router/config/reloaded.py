"""Notices that files were changed or replaced, and keeps a value that is read from them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

import structlog

from router.errors import ConfigError

T = TypeVar("T")

log = structlog.get_logger()


FileStamp: TypeAlias = tuple[int, int, int, int]
"""Inode, times of the last change of content and of anything (ns), and size."""


def stamp_of(path: str | Path) -> FileStamp | None:
    """Differs after each change of a file's content, and of the target of a link; None if the file is missing."""
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size


def stamps_of(*paths: str | Path | None) -> tuple[FileStamp | None, ...]:
    """The stamps of several files, and None for each that is missing or not named."""
    return tuple(stamp_of(path) if path else None for path in paths)


async def is_steady(
    stamp: Callable[[], object], seen: object, for_s: float, sleep: Callable[[float], Awaitable[None]]
) -> bool:
    """Whether files that had the stamp `seen` still have it after `for_s`: a program may still be writing them."""
    await sleep(for_s)
    return await asyncio.to_thread(stamp) == seen


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
