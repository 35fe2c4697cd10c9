"""Reads files of receipts of any length once: a file, and what was rotated away from it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from datetime import datetime, timedelta
from gzip import GzipFile
from io import BufferedReader, FileIO
from os import fstat
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress

from router.errors import ConfigError
from router.guards import MAX_AT_S
from router.observe.changes import Change
from router.observe.receipts import Line, Receipt
from router.policy.recording import FleetLine, RecordedScene, SceneLine

READ_BYTES = 1 << 20
"""Progress is counted once for this much."""
MAX_FLEETS = 256
"""Fleets that scenes may refer to: the last ones. Each router repeats its own."""

LineT = TypeVar("LineT")
ReceiptLine: TypeAlias = Line | Change
_decode: Callable[[bytes], ReceiptLine] = msgspec.json.Decoder(Receipt | FleetLine | Change).decode


def lines_of(path: Path) -> Iterator[ReceiptLine]:
    """Every line of a file of receipts, as `decoded_lines`."""
    return decoded_lines(path, _receipt_line, "not a receipt")


def receipts_of(path: Path) -> list[Receipt]:
    """Those lines that are receipts."""
    return [line for line in lines_of(path) if isinstance(line, Receipt)]


def _receipt_line(line: bytes) -> ReceiptLine:
    if not 0 <= (found := _decode(line)).at_s <= MAX_AT_S:
        raise ValueError(f"at_s is no Unix time: {found.at_s:g}")
    return found


def decoded_lines(path: Path, decode: Callable[[bytes], LineT], problem: str) -> Iterator[LineT]:
    """Every line of a JSONL file, after those of its rotated files, FILE.1 or FILE.1.gz and so on, oldest first.
    Progress is shown on a terminal. The last line of a file is named and skipped if it is incomplete, as after a full
    disk. Raises `ConfigError` with the number of an invalid line, and the problem."""
    with ExitStack() as stack, Progress(console=Console(stderr=True), transient=True) as progress:
        file, number = path, 0
        try:
            for file, raw in _opened(path, stack):
                shown = progress.wrap_file(raw, fstat(raw.fileno()).st_size, description=file.name)
                large: Any = BufferedReader(shown, READ_BYTES)
                lines = GzipFile(fileobj=large) if file.suffix == ".gz" else large
                for number, line in enumerate(lines, start=1):
                    try:
                        found = decode(line)
                    except ValueError:
                        if line.endswith(b"\n"):
                            raise
                        print(f"{file}:{number}: skipped the last line, which is incomplete", file=sys.stderr)
                    else:
                        yield found
        except (OSError, EOFError, ValueError) as error:
            raise ConfigError(f"{file}:{number}: {problem}: {error}") from error


def _opened(path: Path, stack: ExitStack) -> list[tuple[Path, FileIO]]:
    """The file and its rotated ones, oldest first. They are opened before one is read, the newest first, until no
    other is found: a rotation meanwhile renames files to higher numbers, and hides none."""
    found: dict[tuple[int, int], tuple[Path, FileIO]] = {}
    names, known = [path], -1
    while len(found) > known:
        known = len(found)
        for name in names:
            file = stack.enter_context(FileIO(name))
            status = fstat(file.fileno())
            found.setdefault((status.st_dev, status.st_ino), (name, file))
        names = _rotated(path)
    return [*found.values()][::-1]


def _rotated(path: Path) -> list[Path]:
    """The newest first."""
    names = re.compile(re.escape(path.name) + r"\.(\d{1,6})(\.gz)?")
    found = {file: int(match[1]) for file in path.parent.iterdir() if (match := names.fullmatch(file.name))}
    return sorted(found, key=lambda file: found[file])


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


def moment(text: str) -> float:
    """The Unix time that an option names. Raises `typer.BadParameter`."""
    now = datetime.now().astimezone()
    days = [f"{now.date() + timedelta(days=ahead)}T{text}" for ahead in (1, 0, -1)] if text[2:3] == ":" else [text]
    try:
        found = [datetime.fromisoformat(day).astimezone() for day in days]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no time such as 14:00, 14:00Z or 2026-12-01T14:00+01:00") from None
    return next((one for one in found if one <= now), found[0]).timestamp()


def time_option(meaning: str, default: str) -> Any:
    """An option with a time: of a date, or the last one before now; of this machine's zone unless it names another."""
    return typer.Option(
        help=f"{meaning}: 14:00, 2026-12-01T14:00Z.", parser=moment, metavar="TIME", show_default=default
    )


def local(at_s: float) -> str:
    return f"{datetime.fromtimestamp(at_s):%Y-%m-%d %H:%M:%S}"
