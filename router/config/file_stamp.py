"""Notices that a file was changed or replaced, without reading it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple


class FileStamp(NamedTuple):
    """Differs after each change of a file's content, and of the target of a link."""

    inode: int
    modified_ns: int
    changed_ns: int
    size_bytes: int


def stamp_of(path: str | Path) -> FileStamp | None:
    """The stamp now; None if the file is missing."""
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return FileStamp(found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size)


def stamps_of(*paths: str | Path | None) -> tuple[FileStamp | None, ...]:
    """The stamps of several files, and None for each that is missing or not named."""
    return tuple(stamp_of(path) if path else None for path in paths)


async def is_steady(
    stamp: Callable[[], object], seen: object, for_s: float, sleep: Callable[[float], Awaitable[None]]
) -> bool:
    """Whether files that had the stamp `seen` still have it after `for_s`: a program may still be writing them."""
    await sleep(for_s)
    return await asyncio.to_thread(stamp) == seen
