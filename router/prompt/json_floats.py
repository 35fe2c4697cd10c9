"""Reads floats of untyped fields in bounded time.

msgspec needs 5 to 20 us for a float such as 1.0123456789e-300, Python less than one for any of `MAX_CHARACTERS`.
"""

MAX_CHARACTERS = 32
"""The longest float that programs write has 24 characters."""


def short_float(text: str) -> float:
    """The `float_hook` of decoders. `ValueError` for a longer text."""
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"has a number of {len(text)} characters, more than {MAX_CHARACTERS}")
    return float(text)
