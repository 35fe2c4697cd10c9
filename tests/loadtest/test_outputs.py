"""A file that cannot be written, and plots that cannot be drawn, end a load test before it starts."""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]
WRITTEN = ("out", "report", "plot")
SCRIPTS = [
    str(path.relative_to(ROOT).with_suffix("")).replace("/", ".")
    for path in sorted((ROOT / "loadtest").rglob("*.py"))
    if path.parent.name != "commands" and 'help="Write ' in path.read_text(encoding="utf-8")
]


def output_of(script: str, *arguments: object) -> str:
    """What a script prints that ends with exit code 2."""
    app = typer.Typer(add_completion=False)
    app.command()(import_module(script).main)
    ended = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*map(str, arguments)])
    assert ended.exit_code == 2
    return ended.output


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_file_in_a_missing_folder_is_refused_at_once(script: str, tmp_path: Path) -> None:
    """Each option of each script that writes a file."""
    names = [name for name in inspect.signature(import_module(script).main).parameters if name in WRITTEN]
    assert names
    for name in names:
        assert "cannot be written" in output_of(script, f"--{name}", tmp_path / "missing" / "file")


def test_a_report_without_matplotlib_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the package to install."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install matplotlib" in output_of("loadtest.fleets.run", "chatbot", "--report", tmp_path / "page.html")
