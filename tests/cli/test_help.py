"""`--help` of every command, at the width of a plain terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from router.cli import GROUPS, _app, commands


def every_command() -> Iterator[tuple[list[str], Any]]:
    """The words of each command, and the command itself."""
    yield [], get_command(_app(""))
    for name in (*commands(), *GROUPS):
        found: Any = get_command(_app(name))
        command = found.commands[name]
        subcommands = getattr(command, "commands", {})
        yield from (([name, word], each) for word, each in subcommands.items())
        if not subcommands:
            yield [name], command


COMMAND_LIST = list(every_command())


@pytest.mark.parametrize(("words", "command"), COMMAND_LIST, ids=[" ".join(words) for words, _ in COMMAND_LIST])
def test_every_option_shows_its_default(words: list[str], command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or that it is required; nothing is cut, so that a default can be copied."""
    monkeypatch.setenv("COLUMNS", "80")
    shown = CliRunner().invoke(_app(words[0] if words else ""), [*words, "--help"]).output
    names = [each.name for each in command.params if each.name != "help" and not getattr(each, "hidden", False)]
    assert shown.count("[default:") + shown.count("[required]") == len(names), shown
    assert "…" not in shown and max(map(len, shown.splitlines())) <= 80


def test_the_walk_covers_every_command() -> None:
    """Twenty commands at least, of which some belong to a group."""
    assert {"serve", "policy lint", "config check"} <= {" ".join(words) for words, _ in COMMAND_LIST}
