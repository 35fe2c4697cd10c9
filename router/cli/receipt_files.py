"""Reads files of receipts of any length once: a file, and what was rotated away from it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime, timedelta
from gzip import GzipFile
from io import BufferedReader
from pathlib import Path
from typing import Any

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress

from router.errors import ConfigError
from router.guards import MAX_AT_S
from router.observe.changes import Change
from router.observe.receipts import Line, Receipt
from router.policy.recording import FleetLine

READ_BYTES = 1 << 20
"""Progress is counted once for this much."""


def lines_of(path: Path) -> Iterator[Line | Change]:
    """Every line of the file, after those of its rotated files, FILE.1 or FILE.1.gz and so on, oldest first. Progress
    is shown on a terminal. Raises `ConfigError` with the number of an invalid line."""
    decode = msgspec.json.Decoder(Receipt | FleetLine | Change).decode
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for file in (*_rotated(path), path):
            number = 0
            try:
                with progress.open(file, "rb", description=file.name) as raw:
                    large: Any = BufferedReader(raw, READ_BYTES)
                    lines = GzipFile(fileobj=large) if file.suffix == ".gz" else large
                    for number, line in enumerate(lines, start=1):  # noqa: B007, named where it fails
                        if not 0 <= (found := decode(line)).at_s <= MAX_AT_S:
                            raise ValueError(f"at_s is no Unix time: {found.at_s:g}")
                        yield found
            except (OSError, EOFError, ValueError) as error:
                raise ConfigError(f"{file}:{number}: not a receipt: {error}") from error


def _rotated(path: Path) -> list[Path]:
    names = re.compile(re.escape(path.name) + r"\.(\d{1,6})(\.gz)?")
    found = {file: int(match[1]) for file in path.parent.iterdir() if (match := names.fullmatch(file.name))}
    return sorted(found, key=lambda file: found[file], reverse=True)


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
