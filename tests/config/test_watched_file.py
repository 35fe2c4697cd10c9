"""Values that are read from files again."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from router.config.watched_file import stamp_of, stamps_of, watched
from router.errors import ConfigError


class Source:
    """Counts how often it is read; `problem` makes it raise."""

    def __init__(self) -> None:
        self.reads = 0
        self.problem = ""

    def read(self) -> int:
        self.reads += 1
        if self.problem:
            raise ConfigError(self.problem)
        return self.reads


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_text("one")
    return path


def test_it_is_read_only_when_the_file_changes(file: Path) -> None:
    source = Source()
    value = watched(source.read, str(file), None, event="not readable")
    assert [value.current(), value.current()] == [1, 1]
    file.write_text("another")
    assert value.current() == 2


def test_the_last_value_stays_and_each_problem_is_logged_once(file: Path) -> None:
    """It is read again without a change of the file: what was wrong may not have been the file."""
    source = Source()
    value = watched(source.read, str(file), event="not readable")
    value.current()
    file.write_text("another")
    with capture_logs() as lines:
        for source.problem in ("a", "a", "b"):
            assert value.current() == 1 and value.error == source.problem
        source.problem = ""
        assert value.current() == 5 and not value.error and value.failed_since_s is None
    assert [line.get("error", line["event"]) for line in lines] == ["a", "b", "files read again"]


def test_it_is_followed_in_intervals(file: Path) -> None:
    """And read once it does not change any more."""
    source, slept_s = Source(), list[float]()
    value = watched(source.read, str(file), event="not readable")
    value.current()
    file.write_text("another")

    async def sleep(delay_s: float) -> None:
        slept_s.append(delay_s)
        if len(slept_s) > 2:
            raise asyncio.CancelledError

    value.sleep = sleep
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(value.follow(10.0))
    assert (slept_s, value.value) == ([10.0, value.steady_s, 10.0], 2)


def test_a_file_that_was_never_readable_is_an_error_or_the_first_value(file: Path) -> None:
    source = Source()
    source.problem = "wrong"
    with pytest.raises(ConfigError):
        watched(source.read, str(file), event="not readable").current()
    assert watched(source.read, str(file), event="not readable", first=0).current() == 0


def test_every_change_of_a_file_or_of_a_links_target_changes_the_stamp(tmp_path: Path) -> None:
    """Also one of equal size that keeps the time of the last change, as `cp -p` does."""
    file, other, link = tmp_path / "a", tmp_path / "b", tmp_path / "link"
    file.write_text("one")
    other.write_text("two")
    link.symlink_to(file)
    seen = [stamp_of(link), stamp_of(link)]
    link.unlink()
    link.symlink_to(other)
    os.utime(other, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
    seen.append(stamp_of(link))
    other.write_text("more")
    seen.append(stamp_of(link))
    assert seen[0] == seen[1] and len(set(seen)) == 3


def test_a_file_that_is_missing_or_not_named_has_none(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    assert stamps_of(str(tmp_path / "a"), tmp_path / "b", None, "") == (stamp_of(tmp_path / "a"), None, None, None)
