"""The workers' sockets get a private folder with a short path, or the user learns why there is none."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from router.errors import ConfigError
from router.workers.socket_folder import LONGEST_NAME, private_folder

pytestmark = pytest.mark.net
LONG = "x" * 100


def bindable(folder: Path) -> bool:
    """Whether a worker can listen there."""
    with socket.socket(socket.AF_UNIX) as worker:
        worker.bind(str(folder / LONGEST_NAME))
    return True


@pytest.fixture
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a path that is short enough for a socket."""
    folder = tmp_path_factory.mktemp("s")
    assert len(str(folder)) < 70
    return folder


def test_tmpdir_is_used_also_with_spaces(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its owner can enter the folder."""
    (short / "a b").mkdir()
    monkeypatch.setenv("TMPDIR", str(short / "a b"))
    folder = private_folder()
    assert folder.parent == short / "a b"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert bindable(folder)


@pytest.mark.parametrize("unusable", [LONG, "missing", "a file", "nul\0"])
def test_an_unusable_tmpdir_is_skipped(short: Path, unusable: str) -> None:
    """Nothing is left in it."""
    (short / LONG).mkdir()
    (short / "a file").write_text("")
    (short / "usable").mkdir()
    folder = private_folder([str(short / unusable), str(short / "usable")])
    assert folder.parent == short / "usable"
    assert bindable(folder)
    assert not list((short / LONG).iterdir())


def test_without_a_usable_folder_every_reason_is_named(short: Path) -> None:
    """In one short line."""
    (short / LONG).mkdir()
    with pytest.raises(ConfigError) as caught:
        private_folder(["/no/such/folder", "/proc/self", str(short / LONG)])
    said = str(caught.value)
    assert said.startswith("listen.workers: ") and "set TMPDIR" in said
    assert "/no/such/folder: No such file or directory" in said
    assert "AF_UNIX path too long" in said
    assert LONG not in said and "\n" not in said
