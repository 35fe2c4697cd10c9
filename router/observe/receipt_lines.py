"""Writes and reads files of receipts.

Each line is a JSON object: a request, or a fleet, which is written before the first scene that refers to it. A disk
error disables the file and fails no request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from errno import ENOSPC
from io import FileIO
from pathlib import Path

import msgspec
import structlog

from router.errors import ConfigError
from router.observe.receipts import Line, Outcome, Receipt, RecordedDecision, decision_receipt, receipt
from router.policy.recording import (
    FleetLine,
    RecordedScene,
    SceneLine,
    fleet_digest,
    fleet_line,
    scene_digest,
    scene_line,
)
from router.types import FleetSnapshot, PromptPrefix

FLUSH_INTERVAL_S = 1.0
MAX_BUFFERED_BYTES = 1 << 16
REPEAT_FLEET_AFTER_SCENES = 1000
"""The fleet is written again because files are rotated, and streams drop their oldest entries."""

Sink = Callable[[bytes], None]
"""Receives one line without a newline; does not wait, does not raise."""

log = structlog.get_logger()


class ReceiptWriter:
    """Writes the lines of requests to all sinks. `scenes`: include the input of the decision, for a replay."""

    def __init__(self, sinks: Sequence[Sink], *, scenes: bool = True) -> None:
        self._sinks = sinks
        self._scenes = scenes
        self._encode = msgspec.json.Encoder().encode
        self._fleet: FleetSnapshot | None = None
        self._digest = ""
        self._since = 0

    def write(self, outcome: Outcome, kept: RecordedDecision | None, prompt: PromptPrefix | None) -> None:
        """Write one request that ended; `kept` where it was decided."""
        if kept is None:
            return self._put(receipt(outcome, prompt=prompt))
        found = decision_receipt(kept, prompt=prompt)
        if self._scenes:
            scene = self._scene(kept.scene, kept.at_s)
            found = msgspec.structs.replace(found, scene=scene, scene_digest=scene_digest(scene))
        return self._put(found)

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
        text = self._encode(line)
        for sink in self._sinks:
            sink(text)


def _same_facts(one: FleetSnapshot, other: FleetSnapshot) -> bool:
    """Whether pods and states are identical; loads may differ. O(pods)."""
    if one is other:
        return True
    if len(one.pods) != len(other.pods) or one.links != other.links:
        return False
    return all(a.pod is b.pod and a.state is b.state for a, b in zip(one.pods, other.pods, strict=True))


class ReceiptLog:
    """Appends whole lines to a file, which several workers may share."""

    def __init__(self, path: str) -> None:
        self._file: FileIO | None = FileIO(path, "ab")
        Path(path).chmod(0o600)
        self._buffer = bytearray()
        self._flushed_s = 0.0

    def write(self, line: bytes) -> None:
        """Buffer a line. The first line after `FLUSH_INTERVAL_S` writes all."""
        if self._file is None:
            return
        self._buffer += line + b"\n"
        if len(self._buffer) > MAX_BUFFERED_BYTES or time.monotonic() - self._flushed_s > FLUSH_INTERVAL_S:
            self._flush(self._file)
            self._flushed_s = time.monotonic()

    def close(self) -> None:
        """Write what is buffered, and close the file."""
        file = self._file
        if file is not None:
            self._flush(file)
            self._file = None
            file.close()

    def _flush(self, file: FileIO) -> None:
        """Write in one call, so that lines of two workers do not mix."""
        buffered, self._buffer = self._buffer, bytearray()
        try:
            if file.write(buffered) != len(buffered):
                raise OSError(ENOSPC, "short write")
        except OSError as error:
            log.error("receipt log disabled", error=str(error))
            self._file = None
            file.close()


# --- reading ---


def read_lines(path: Path) -> Iterator[Line]:
    """Every line. Raises `ConfigError` with the number of an invalid line."""
    decode = msgspec.json.Decoder(Receipt | FleetLine).decode
    number = 0
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):  # noqa: B007, named where it fails
                yield decode(line)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}:{number}: not a receipt: {error}") from error


def read_receipts(path: Path) -> list[Receipt]:
    """The receipts without the fleet lines."""
    return [line for line in read_lines(path) if isinstance(line, Receipt)]


def recorded(lines: Iterator[Line]) -> Iterator[tuple[Receipt, RecordedScene | None]]:
    """Decided requests with their scenes; None where the fleet line is missing."""
    fleets: dict[str, FleetLine] = {}
    for line in lines:
        if isinstance(line, FleetLine):
            fleets[line.fleet] = line
        elif line.scene is not None:
            fleet = fleets.get(line.scene.fleet)
            yield line, _restored(line.scene, fleet) if fleet else None


def _restored(scene: SceneLine, fleet: FleetLine) -> RecordedScene:
    try:
        return scene.restored(fleet)
    except ValueError as error:
        raise ConfigError(f"scene of {scene.request_id}: loads do not match the fleet: {error}") from error
