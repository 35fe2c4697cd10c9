"""Operators drain pods by labels."""

from __future__ import annotations

from dataclasses import replace

import pytest

from router.fleet.drains import LABELS, MAX_CHARACTERS, MAX_DRAINS, Drain, Drains, selector_of, selects
from tests.kit.scenes import pod

DRAIN = Drain(1_764_590_400.0, "ada")
RACKED = replace(pod("a"), rack="r12", zone="z", host="h", pool="p", hardware="h100")


def test_a_selector_is_known_by_its_labels_in_order() -> None:
    """In any order, with or without spaces."""
    assert selector_of(" zone=z, rack=r12") == selector_of("rack=r12,zone=z") == "rack=r12,zone=z"


@pytest.mark.parametrize("text", ["", "rack", "rack=", "=r12", "rak=r12", "rack=r12,", f"rack={'x' * MAX_CHARACTERS}"])
def test_another_selector_is_refused_with_the_names_of_labels(text: str) -> None:
    """An empty one would drain every pod."""
    with pytest.raises(ValueError, match=", ".join(LABELS)):
        selector_of(text)


@pytest.mark.parametrize(
    ("selector", "expected"),
    [("pod=a", True), ("rack=r12,zone=z", True), ("rack=r12,zone=y", False), ("engine=vllm,role=both", True)],
)
def test_a_pod_needs_all_labels(selector: str, expected: bool) -> None:
    drains = Drains()
    drains.change(selector, DRAIN)
    assert selects(selector, RACKED) is bool(drains.reason(RACKED)) is expected


def test_the_number_of_drains_is_bounded() -> None:
    """One that is in force may be replaced."""
    drains = Drains()
    for number in range(MAX_DRAINS):
        drains.change(f"rack=r{number}", DRAIN)
    with pytest.raises(ValueError, match="end some, or drain by a label"):
        drains.change("rack=more", DRAIN)
    drains.change("rack=r1", Drain(0.0, "eve"))
    assert drains.current["rack=r1"].by == "eve" and len(drains.current) == MAX_DRAINS


def test_what_others_end_ends_here_and_what_was_changed_here_stays() -> None:
    """Until the others have it."""
    drains = Drains()
    drains.change("rack=r1", DRAIN)
    drains.replace(drains.with_unshared({"rack=r2": DRAIN}))
    assert set(drains.current) == {"rack=r1", "rack=r2"}
    drains.unshared.clear()
    assert drains.replace(drains.with_unshared({"rack=r2": DRAIN}))
    assert not drains.replace(drains.with_unshared({"rack=r2": DRAIN}))
    assert set(drains.current) == {"rack=r2"}


def test_the_drain_of_a_pod_ends_with_the_pod() -> None:
    """Those by other labels stay; what has ended is shared."""
    drains = Drains()
    drains.change("pod=a", DRAIN)
    drains.change("rack=r12", DRAIN)
    drains.forget("a")
    drains.forget("b")
    assert set(drains.current) == {"rack=r12"} and drains.unshared["pod=a"] is None and "pod=b" not in drains.unshared
