"""Files that a load test writes are checked before it starts."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import typer

from router.cli.options import writable


def writable_report(path: Path | None) -> Path | None:
    """Callback of an option that names a page with plots, which need matplotlib."""
    if path is not None and find_spec("matplotlib") is None:
        raise typer.BadParameter("plots need matplotlib: pip install matplotlib")
    return writable(path)
