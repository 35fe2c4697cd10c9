"""Table and plot of `hotpath.py` show medians."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from loadtest.bench.hotpath import SHARES, Row, bars_of, markdown, shares_of, warm_with

ROWS = [
    *(Row(n, "ours", "2K warm", cpu_us, 1_500.0, 1, 2) for n, cpu_us in enumerate((400.0, 900.0, 500.0))),
    Row(0, "nginx", "2K warm", 21.2, 44_670.0, 1, 2),
    Row(0, "nginx", "chunk", 18.5, 199.0, 1, 2),
]


def test_the_table_has_a_row_per_router_and_a_column_per_load() -> None:
    """A load that was not measured is NaN."""
    assert markdown(ROWS).splitlines() == [
        "| CPU us (requests/s) | 2K warm | chunk |",
        "| --- | --- | --- |",
        "| ours | 500.0 (1,500) | nan (nan) |",
        "| nginx | 21.2 (44,670) | 18.5 (199) |",
    ]


def test_the_plot_is_a_complete_svg_file_with_routers_and_loads() -> None:
    pytest.importorskip("matplotlib")
    root = ElementTree.fromstring(bars_of(ROWS))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    texts = {text.strip() for text in root.itertext()}
    assert {"ours", "nginx", "2K warm", "chunk"} <= texts


def test_the_share_of_a_duty_is_the_difference_of_the_load_with_and_without_it() -> None:
    """Quotas need tenants, and the log of requests is on by default. What was not measured is NaN."""
    cpu_us = {(): 400.0, SHARES["request log"][1]: 380.0, SHARES["quotas"][1]: 420.0, SHARES["quotas"][0]: 460.0}
    rows = [Row(0, "warmroute", warm_with(duties), us, 1, 1, 1) for duties, us in cpu_us.items()]
    lines = shares_of(rows).splitlines()
    assert lines[:2] == ["| duty | added us | of 2K warm |", "| --- | --- | --- |"]
    assert lines[2:5] == ["| request log | 20 | 5% |", "| tenants | 20 | 5% |", "| quotas | 40 | 10% |"]
    assert lines[-1] == "| everything | nan | nan% |"
