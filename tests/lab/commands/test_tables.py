"""Tables fit the terminal, and no name is cut."""

from __future__ import annotations

import io

from rich.console import Console

from loadtest.tables import text_table


def test_a_text_table_aligns_its_columns() -> None:
    """The first column names the row, and is folded rather than cut; numbers are aligned to the right."""
    shown = text_table(["policy", "cached"], [["cost_aware", "90%"]], title="t", caption="c")
    assert [(column.header, column.justify, column.no_wrap) for column in shown.columns] == [
        ("policy", "left", False),
        ("cached", "right", True),
    ]
    assert shown.row_count == 1


def test_a_name_that_is_too_long_is_folded_and_not_cut() -> None:
    """It may be pasted into the next command."""
    out = io.StringIO()
    shown = text_table(["policy", "cached"], [["cost_aware_for_one_tenant", "90.0%"]], title="t")
    Console(file=out, width=20).print(shown)
    lines = out.getvalue().splitlines()
    assert "".join(line[:12].strip() for line in lines if "cost" in line or "tenant" in line).startswith("cost_aware")
    assert "…" not in out.getvalue() and "90.0%" in out.getvalue()
