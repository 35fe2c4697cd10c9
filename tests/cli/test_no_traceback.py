"""A wrong port, path or file is one message, in a process of its own, as a user sees it."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.net
@pytest.mark.parametrize(
    ("command", "what"),
    [
        ("mock-engine --port 99999", "99999 is not in the range 0<=x<=65535"),
        ("mock-engine --port 65535 --count 2", "leaves no port up to 65535 for 2 engines"),
        ("mock-engine --port {taken}", "cannot listen on 127.0.0.1, ports from {taken}"),
        ("mock-engine --host nowhere.invalid", "cannot listen on nowhere.invalid"),
        ("mock-engine --prefill 1 --port 0", "--prefill needs --pd"),
        ("explain some-id --url http://127.0.0.1:1", "Does the router run? --url names its admin listener"),
        ("pods --url unix:/nowhere", "Does the router run?"),
        ("policy list --policies /nowhere", "/nowhere: policy folder not found"),
        ("policy lint /nowhere.yaml", "/nowhere.yaml: file not found"),
        ("policy lint --classes /nowhere", "/nowhere: cannot be read"),
        ("policy simulate cost_aware {folder}", "{folder}: unknown kind of traffic"),
        ("index stats --config {folder}", "cannot be read"),
        ("replay /nowhere", "does not exist"),
        ("replay {binary}", "not a receipt"),
        ("simulate {binary}", "binary.jsonl:1: invalid line"),
    ],
)
def test_a_mistake_is_a_message_without_a_traceback(command: str, what: str, tmp_path: Path) -> None:
    """Exit code 1 or 2."""
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe\x00")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        names = {"taken": listener.getsockname()[1], "folder": tmp_path, "binary": binary}
        arguments = [one.format(**names) for one in command.split()]
        ended = subprocess.run(
            [sys.executable, "-m", "router.cli", *arguments], capture_output=True, text=True, check=False, timeout=60,
            env={"COLUMNS": "200", "PYTHONPATH": str(Path(__file__).parents[2])},
        )  # fmt: skip
    printed = ended.stdout + ended.stderr
    assert ended.returncode in (1, 2)
    assert what.format(**names) in printed and "Traceback" not in printed
