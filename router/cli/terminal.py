"""What commands print: text and tables of untrusted names."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text


def printable(text: object) -> Text:
    """Untrusted text without markup; control characters are replaced by `?`."""
    return Text("".join(char if char.isprintable() else "?" for char in str(text)))


def folded_table(*columns: str, numbers: tuple[str, ...] = (), **style: Any) -> Table:
    """A table whose names are folded where the terminal is too narrow, never cut: they are for other commands. Columns
    of `numbers` follow."""
    table = Table(**style)
    for name in columns:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table
