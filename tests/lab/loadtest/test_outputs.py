"""Every script starts. A file that cannot be written, and plots that cannot be drawn, end it before it measures."""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

ROOT = Path(__file__).parents[3]
WRITTEN = ("out", "report", "plot")
SCRIPTS = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "loadtest").rglob("*.py"))
    if "typer.run(main)" in path.read_text(encoding="utf-8")
]
"""Scripts with options."""
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "loadtest").rglob("*.py"))
    if path.name != "__init__.py"
]


def started(script: str, *arguments: object) -> tuple[int, str]:
    """Exit code and output."""
    app = typer.Typer(add_completion=False)
    app.command()(import_module(script).main)
    ended = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*map(str, arguments)])
    return ended.exit_code, ended.output


def test_all_modules_are_imported_without_a_side_effect(capsys: pytest.CaptureFixture[str]) -> None:
    """Also those that are run on other machines."""
    for module in MODULES:
        import_module(module)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_starts_and_refuses_files_that_it_cannot_write(script: str, tmp_path: Path) -> None:
    """Each option of each script that writes a file, at once."""
    assert started(script, "--help")[0] == 0
    main = import_module(script).main
    for name in inspect.signature(main).parameters:
        if name in WRITTEN and 'help="Write ' in inspect.getsource(main):
            code, output = started(script, f"--{name}", tmp_path / "missing" / "file")
            assert code == 2 and "cannot be written" in output


def test_a_report_without_matplotlib_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the package to install."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, output = started("loadtest.fleets.run", "chatbot", "--report", tmp_path / "page.html")
    assert code == 2 and "pip install matplotlib" in output
