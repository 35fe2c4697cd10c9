"""The tour of a document always ends, and says which block did not."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.tour.__main__ import run, script, with_install
from tests.tour.markdown import PYTHON, SHELL, Block

DEADLINE_S = 30.0
WAITS = "exec sleep 600"
LEAVES_A_PROCESS = "sleep 600 > /dev/null 3>&- & echo $! > pid"


def state_of(pid: str) -> str:
    """As `ps` shows it; empty if there is no such process."""
    shown = subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True, check=False).stdout
    return shown.strip()[:1]


def document(
    folder: Path, *commands: str, name: str = "page.md", language: str = SHELL, max_block_s: float = 20
) -> str:
    (folder / "logs").mkdir(exist_ok=True)
    path = folder / "logs" / "tour.sh"
    path.write_text("\n".join(script([Block(name, at, language, text) for at, text in enumerate(commands, 1)])))
    return run(path, folder, {"PATH": os.environ["PATH"], "HOME": str(folder)}, max_block_s)


def test_all_blocks_are_run_in_order(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert document(tmp_path, "echo first", "echo second") == ""
    assert [line.split()[1] for line in capfd.readouterr().out.splitlines()] == ["page.md:1", "page.md:2"]
    assert (tmp_path / "output-1").read_text() == "second\n"


@pytest.mark.parametrize("command", ["false", "{ false; } &\nsleep 600 & wait $!"])
def test_a_command_that_fails_ends_the_tour(command: str, tmp_path: Path) -> None:
    """Also one in the background, for which a loop in the foreground would wait."""
    assert document(tmp_path, command, "echo not reached").startswith("failed (exit code ")
    assert not (tmp_path / "output-1").exists()


def test_pages_of_docs_are_read_in_the_environment_of_install(tmp_path: Path) -> None:
    """Others begin in none. Where Install was not read, it is read first."""
    program = tmp_path / "warmroute" / "bin" / "installed"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert document(tmp_path, "installed", name="docs/page.md") == ""
    assert document(tmp_path, "installed", name="README.md").startswith("failed")
    assert with_install(["docs/operate.md"]) == ("docs/install.md", "docs/operate.md")
    assert with_install(["README.md"]) == ["README.md"]


def test_programs_are_run(tmp_path: Path) -> None:
    assert document(tmp_path, "print('of a page')", language=PYTHON) == ""
    assert (tmp_path / "output-0").read_text() == "of a page\n"
    assert document(tmp_path, "KEY", language=PYTHON).startswith("failed")


def test_a_block_that_waits_forever_ends_the_tour(tmp_path: Path) -> None:
    assert document(tmp_path, "echo started", WAITS, max_block_s=1) == "did not end within 1 s"
    assert (tmp_path / "output-1").exists()


def test_processes_of_the_document_end_with_it(tmp_path: Path) -> None:
    assert document(tmp_path, LEAVES_A_PROCESS) == ""
    pid, until_s = (tmp_path / "pid").read_text().strip(), time.monotonic() + DEADLINE_S
    while state_of(pid) not in ("", "Z"):  # a killed process ends when it is scheduled
        assert time.monotonic() < until_s
        time.sleep(0.01)
