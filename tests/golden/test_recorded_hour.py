"""The same traffic is decided, predicted, counted and recorded as before.

After a change that is meant, `python -m tests.golden.recorded_hour` writes what is recorded now; the commit says what
differs, and why.
"""

from __future__ import annotations

from difflib import unified_diff

from tests.golden.recorded_hour import golden, recorded

MAX_SHOWN = 12
"""Lines that differ and are shown of each section."""
MAX_CHARACTERS = 2000


def test_a_recorded_hour_is_as_before() -> None:
    before, now = golden(), recorded()
    assert now.keys() == before.keys()
    differing = []
    for section, lines in before.items():
        if lines != now[section]:
            changed = [*unified_diff(lines, now[section], section, "now", lineterm="", n=0)][:MAX_SHOWN]
            differing.append("\n".join(line[:MAX_CHARACTERS] for line in changed))
    assert not differing, "\n\n".join(differing)
