"""The pods that have seen a picture."""

from __future__ import annotations

from dataclasses import replace

import pytest

from router.index import seen_pictures
from router.index.seen_pictures import SeenPictures
from router.types import Pod, PromptPicture
from tests.kit.scenes import make_pod, snapshot_of

PODS = tuple(make_pod(name, epoch=1) for name in "abc")
CAT, DOG = PromptPicture(1, 40, 30), PromptPicture(2, None, 1024)


def pods_of(seen: SeenPictures, picture: PromptPicture, *pods: Pod) -> tuple[str, ...]:
    (found,) = seen.seen([picture], snapshot_of(*(pods or PODS)))
    assert (found.end_token, found.token_count) == (picture.end_token, picture.token_count)
    return found.pods


def test_a_picture_is_known_where_it_was_seen() -> None:
    seen = SeenPictures()
    seen.saw(PODS[0], [CAT, DOG])
    seen.saw(PODS[1], [CAT])
    assert pods_of(seen, CAT) == ("a", "b")
    assert pods_of(seen, DOG) == ("a",)


def test_a_restarted_or_removed_pod_has_seen_nothing() -> None:
    seen = SeenPictures()
    seen.saw(PODS[0], [CAT])
    seen.saw(PODS[1], [CAT])
    assert pods_of(seen, CAT, replace(PODS[0], epoch=2), PODS[2]) == ()
    seen.saw(replace(PODS[0], epoch=2), [CAT])
    assert pods_of(seen, CAT, replace(PODS[0], epoch=2)) == ("a",)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pictures, and the pods of one picture, that were seen first are the first to go."""
    monkeypatch.setattr(seen_pictures, "MAX_PICTURES", 2)
    monkeypatch.setattr(seen_pictures, "MAX_PODS", 2)
    seen = SeenPictures()
    for pod in (PODS[0], PODS[1], PODS[0], PODS[2]):
        seen.saw(pod, [CAT])
    assert pods_of(seen, CAT) == ("a", "c")
    seen.saw(PODS[0], [PromptPicture(3, None, 1)])
    seen.saw(PODS[0], [CAT, DOG])
    forgotten = PromptPicture(3, None, 1)
    assert [pods_of(seen, picture) for picture in (CAT, DOG, forgotten)] == [("c", "a"), ("a",), ()]
