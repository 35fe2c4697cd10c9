"""Pauses between tries."""

from __future__ import annotations

import pytest

from router.fleet.retry_pause import retry_pause_s


@pytest.mark.parametrize(("failures", "pause_s"), [(1, 0.5), (2, 1.0), (3, 2.0), (4, 3.0), (100_000, 3.0)])
def test_each_failure_doubles_the_pause_up_to_a_limit(failures: int, pause_s: float) -> None:
    """Also in an outage of days."""
    assert retry_pause_s(failures, 0.5, 3.0) == pause_s
