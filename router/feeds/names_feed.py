"""Reads the file of names again when it changes, and reviews the change with the latest requests."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path

import structlog

from router.admission.names import Names, NamesInUse
from router.config.names_file import read_names
from router.config.watched_file import Sleep, WatchedFile, stamp_of
from router.observe.changes import Changes

log = structlog.get_logger()


def watched_names(
    path: Path,
    in_use: NamesInUse,
    changes: Changes,
    providers: Collection[str] = (),
    sleep: Sleep = asyncio.sleep,
) -> WatchedFile[Names]:
    """The file, which is valid now, and whose names are `in_use`. `providers`: see `read_names`. If it becomes wrong,
    the last valid ones stay. Raises `ConfigError`."""

    def use(names: Names) -> None:
        review = in_use.replace(names)
        log.info("names reloaded", names=len(names.exact) + len(names.beginnings), review=review)
        changes.add("names", path.name, review)

    event = "invalid names; the last valid ones stay current"
    found = WatchedFile(lambda: read_names(path, providers), lambda: stamp_of(path), event, use, sleep=sleep)
    in_use.current = found.current()
    return found
