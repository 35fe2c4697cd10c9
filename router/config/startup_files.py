"""Which files that were read at the start have changed since? The router uses them after a restart only."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from router.config.reloaded import stamp_of
from router.config.schema import RouterConfig

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
