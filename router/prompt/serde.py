"""JSON as serde reads it in the Rust front end of vLLM: large integers become floats, and floats are not exact."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

import msgspec

from router.prompt.conversation import UnreadReason, Unrenderable

_MAX_INTEGER, _MIN_INTEGER = 2**64 - 1, -(2**63)
_MAX_POWER = 308
_POWERS = tuple([float(f"1e{power}") for power in range(_MAX_POWER + 1)])
_MAX_DIGITS = 20
"""Digits of the largest integer of 64 bits."""


def read_json(document: str | msgspec.Raw) -> Any:
    """The value. Raises `Unrenderable` for bad JSON."""
    text = document if isinstance(document, str) else bytes(document)
    try:
        return json.loads(text, parse_float=serde_float, parse_int=serde_integer, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise Unrenderable(UnreadReason.NOT_CONVERTED, f"JSON: {error}") from error


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def serde_integer(text: str) -> int | float:
    value = int(text[: _MAX_DIGITS + 1])
    if len(text) > _MAX_DIGITS or not _MIN_INTEGER <= value <= _MAX_INTEGER or (not value and text[0] == "-"):
        return serde_float(text)
    return value


def serde_float(text: str) -> float:
    """The nearest float or its neighbour: the digits that fit into 64 bits, times or by a power of ten. `ValueError`
    for one that is too large."""
    mantissa, _, exponent = text.lower().partition("e")
    whole, _, fraction = mantissa.lstrip("-").partition(".")
    digits = (whole + fraction).lstrip("0")
    kept = digits[:_MAX_DIGITS]
    if len(kept) == _MAX_DIGITS and int(kept) > _MAX_INTEGER:
        kept = kept[:-1]
    value, power = float(int(kept or "0")), len(digits) - len(kept) - len(fraction) + int(exponent[:9] or "0")
    while value and power < -_MAX_POWER:
        value, power = value / 1e308, power + _MAX_POWER
    if value:
        value = value / _POWERS[-power] if power < 0 else value * _POWERS[power] if power <= _MAX_POWER else math.inf
    if value == math.inf:
        raise ValueError(f"{text[:40]} is too large")
    return -value if mantissa[0] == "-" else value


def as_serde(value: Any) -> Any:
    """A decoded value with its numbers as serde would have read them."""
    if isinstance(value, float):
        return serde_float(repr(value))
    if isinstance(value, int) and not isinstance(value, bool):
        return serde_integer(str(value))
    if isinstance(value, dict):
        return {name: as_serde(item) for name, item in value.items()}
    return [*map(as_serde, value)] if isinstance(value, list) else value
