"""The share of estimated hits that engines report."""

from __future__ import annotations

import pytest

from router.index.measured_hits import MeasuredHits


@pytest.mark.parametrize("share", [0.25, 0.8, 1.0])
def test_the_share_is_that_of_the_reports(share: float) -> None:
    """What was expected is already scaled by it."""
    measured = MeasuredHits()
    for _ in range(2000):
        measured.observe("a", int(4000 * measured.share("a")), int(4000 * share))
    assert measured.share("a") == pytest.approx(share, abs=0.02)
    assert measured.share("b") == 1.0


def test_one_report_changes_little() -> None:
    measured = MeasuredHits()
    measured.observe("a", 2000, 0)
    assert measured.share("a") > 0.9


def test_the_share_recovers_after_a_bad_time() -> None:
    """It never becomes 0, which no report could change."""
    measured = MeasuredHits()
    for reported in (0, 4000):
        for _ in range(3000):
            measured.observe("a", round(4000 * measured.share("a")), reported)
        assert measured.share("a") == pytest.approx(max(reported / 4000, 0.1), abs=0.02)


def test_reports_beyond_the_estimate_and_of_none_count_as_nothing() -> None:
    measured = MeasuredHits()
    measured.observe("a", 0, 5000)
    measured.observe("a", 100, 10**9)
    assert measured.share("a") == 1.0


def test_the_number_of_classes_is_bounded() -> None:
    measured = MeasuredHits()
    for number in range(1000):
        measured.observe(number, 20_000, 0)
    assert [measured.share(number) < 1.0 for number in (0, 255, 256, 999)] == [True, True, False, False]
