"""When policy files take effect, without a socket."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.config.policy_files import PolicyFolder
from router.errors import ConfigError
from router.feeds.policy_feed import PolicyFeed
from router.observe.metrics import Metrics
from router.policy.policy_set import PolicySet

pytestmark = pytest.mark.anyio

TEXT = "name: mine\nabout: x\ncosts:\n  decode: {{weight: {weight}}}\npicker:\n  lowest_cost: {{}}\n"


def write(folder: Path, weight: float) -> None:
    (folder / "mine.yaml").write_text(TEXT.format(weight=weight))


async def at_once(_for_s: float) -> None:
    """Nobody waits in a test."""


@pytest.fixture
def folder(tmp_path: Path) -> PolicyFolder:
    write(tmp_path, 1.0)
    return PolicyFolder(tmp_path, "mine")


async def test_a_router_does_not_start_on_wrong_policies(folder: PolicyFolder) -> None:
    """There is no last good set yet."""
    (folder.folder / "mine.yaml").write_text("name: mine\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml"):
        PolicyFeed(folder, Metrics())
    (folder.folder / "mine.yaml").unlink()
    (folder.folder / "mine.yaml").symlink_to("nowhere.yaml")
    with pytest.raises(ConfigError, match=r"mine\.yaml: cannot be read"):
        PolicyFeed(folder, Metrics())


async def test_nothing_is_read_while_nothing_changes(folder: PolicyFolder) -> None:
    """The set in force stays the very same value."""
    feed = PolicyFeed(folder, Metrics())
    before = feed.current()
    await feed.look()
    assert feed.current() is before


async def test_the_set_is_swapped_whole_and_reviewed_while_it_decides(folder: PolicyFolder) -> None:
    """Nobody waits for the review, which sees both; what it says goes to whoever asked."""
    seen: list[tuple[PolicySet, PolicySet]] = []

    async def review(old: PolicySet, new: PolicySet) -> str:
        assert feed.current() is new
        seen.append((old, new))
        return "17 of 2,000 decisions would change"

    feed = PolicyFeed(folder, Metrics(), review)
    before = feed.current()
    write(folder.folder, 2.0)
    done = await feed.reload()
    assert seen == [(before, feed.current())]
    assert (done.changed, done.review, done.error) == (True, "17 of 2,000 decisions would change", "")
    assert done.version == feed.current().version != before.version


async def test_a_review_that_fails_keeps_no_good_policies_back(folder: PolicyFolder) -> None:
    """Nobody can say what changes; it changes."""

    async def review(_old: PolicySet, _new: PolicySet) -> str:
        raise IndexError

    feed = PolicyFeed(folder, Metrics(), review)
    before = feed.current()
    write(folder.folder, 2.0)
    done = await feed.reload()
    assert (done.changed, done.review, done.error) == (True, None, "")
    assert feed.current().version != before.version


async def test_a_file_that_is_still_being_written_is_left_alone(folder: PolicyFolder) -> None:
    """A change is taken up when it has stood still for a while."""
    writes = iter([33.0])

    async def sleep(_for_s: float) -> None:
        for weight in writes:
            write(folder.folder, weight)

    feed = PolicyFeed(folder, Metrics(), sleep=sleep)
    before = feed.current()
    write(folder.folder, 2.0)
    await feed.look()
    assert feed.current() is before
    await feed.look()
    assert "weight=33.0" in repr(feed.current().default.costs)


async def test_a_folder_that_vanishes_leaves_the_last_good_set(folder: PolicyFolder) -> None:
    """And what is wrong is said."""
    feed = PolicyFeed(folder, Metrics(), sleep=at_once)
    before = feed.current()
    (folder.folder / "mine.yaml").unlink()
    await feed.look()
    assert feed.current() is before
    assert "unknown policy 'mine'" in feed.error
    write(folder.folder, 1.0)
    await feed.look()
    assert not feed.error
