"""A wrong port, path or file is one message."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.command_line import Typed


@pytest.fixture
def names(tmp_path: Path) -> Iterator[dict[str, object]]:
    """What the commands name: a taken port, a folder, and a file that is not text."""
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe\x00\n")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield {"taken": listener.getsockname()[1], "folder": tmp_path, "binary": binary}


@pytest.mark.net
@pytest.mark.parametrize(
    ("command", "what"),
    [
        ("mock-engine --port 99999", "99999 is not in the range 0<=x<=65535"),
        ("mock-engine --port 65535 --count 2", "leaves no port up to 65535 for 2 engines"),
        ("mock-engine --host nowhere.invalid", "cannot listen on nowhere.invalid"),
        ("mock-engine --prefill 1 --port 0", "--prefill needs --pd"),
        ("explain some-id --url http://127.0.0.1:1", "Does the router run? --url names its admin listener"),
        ("policy list --policies /nowhere", "/nowhere: policy folder not found"),
        ("policy lint /nowhere.yaml", "/nowhere.yaml: file not found"),
        ("policy lint --classes /nowhere", "/nowhere: cannot be read"),
        ("simulate {folder}", "{folder}: unknown kind of traffic"),
        ("simulate mixed --policies /nowhere.yaml", "/nowhere.yaml: file not found"),
        ("doctor --config {folder}", "cannot be read"),
        ("index holders", "`warmroute doctor` lists publishers"),
        ("replay /nowhere", "does not exist"),
        ("simulate {binary}", "binary.jsonl:1: invalid line"),
        ("mock-engine --port {taken}", "cannot listen on 127.0.0.1, ports from {taken}"),
        ("replay {binary}", "not a receipt"),
    ],
)
def test_a_mistake_is_a_message_without_a_traceback(
    typed: Typed, names: dict[str, object], command: str, what: str
) -> None:
    """Exit code 1 or 2."""
    ended = typed(*(one.format(**names) for one in command.split()))
    printed = ended.out + ended.err
    assert ended.code in (1, 2)
    assert what.format(**names) in printed and "Traceback" not in printed


def test_a_process_ends_with_the_message(tmp_path: Path) -> None:
    """As a user sees it: nothing is printed after it."""
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe\x00\n")
    ended = subprocess.run(
        [sys.executable, "-m", "router.cli", "replay", binary], capture_output=True, text=True, check=False, timeout=60,
        env={"COLUMNS": "200", "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    printed = ended.stdout + ended.stderr
    assert ended.returncode in (1, 2)
    assert "not a receipt" in printed and "Traceback" not in printed
