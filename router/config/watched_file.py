"""Values that are read from files, and read again when the files change.

`WatchedFile` is the one place that notices a change, reads, and keeps the last value while the files are wrong: for
policies, tenants, lists of pods, certificates and secrets. `StartupFiles` are those that need a restart.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Final, Generic, TypeAlias, TypeVar, cast

import structlog

from router.config.schema import RouterConfig
from router.errors import ConfigError

T = TypeVar("T")
Sleep: TypeAlias = Callable[[float], Awaitable[None]]

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


_NOTHING: Final = object()


@dataclass(slots=True, eq=False)
class WatchedFile(Generic[T]):
    """The value that `read` returns. While it raises `ConfigError`, the last value stays in use, and the log has one
    line for each problem, with `event`. `stamp` differs after each change of the files; `read_stamp` is that of what
    was read last, where `read` itself finds out which files there are. `on_read` gets each value but the first.

    `current` looks at the files at once. `follow` and `check` look from time to time, in a thread, and read files that
    have not changed for `steady_s`: a program may still be writing them."""

    read: Callable[[], T]
    stamp: Callable[[], object]
    event: str = ""
    on_read: Callable[[T], None] = lambda _value: None
    read_stamp: Callable[[], object] | None = None
    steady_s: float = 0.2
    sleep: Sleep = asyncio.sleep
    last: T | None = None
    """The last good value."""
    error: str = ""
    """Why the files cannot be used now."""
    failed_since_s: float | None = None
    """Unix time since when they cannot."""
    _seen: object = _NOTHING

    @property
    def value(self) -> T:
        return cast(T, self.last)

    def current(self) -> T:
        """The value after a look at the files, which are read again also while they cannot be used: what is wrong may
        be another file. Raises `ConfigError` if there is none yet."""
        stamp = self.stamp()
        if self.last is None or self.error or stamp != self._known():
            try:
                self._accept(self.read(), stamp)
            except ConfigError as error:
                if self.last is None:
                    raise
                self._refuse(str(error), stamp)
        return self.value

    async def follow(self, interval_s: float) -> None:
        while True:
            await self.sleep(interval_s)
            await self.check()

    async def check(self) -> bool:
        """Read the files if they are to be read. Returns whether they were."""
        is_due = await self.is_due()
        if is_due:
            await self.reload()
        return is_due

    async def is_due(self) -> bool:
        """Whether the files have changed and are steady, or were never read."""
        stamp, known = await asyncio.to_thread(self.stamp), self._known()
        if stamp == known or known is _NOTHING:
            return stamp != known
        await self.sleep(self.steady_s)
        return await asyncio.to_thread(self.stamp) == stamp

    async def reload(self) -> None:
        """Read the files, changed or not. Does not raise if they are wrong."""
        stamp = await asyncio.to_thread(self.stamp)
        try:
            value = await asyncio.to_thread(self.read)
        except ConfigError as error:
            self._refuse(str(error), stamp)
        except Exception as error:  # a bug in the router must not stop what watches the files
            log.exception("reading files failed")
            self._refuse(type(error).__name__, stamp)
        else:
            self._accept(value, stamp)

    def _accept(self, value: T, stamp: object) -> None:
        is_first, self.last, self._seen = self._seen is _NOTHING, value, stamp
        self.error, self.failed_since_s = "", None
        if not is_first:
            self.on_read(value)

    def _known(self) -> object:
        """The stamp of what was read last."""
        return self.read_stamp() if self.read_stamp and self._seen is not _NOTHING else self._seen

    def _refuse(self, error: str, stamp: object) -> None:
        if self.event and (error != self.error or stamp != self._seen):
            log.error(self.event, error=error)
        self.error, self.failed_since_s, self._seen = error, self.failed_since_s or time.time(), stamp


def watched(read: Callable[[], T], *files: str | None, event: str, first: T | None = None) -> WatchedFile[T]:
    """What `read` returns for these files, looked at on each use. `first`: the value until they were read once."""

    def log_again(_: T) -> None:
        log.info("files read again", files=[file for file in files if file])

    return WatchedFile(read, lambda: stamps_of(*files), event, log_again, last=first)


# --- files that are read at the start only ---

RESTART = "differs from what the router read at its start; restart it to use the file"
GONE = "does not exist any more; the router uses what it read at its start"


@dataclass(frozen=True, slots=True)
class StaleFile:
    """A file that the router does not use as it is on disk, why, and the Unix time since when, if that is known."""

    file: str
    problem: str
    since_s: float | None = None


class StartupFiles:
    """The configuration file and the files that it names, as they are now. `changed` blocks on the disk."""

    def __init__(self, config: RouterConfig, config_file: Path | None) -> None:
        self._config = config
        self._file = config_file
        self._digests = {path: _digest(path) for path in self._paths()}
        self._stamps = {path: stamp_of(path) for path in self._digests}
        self._gone_s: dict[Path, float] = {}

    def changed(self) -> list[StaleFile]:
        return [stale for path in {**self._digests, **dict.fromkeys(self._paths())} if (stale := self._checked(path))]

    def _checked(self, path: Path) -> StaleFile | None:
        stamp, known = stamp_of(path), self._digests.get(path)
        if stamp is None:
            return StaleFile(str(path), GONE, self._gone_s.setdefault(path, time.time())) if known else None
        self._gone_s.pop(path, None)
        if stamp == self._stamps.get(path):
            return None
        if known is not None and _digest(path) == known:
            self._stamps[path] = stamp
            return None
        return StaleFile(str(path), RESTART, stamp[2] / 1e9)

    def _paths(self) -> Iterator[Path]:
        if self._file:
            yield self._file
        for named in (self._config.classes, *(model.chat_template for model in self._config.models)):
            if named:
                yield Path(named)
        if self._config.priors:
            yield from sorted(Path(self._config.priors).glob("*.yaml"))


def _digest(path: Path) -> bytes | None:
    try:
        return blake2b(path.read_bytes()).digest() if path.is_file() else None  # reading a pipe would empty it
    except OSError:
        return None
