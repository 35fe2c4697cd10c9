"""What the fuzzers start from, and what they ever found, without a fuzzer: so that no target rots, and no defect
returns."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs

from tests.fuzz.targets import FOUND, TARGETS, found


@pytest.fixture(autouse=True)
def _nothing_is_said() -> Iterator[None]:
    """What cannot be understood is logged with a traceback."""
    with capture_logs():
        yield


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_are_read_as_the_target_promises(name: str) -> None:
    """Real examples, and none of any length."""
    for seed in (b"", *TARGETS[name].seeds):
        TARGETS[name].run(seed)


@pytest.mark.parametrize("name", TARGETS)
def test_what_once_broke_a_target_does_so_no_more(name: str) -> None:
    """Every file that a fuzzer left."""
    for path in found(name):
        TARGETS[name].run(path.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_fit_into_a_run(name: str) -> None:
    """A fuzzer cuts off what is longer."""
    assert all(len(seed) <= TARGETS[name].most_bytes for seed in TARGETS[name].seeds)


def test_whatever_was_found_belongs_to_a_target() -> None:
    """A renamed target takes its files along."""
    assert {folder.name for folder in FOUND.iterdir()} <= TARGETS.keys()
