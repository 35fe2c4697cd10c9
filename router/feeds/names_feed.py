"""Reads the file of names again when it changes, and reviews the change with the latest requests."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path
from typing import TypeAlias

import structlog

from router.admission.names import Names, NamesInUse, review
from router.config.names_file import read_names
from router.config.watched_file import Sleep, WatchedFile, stamp_of
from router.observe.changes import Changes

log = structlog.get_logger()

ReviewedNames: TypeAlias = tuple[Names, str]
"""The names, and how many of the latest requests they change."""


def watched_names(
    path: Path,
    in_use: NamesInUse,
    changes: Changes,
    providers: Collection[str] = (),
    sleep: Sleep = asyncio.sleep,
) -> WatchedFile[ReviewedNames]:
    """The file, which is valid now, and whose names are `in_use`. `providers`: see `read_names`. If it becomes wrong,
    the last valid ones stay. Raises `ConfigError`."""

    def read() -> ReviewedNames:
        """In a thread: a review takes milliseconds."""
        names = read_names(path, providers)
        return names, review(names, tuple(in_use.recent))

    def use(found: ReviewedNames) -> None:
        names, reviewed = found
        in_use.current = names
        log.info("names reloaded", names=len(names.exact) + len(names.beginnings), review=reviewed)
        changes.add("names", path.name, reviewed)

    event = "invalid names; the last valid ones stay current"
    found = WatchedFile(read, lambda: stamp_of(path), event, use, sleep=sleep)
    in_use.current, _ = found.current()
    return found
