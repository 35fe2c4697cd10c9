"""Bearer tokens are read from a file."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from router.config.credentials import BearerFile
from router.errors import ConfigError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "token"


def test_the_file_is_read_again_when_it_changes(file: Path) -> None:
    """Two tokens while a token is rotated; none while the file is away."""
    file.write_text("first\n")
    bearer = BearerFile(str(file), "admin.bearer_file")
    assert bearer.accepts(b"first") and not bearer.accepts(b"second") and not bearer.accepts(b"")
    file.write_text("first\n\n  second \n")
    assert bearer.accepts(b"first") and bearer.accepts(b"second") and not bearer.accepts(b"")
    file.with_suffix(".new").write_text("third")
    file.with_suffix(".new").replace(file)
    assert [bearer.accepts(token) for token in (b"first", b"second", b"third")] == [False, False, True]
    file.unlink()
    assert not bearer.accepts(b"third")
    file.write_text("third")
    assert bearer.accepts(b"third")


def test_a_file_that_is_away_is_logged_once(file: Path) -> None:
    """Not for each admin call; again when it has been there in between."""
    file.write_text("first")
    bearer = BearerFile(str(file), "admin.bearer_file")
    with capture_logs() as lines:
        for _ in range(2):
            file.unlink()
            for _ in range(3):
                assert not bearer.accepts(b"first")
            file.write_text("first")
            assert bearer.accepts(b"first")
    assert [line["event"] for line in lines] == ["bearer tokens cannot be read", "files read again"] * 2


@pytest.mark.parametrize("text", [None, "", "\n \n"])
def test_a_file_without_a_token_is_a_configuration_error(file: Path, text: str | None) -> None:
    """The message names the key, and the file if there is one: else it may be a token."""
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=rf"admin\.bearer_file: .*{file if text is not None else 'not shown'}"):
        BearerFile(str(file), "admin.bearer_file")
