"""Reloading policies, without a socket."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.config.policy_files import PolicyFolder
from router.errors import ConfigError
from router.feeds.policy_feed import PolicyFeed
from router.observe.changes import Changes
from router.observe.declared import of_decisions
from router.observe.metrics import Metrics
from router.policy.policy_set import PolicySet
from router.policy.review import Review

pytestmark = pytest.mark.anyio

TEXT = "name: mine\nabout: x\ncosts:\n  decode: {{weight: {weight}}}\npicker:\n  lowest_cost: {{}}\n"


def write(folder: Path, weight: float) -> None:
    (folder / "mine.yaml").write_text(TEXT.format(weight=weight))


async def at_once(_for_s: float) -> None:
    """A sleep that returns immediately."""


@pytest.fixture
def folder(tmp_path: Path) -> PolicyFolder:
    write(tmp_path, 1.0)
    return PolicyFolder(tmp_path, "mine")


async def test_a_router_does_not_start_with_invalid_policies(folder: PolicyFolder) -> None:
    """There is no last valid set."""
    (folder.folder / "mine.yaml").write_text("name: mine\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml"):
        PolicyFeed(folder, Metrics())
    (folder.folder / "mine.yaml").unlink()
    (folder.folder / "mine.yaml").symlink_to("nowhere.yaml")
    with pytest.raises(ConfigError, match=r"mine\.yaml: cannot be read"):
        PolicyFeed(folder, Metrics())


async def test_unchanged_files_are_not_read_again(folder: PolicyFolder) -> None:
    """The active set stays the same object."""
    feed = PolicyFeed(folder, Metrics())
    before = feed.current()
    await feed.check_files()
    assert feed.current() is before


async def test_the_set_is_replaced_as_a_whole_and_then_reviewed(folder: PolicyFolder) -> None:
    """The review gets both sets; its result is returned to the caller of the reload."""
    seen: list[tuple[PolicySet, PolicySet]] = []

    async def review(old: PolicySet, new: PolicySet) -> Review:
        assert feed.current() is new
        seen.append((old, new))
        return Review("p", 2000, 17, 0, 1.25, (), ())

    metrics, changes = Metrics(), Changes()
    feed = PolicyFeed(folder, metrics, review, changes=changes)
    before = feed.current()
    write(folder.folder, 2.0)
    done = await feed.reload()
    assert seen == [(before, feed.current())]
    assert done.review == "17 of 2,000 decisions would change"
    assert (done.changed, done.error, done.ttft_ratio) == (True, "", 1.25)
    assert done.version == feed.current().version != before.version
    assert metrics[of_decisions.POLICY_RELOAD_TTFT].labels().value == 1.25
    await feed.reload()
    assert metrics[of_decisions.POLICY_RELOAD_TTFT].labels().value == 1.0, "nothing changed"
    assert [(one.what, one.subject, one.cause) for one in changes.latest()] == [("policy", "mine", done.review)]


async def test_a_failing_review_does_not_prevent_the_reload(folder: PolicyFolder) -> None:
    """The result has no review then."""

    async def review(_old: PolicySet, _new: PolicySet) -> Review:
        raise IndexError

    feed = PolicyFeed(folder, Metrics(), review)
    before = feed.current()
    write(folder.folder, 2.0)
    done = await feed.reload()
    assert (done.changed, done.review, done.error) == (True, None, "")
    assert feed.current().version != before.version


async def test_a_file_that_is_being_written_is_not_read(folder: PolicyFolder) -> None:
    """It is read when it has not changed for a while."""
    writes = iter([333.0])

    async def sleep(_for_s: float) -> None:
        for weight in writes:
            write(folder.folder, weight)

    feed = PolicyFeed(folder, Metrics(), sleep=sleep)
    before = feed.current()
    write(folder.folder, 22.0)  # another size: its time may be that of the write before
    await feed.check_files()
    assert feed.current() is before
    await feed.check_files()
    assert "weight=333.0" in repr(feed.current().default.costs)


async def test_the_last_valid_set_stays_if_the_file_disappears(folder: PolicyFolder) -> None:
    """`error` names the reason."""
    feed = PolicyFeed(folder, Metrics(), sleep=at_once)
    before = feed.current()
    (folder.folder / "mine.yaml").unlink()
    await feed.check_files()
    assert feed.current() is before
    assert "unknown policy 'mine'" in feed.error
    write(folder.folder, 1.0)
    await feed.check_files()
    assert not feed.error
