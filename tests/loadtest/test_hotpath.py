"""Do table and plot show the medians of what was measured?"""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from loadtest.hotpath import Row, bars_of, markdown

ROWS = [
    *(Row(n, "ours", "2K warm", cpu_us, 1_500.0, 1, 2) for n, cpu_us in enumerate((400.0, 900.0, 500.0))),
    Row(0, "nginx", "2K warm", 21.2, 44_670.0, 1, 2),
    Row(0, "nginx", "chunk", 18.5, 199.0, 1, 2),
]


def test_the_table_has_a_row_a_router_and_a_column_a_load() -> None:
    """Medians; what was never measured is said not to be a number."""
    assert markdown(ROWS).splitlines() == [
        "| CPU us (requests/s) | 2K warm | chunk |",
        "| --- | --- | --- |",
        "| ours | 500.0 (1,500) | nan (nan) |",
        "| nginx | 21.2 (44,670) | 18.5 (199) |",
    ]


def test_the_plot_is_a_whole_svg_file_that_names_routers_and_loads() -> None:
    """It needs nothing around it."""
    pytest.importorskip("matplotlib")
    root = ElementTree.fromstring(bars_of(ROWS))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    told = {text.strip() for text in root.itertext()}
    assert {"ours", "nginx", "2K warm", "chunk"} <= told
