"""Writes files of receipts and of usage.

Each line is a JSON object: a request, a fleet, which is written before the first scene that refers to it, or a change
of the fleet; `kind` says which. A disk error disables the file and fails no request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from errno import ENOSPC
from fcntl import LOCK_EX, flock
from io import FileIO
from itertools import count
from os import fstat
from os.path import samestat
from pathlib import Path
from typing import Any

import msgspec
import structlog

from router.observe.changes import Change
from router.observe.ended import Ended
from router.observe.receipts import Line, receipt
from router.policy.recording import (
    RecordedScene,
    SceneLine,
    digest_of,
    fleet_digest,
    fleet_line,
    scene_line,
)
from router.types import FleetSnapshot, PromptPrefix

FLUSH_INTERVAL_S = 1.0
MAX_BUFFERED_BYTES = 1 << 16
REPEAT_FLEET_AFTER_SCENES = 1000
"""The fleet is written again because files are rotated."""
_Later = Callable[[float, Callable[[], None]], object]
"""Calls once, after a delay in seconds."""

_encode = msgspec.json.Encoder().encode
log = structlog.get_logger()


class ReceiptWriter:
    """Writes the lines of requests, without newlines, to `sink`, which does not wait or raise. `scenes`: include the
    input of the decision, for a replay."""

    def __init__(self, sink: Callable[[bytes], None], *, scenes: bool = True) -> None:
        self._sink = sink
        self._scenes = scenes
        self._fleet: FleetSnapshot | None = None
        self._digest = ""
        self._since = 0

    def write(self, ended: Ended, prompt: PromptPrefix | None) -> None:
        found, kept = receipt(ended, prompt=prompt), ended.decision
        if kept is not None and self._scenes:
            scene = self._scene(kept.scene, kept.at_s)
            found = msgspec.structs.replace(found, scene=scene, scene_digest=digest_of(scene))
        self._put(found)

    def write_change(self, change: Change) -> None:
        self._sink(_encode(change))

    def repeat_fleet(self) -> None:
        """Write the fleet again before the next scene: the lines begin a new file."""
        self._since = REPEAT_FLEET_AFTER_SCENES

    def _scene(self, scene: RecordedScene, at_s: float) -> SceneLine:
        fleet = scene.fleet
        if self._fleet is None or not _same_facts(fleet, self._fleet):
            known, self._digest = self._digest, fleet_digest(fleet)
            if known != self._digest:
                self._since = REPEAT_FLEET_AFTER_SCENES
        self._fleet = fleet
        if self._since >= REPEAT_FLEET_AFTER_SCENES:
            self._put(fleet_line(fleet, self._digest, at_s))
            self._since = 0
        self._since += 1
        return scene_line(scene, self._digest)

    def _put(self, line: Line) -> None:
        self._sink(_encode(line))


def _same_facts(one: FleetSnapshot, other: FleetSnapshot) -> bool:
    """Whether pods and states are identical; loads may differ. O(pods)."""
    if one is other:
        return True
    if len(one.pods) != len(other.pods) or one.links != other.links:
        return False
    return all(a.pod is b.pod and a.state is b.state for a, b in zip(one.pods, other.pods, strict=True))


@dataclass(slots=True, eq=False)
class UsageWriter:
    """Numbers the lines of this process without gaps, so that a reader knows each line by its id and notices missing
    ones, and passes them on as JSON. `process`: a name that no other ever has."""

    process: str
    sink: Callable[[bytes], None]
    close: Callable[[], None] = lambda: None
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def ended(self, ended: Ended, _prompt: PromptPrefix | None = None) -> None:
        if (used := ended.used) is None:
            return
        line: dict[str, Any] = {
            "id": f"{self.process}-{next(self._numbers)}",
            "request_id": ended.id,
            "at_s": ended.at_s,
            "tenant": ended.tenant,
            "model": ended.model,
            "adapter": ended.adapter or None,
            "endpoint": ended.endpoint,
            "status": ended.status,
            "result": ended.result,
            "prompt_tokens": used.prompt_tokens,
            "cached_tokens": used.cached_tokens,
            "computed_tokens": used.computed_tokens,
            "output_tokens": used.output_tokens,
            "ttft_ms": ended.ttft_ms,
            "estimated": used.estimated or None,
        }
        self.sink(_encode({name: value for name, value in line.items() if value is not None}))


@dataclass(slots=True, eq=False)
class ReceiptLog:
    """Appends whole lines to a file, which several routers may share. A line is written at most `FLUSH_INTERVAL_S`
    after it was received: `later(delay_s, call)` starts the timer.

    Above `max_bytes` (0: no limit) the file is renamed to FILE.1, FILE.1 to FILE.2 and so on; `kept` of them remain.
    After a disk error up to `retried_bytes` are written again until that succeeds, and `on_lost` is called for each
    line beyond; with 0 the file is disabled, and `on_lost` is called for each further line."""

    path: Path
    later: _Later
    max_bytes: int = 0
    kept: int = 1
    retried_bytes: int = 0
    on_lost: Callable[[], None] = lambda: None
    _failing: bool = False
    _file: FileIO | None = None
    _buffer: bytearray = field(default_factory=bytearray)
    _is_flush_due: bool = False
    on_new_file: Callable[[], None] = lambda: None
    """Called when the following lines go to a new file."""

    def __post_init__(self) -> None:
        self._file = _opened(self.path)

    def write(self, line: bytes) -> None:
        if self._file is None:
            self.on_lost()
            return
        if self.retried_bytes and len(self._buffer) + len(line) > self.retried_bytes:
            self.on_lost()
            return
        self._buffer += line + b"\n"
        if len(self._buffer) > MAX_BUFFERED_BYTES and not self._failing:
            self._flush()
        elif not self._is_flush_due:
            self._is_flush_due = True
            self.later(FLUSH_INTERVAL_S, self._flush_in_time)

    def close(self) -> None:
        self._flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _flush_in_time(self) -> None:
        self._is_flush_due = False
        self._flush()

    def _flush(self) -> None:
        """Write in one call, so that lines of two routers do not mix."""
        file, buffered, self._buffer = self._file, self._buffer, bytearray()
        if file is None or not buffered:
            return None
        written = 0
        try:
            if file.closed or not _is_at(self.path, file):
                file = self._reopen(file)
            written = file.write(buffered)
            if written != len(buffered):
                raise OSError(ENOSPC, "short write")
            self._failing = False
            if 0 < self.max_bytes < fstat(file.fileno()).st_size:
                self._rotate(file)
        except OSError as error:
            if self.retried_bytes:
                return self._retry(buffered, written, error)
            log.error("receipt log disabled", file=str(self.path), error=str(error))
            self._file = None
            file.close()

    def _retry(self, buffered: bytearray, written: int, error: OSError) -> None:
        """Write again later what was not written. A line that was written in part is repeated after a newline."""
        if not self._failing:
            log.error("file cannot be written; trying again", file=str(self.path), error=str(error))
        self._failing = True
        whole = buffered.rfind(b"\n", 0, written) + 1
        self._buffer = bytearray(b"\n" if written > whole else b"") + buffered[whole:] + self._buffer
        if self._buffer and not self._is_flush_due:
            self._is_flush_due = True
            self.later(FLUSH_INTERVAL_S, self._flush_in_time)

    def _rotate(self, file: FileIO) -> None:
        """Rename the files, unless another router has done so while this one waited for the lock."""
        flock(file, LOCK_EX)
        if _is_at(self.path, file):
            for number in range(self.kept, 0, -1):
                older = self._numbered(number - 1)
                if older.exists():
                    older.replace(self._numbered(number))
        self._reopen(file)

    def _numbered(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}") if number else self.path

    def _reopen(self, file: FileIO) -> FileIO:
        """Continue in the file that the path names now: this one was renamed or removed. Closing releases its lock."""
        file.close()
        self._file = opened = _opened(self.path)
        self.on_new_file()
        return opened


def _opened(path: Path) -> FileIO:
    file = FileIO(path, "ab")
    path.chmod(0o600)
    return file


def _is_at(path: Path, file: FileIO) -> bool:
    """Whether `path` still names this open file."""
    try:
        return samestat(path.stat(), fstat(file.fileno()))
    except FileNotFoundError:
        return False
