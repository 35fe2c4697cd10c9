"""How is shown what clients, pods and files have named?

As it is, without markup, and without characters that a terminal would obey. This file never shortens anything.
"""

from __future__ import annotations

from rich.text import Text


def plain(said: object) -> Text:
    """Their words as a terminal may print them."""
    return Text("".join(each if each.isprintable() else "?" for each in str(said)))
