"""Runs commands as a user types them, in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import pytest

from router.cli import main


@dataclass(frozen=True)
class Ended:
    """Result of a command."""

    code: int
    out: str
    err: str


Typed: TypeAlias = Callable[..., Ended]


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    """Run `warmroute` with these arguments through its entry point, on a wide terminal."""
    monkeypatch.setenv("COLUMNS", "220")  # a test may set another width before the command

    def run(*arguments: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["warmroute", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return Ended(int(ended.value.code or 0), captured.out, captured.err)

    return run
