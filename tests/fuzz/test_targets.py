"""Runs all seeds and all inputs that fuzzers found, without a fuzzer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs

from tests.fuzz.targets import FOUND, TARGETS, found


@pytest.fixture(autouse=True)
def _without_logs() -> Iterator[None]:
    """Disable the logs of malformed input."""
    with capture_logs():
        yield


MARKED = [pytest.param(name, marks=pytest.mark.net if TARGETS[name].uses_network else ()) for name in TARGETS]


@pytest.mark.parametrize("name", MARKED)
def test_seeds_pass_their_target(name: str) -> None:
    """Also an empty input."""
    for seed in (b"", *TARGETS[name].seeds):
        TARGETS[name].run(seed)


@pytest.mark.parametrize("name", MARKED)
def test_found_inputs_pass_their_target(name: str) -> None:
    for path in found(name):
        TARGETS[name].run(path.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_fit_into_a_run(name: str) -> None:
    """A fuzzer cuts off longer inputs."""
    assert all(len(seed) <= TARGETS[name].max_bytes for seed in TARGETS[name].seeds)


def test_found_inputs_belong_to_a_target() -> None:
    """Also after a target is renamed."""
    assert {folder.name for folder in FOUND.iterdir()} <= TARGETS.keys()
