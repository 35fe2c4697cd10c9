"""Reading tenants again, without a socket."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest

from router.admission.tenant import Tenants
from router.config.tenant_file import TENANTS_INTERVAL_S, TENANTS_STEADY_S, watched_tenants
from router.config.watched_file import WatchedFile
from router.errors import ConfigError

pytestmark = pytest.mark.anyio


async def at_once(_for_s: float) -> None:
    """A sleep that returns immediately."""


def write(file: Path, text: str | None) -> None:
    """None: remove it."""
    file.unlink(missing_ok=True)
    if text is not None:
        file.write_text(text)


def entry(key: str) -> str:
    return f"tenants: [{{name: a, keys: ['{sha256(key.encode()).hexdigest()}']}}]"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.yaml"
    path.write_text(entry("old"))
    return path


def accepts(feed: WatchedFile[Tenants], key: str) -> bool:
    return feed.value.find(key.encode(), 0.0) is not None


async def test_a_router_does_not_start_with_invalid_tenants(file: Path) -> None:
    """There are no last valid ones."""
    write(file, "tenants: 1")
    with pytest.raises(ConfigError, match=r"tenants\.yaml:1: tenants: must be a list"):
        watched_tenants(file)


async def test_a_changed_file_replaces_all_tenants(file: Path) -> None:
    """An unchanged one is not read again."""
    feed = watched_tenants(file, at_once)
    before = feed.value
    await feed.check()
    assert feed.value is before
    write(file, entry("newer") + "\n")  # another size: its time may be that of the write before
    await feed.check()
    assert accepts(feed, "newer") and not accepts(feed, "old")


@pytest.mark.parametrize("text", ["tenants: 1", "tenants: [{name: a, keys: [x]}]", None])
async def test_the_last_valid_tenants_stay(file: Path, text: str | None) -> None:
    """The error names the file until it is valid again."""
    feed = watched_tenants(file, at_once)
    write(file, text)
    for _ in range(2):
        await feed.check()
        assert accepts(feed, "old") and str(file) in feed.error
    write(file, entry("mended"))
    await feed.check()
    assert accepts(feed, "mended") and not feed.error


async def test_a_file_that_is_still_written_is_read_later(file: Path) -> None:
    """When it was unchanged for a moment."""

    async def written_meanwhile(_for_s: float) -> None:
        with file.open("a") as writing:
            writing.write(" # more")

    feed = watched_tenants(file, written_meanwhile)
    write(file, entry("half"))
    await feed.check()
    assert accepts(feed, "old")


def test_a_revoked_key_stops_within_a_second() -> None:
    """With time to read a file of many keys."""
    assert TENANTS_INTERVAL_S + TENANTS_STEADY_S < 0.5
