"""What others have named is printed and never obeyed."""

from __future__ import annotations

import pytest

from router.cli.plain import plain


@pytest.mark.parametrize(
    ("said", "shown"),
    [("[fe80::1]:8000", "[fe80::1]:8000"), ("[red]x", "[red]x"), ("\x1b[2Jgone", "?[2Jgone"), ("größe 7", "größe 7")],
)
def test_names_are_shown_as_they_are(said: str, shown: str) -> None:
    """Neither rich's markup nor a terminal's."""
    assert plain(said).plain == shown
