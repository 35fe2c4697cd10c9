"""Keys that the router presents to pods."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from router.config.pod_keys import CHECK_INTERVAL_S, PodKeyFile, key_headers, read_key, read_key_variable
from router.errors import ConfigError

CANARY = "canary7sesame"


def test_a_key_is_read_without_white_space(tmp_path: Path) -> None:
    """Editors and secret stores add a line end."""
    file = tmp_path / "key"
    file.write_text(f" {CANARY}\r\n")
    assert key_headers(str(file)) == {"authorization": f"Bearer {CANARY}"}
    assert key_headers("") == {}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot read a file .*not shown.*: No such file"),
        (b"", "one key"),
        (b" \n", "one key"),
        (CANARY.encode() + b" x", "one key"),
        (CANARY.encode() + b"\r\nhost: evil", "one key"),
        (CANARY.encode() + b"\x00", "one key"),
        (b"\xff" + CANARY.encode(), "not ASCII"),
        (CANARY.encode() * 1000, "one key"),
    ],
)
def test_a_file_without_a_key_is_refused(tmp_path: Path, content: bytes | None, problem: str) -> None:
    """The message names the file, never its content."""
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=problem) as caught:
        read_key(str(file))
    assert "auth.bearer_file" in str(caught.value) and CANARY not in str(caught.value)


def test_a_changed_key_is_used_within_a_second(tmp_path: Path) -> None:
    """Also if the file was replaced, as Kubernetes does."""
    file = tmp_path / "key"
    file.write_text("old")
    bearer = PodKeyFile(str(file))
    assert bearer.key(0.0) == "old"
    (tmp_path / "new").write_text("new")
    (tmp_path / "new").rename(file)
    assert bearer.key(CHECK_INTERVAL_S - 0.01) == "old"
    assert bearer.key(CHECK_INTERVAL_S) == "new"


def test_the_last_key_stays_in_use_while_the_file_is_not_readable(tmp_path: Path) -> None:
    """The failure is logged once, without the key."""
    file = tmp_path / "key"
    file.write_text(CANARY)
    bearer = PodKeyFile(str(file))
    assert bearer.key(0.0) == CANARY
    file.unlink()
    with capture_logs() as logs:
        assert [bearer.key(now_s) for now_s in (1.0, 2.0)] == [CANARY, CANARY]
    assert len(logs) == 1 and CANARY not in str(logs) and CANARY not in repr(bearer)
    file.write_text("new")
    assert bearer.key(3.0) == "new"


def test_a_key_can_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing variable is an error that names it."""
    monkeypatch.setenv("ENGINE_KEY", CANARY)
    assert read_key_variable("ENGINE_KEY") == CANARY
    assert key_headers("", "ENGINE_KEY") == {"authorization": f"Bearer {CANARY}"}
    monkeypatch.delenv("ENGINE_KEY")
    with pytest.raises(ConfigError, match=r"auth\.bearer_env: .*not set \(text of 10 characters"):
        read_key_variable("ENGINE_KEY")
