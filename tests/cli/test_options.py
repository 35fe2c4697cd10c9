"""A command's options are the fields of a dataclass."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from router.cli.options import with_options, writable


@dataclass(frozen=True)
class ServeOptions:
    name: Annotated[str, typer.Argument()]
    port: Annotated[int, typer.Option(min=1, help="Port to listen on.")] = 8080
    pod: Annotated[list[str] | None, typer.Option()] = None


def _app() -> typer.Typer:
    app = typer.Typer(add_completion=False)

    @app.command()
    @with_options(ServeOptions)
    def serve(options: ServeOptions) -> None:
        """Serve the fleet."""
        typer.echo(repr(options))

    return app


def test_fields_become_arguments_and_options() -> None:
    result = CliRunner().invoke(_app(), ["a", "--port", "9", "--pod", "x", "--pod", "y"])
    assert result.output.strip() == repr(ServeOptions("a", 9, ["x", "y"]))


def test_fields_without_an_option_keep_their_defaults() -> None:
    result = CliRunner().invoke(_app(), ["a"])
    assert result.output.strip() == repr(ServeOptions("a"))


def test_a_field_without_a_default_is_required() -> None:
    assert CliRunner().invoke(_app(), []).exit_code == 2


def test_validation_and_help_work_as_for_typer_parameters() -> None:
    assert CliRunner().invoke(_app(), ["a", "--port", "0"]).exit_code == 2
    assert "Port to listen on." in CliRunner().invoke(_app(), ["--help"]).output


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """A folder, or a file in a folder that does not exist."""
    assert writable(tmp_path / "new.csv") == tmp_path / "new.csv" and writable(None) is None
    for path in (tmp_path, tmp_path / "missing" / "new.csv"):
        with pytest.raises(typer.BadParameter, match="cannot be written"):
            writable(path)
