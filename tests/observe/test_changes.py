"""The latest changes: bounded, newest first, each written once."""

from __future__ import annotations

from router.observe.changes import MAX_CHANGES, MAX_CHARACTERS, MAX_OF_SUBJECT, Change, Changes


def test_the_latest_changes_are_kept_and_each_is_written() -> None:
    written: list[Change] = []
    changes = Changes(written.append)
    for number in range(MAX_CHANGES + 5):
        changes.add("ejected", f"pod-{number}", "connection refused")
    assert len(written) == MAX_CHANGES + 5
    assert changes.latest() == written[: -MAX_CHANGES - 1 : -1]
    assert [one.subject for one in changes.latest(2)] == [f"pod-{MAX_CHANGES + 4}", f"pod-{MAX_CHANGES + 3}"]


def test_what_pods_say_is_cut() -> None:
    changes = Changes()
    changes.add("ejected", "x" * 10_000, "y" * 10_000)
    [found] = changes.latest()
    assert max(len(found.subject), len(found.cause)) < MAX_CHARACTERS + 10


def test_a_pod_that_flaps_does_not_hide_the_changes_of_others() -> None:
    changes = Changes()
    changes.add("policy", "chat", "files changed")
    for number in range(MAX_CHANGES):
        changes.add("restarted", "pod-1", str(number))
    *flaps, policy = changes.latest()
    assert policy.what == "policy"
    assert [one.cause for one in flaps] == [str(MAX_CHANGES - 1 - number) for number in range(MAX_OF_SUBJECT)]
