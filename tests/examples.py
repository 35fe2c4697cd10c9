"""How many examples hypothesis tries: a number for each property, scaled by the profile."""

from __future__ import annotations

from hypothesis import settings

USUAL = 100
"""`max_examples` of the profile that gives each property the number that it names."""


def examples(number: int) -> settings:
    """Try this number of examples; with the profiles `quick` and `thorough` fewer or more."""
    return settings(max_examples=max(5, number * settings().max_examples // USUAL))
