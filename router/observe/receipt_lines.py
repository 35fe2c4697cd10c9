"""Writes and reads files of receipts.

Each line is a JSON object: a request, a fleet, which is written before the first scene that refers to it, or a change
of the fleet; `kind` says which. A disk error disables the file and fails no request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from errno import ENOSPC
from fcntl import LOCK_EX, flock
from io import FileIO
from os import fstat
from os.path import samestat
from pathlib import Path
from typing import TypeVar

import msgspec
import structlog

from router.errors import ConfigError
from router.observe.changes import Change
from router.observe.receipts import Line, Outcome, Receipt, RecordedDecision, decision_receipt, receipt
from router.policy.recording import (
    FleetLine,
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
MAX_FLEETS = 256
"""Fleets that scenes may refer to, while a file is read: the last ones. Each router repeats its own."""
CHANGE_LINE = b'{"kind":"change",'
"""How the line of a change begins."""

LineT = TypeVar("LineT")
_Later = Callable[[float, Callable[[], None]], object]
"""Calls once, after a delay in seconds."""

log = structlog.get_logger()


class ReceiptWriter:
    """Writes the lines of requests, without newlines, to `sink`, which does not wait or raise. `files`: how often the
    lines went on in another file, each of which repeats the fleet. `scenes`: include the input of the decision, for a
    replay."""

    def __init__(
        self, sink: Callable[[bytes], None], files: Callable[[], int] = lambda: 0, *, scenes: bool = True
    ) -> None:
        self._sink = sink
        self._files = files
        self._begun = files()
        self._scenes = scenes
        self._encode = msgspec.json.Encoder().encode
        self._fleet: FleetSnapshot | None = None
        self._digest = ""
        self._since = 0

    def write(self, outcome: Outcome, kept: RecordedDecision | None, prompt: PromptPrefix | None) -> None:
        if kept is None:
            return self._put(receipt(outcome, prompt=prompt))
        found = decision_receipt(kept, prompt=prompt)
        if self._scenes:
            scene = self._scene(kept.scene, kept.at_s)
            found = msgspec.structs.replace(found, scene=scene, scene_digest=digest_of(scene))
        return self._put(found)

    def write_change(self, change: Change) -> None:
        self._sink(self._encode(change))

    def _scene(self, scene: RecordedScene, at_s: float) -> SceneLine:
        fleet = scene.fleet
        if self._fleet is None or not _same_facts(fleet, self._fleet):
            known, self._digest = self._digest, fleet_digest(fleet)
            if known != self._digest:
                self._since = REPEAT_FLEET_AFTER_SCENES
        self._fleet = fleet
        if self._files() != self._begun:
            self._begun, self._since = self._files(), REPEAT_FLEET_AFTER_SCENES
        if self._since >= REPEAT_FLEET_AFTER_SCENES:
            self._put(fleet_line(fleet, self._digest, at_s))
            self._since = 0
        self._since += 1
        return scene_line(scene, self._digest)

    def _put(self, line: Line) -> None:
        self._sink(self._encode(line))


def _same_facts(one: FleetSnapshot, other: FleetSnapshot) -> bool:
    """Whether pods and states are identical; loads may differ. O(pods)."""
    if one is other:
        return True
    if len(one.pods) != len(other.pods) or one.links != other.links:
        return False
    return all(a.pod is b.pod and a.state is b.state for a, b in zip(one.pods, other.pods, strict=True))


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
    files: int = 0
    """How often the lines went on in another file."""

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
        self.files += 1
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


# --- reading ---


def read_lines(path: Path) -> Iterator[Line]:
    """Every request and fleet. Raises `ConfigError` with the number of an invalid line."""
    return decoded_lines(path, msgspec.json.Decoder(Receipt | FleetLine).decode, "not a receipt")


def decoded_lines(path: Path, decode: Callable[[bytes], LineT], problem: str) -> Iterator[LineT]:
    """A JSONL file without the lines of changes. Raises `ConfigError` with the number of an invalid line, and the
    problem."""
    number = 0
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):  # noqa: B007, named where it fails
                if not line.startswith(CHANGE_LINE):
                    yield decode(line)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}:{number}: {problem}: {error}") from error


def read_receipts(path: Path) -> list[Receipt]:
    """The receipts without the fleet lines."""
    return [line for line in read_lines(path) if isinstance(line, Receipt)]


def recorded(lines: Iterable[object]) -> Iterator[tuple[Receipt, RecordedScene | None]]:
    """The receipts with their scenes; None without one, or where the fleet line is missing."""
    fleets: dict[str, FleetLine] = {}
    for line in lines:
        if isinstance(line, FleetLine):
            fleets.pop(line.fleet, None)
            fleets[line.fleet] = line  # the latest one is last
            if len(fleets) > MAX_FLEETS:
                fleets.pop(next(iter(fleets)))
        elif isinstance(line, Receipt):
            fleet = fleets.get(line.scene.fleet) if line.scene else None
            yield line, _restored(line.scene, fleet) if line.scene and fleet else None


def _restored(scene: SceneLine, fleet: FleetLine) -> RecordedScene:
    try:
        return scene.restored(fleet)
    except ValueError as error:
        raise ConfigError(f"scene of {scene.request_id}: loads do not match the fleet: {error}") from error
