"""Table and plot of `hotpath.py` show medians."""

from __future__ import annotations

from loadtest.bench.hotpath import SHARES, Row, shares_of, warm_with


def test_the_share_of_a_duty_is_the_difference_of_the_load_with_and_without_it() -> None:
    """Quotas need tenants, and the log of requests is on by default. What was not measured is NaN."""
    cpu_us = {(): 400.0, SHARES["request log"][1]: 380.0, SHARES["quotas"][1]: 420.0, SHARES["quotas"][0]: 460.0}
    rows = [Row(0, "warmroute", warm_with(duties), us, 1, 1, 1) for duties, us in cpu_us.items()]
    lines = shares_of(rows).splitlines()
    assert lines[:2] == ["| duty | added us | of 2K warm |", "| --- | --- | --- |"]
    assert lines[2:5] == ["| request log | 20 | 5% |", "| tenants | 20 | 5% |", "| quotas | 40 | 10% |"]
    assert lines[-1] == "| everything | nan | nan% |"
