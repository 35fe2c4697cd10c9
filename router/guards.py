"""What may input from outside cost?

A reader of bytes or numbers of a client, a pod, a publisher or Redis states a `Bound` and reads through it. The readers
that do not are listed with their reasons in `tests/style/test_guards.py`. This file neither logs nor ejects: the caller
decides what follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

MAX_AT_S = 1e11
"""The latest Unix time that is read: in the year 5138."""

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class OutOfBounds(ValueError):
    """Foreign input exceeds a bound. The message names the input, the bound, and what was found."""


class OutOfRange(ValueError):
    """A number that cannot be true. The message names it and the range."""


class ForeignDecoder(Protocol[T_co]):
    """A decoder of msgspec. Raises `msgspec.DecodeError`, which is a `ValueError`, `UnicodeDecodeError`, or
    `RecursionError`."""

    def decode(self, document: bytes | memoryview, /) -> T_co: ...


@dataclass(frozen=True, slots=True)
class Bound:
    """What one document of a kind may contain. `what` names the kind in messages. `max_items`: values in lists and
    objects; each costs up to a microsecond, so 5,000 of them fit into a turn of the event loop. `counted`: the
    characters of JSON that are items; `{` where a decoder builds objects of few fields and skips all else."""

    what: str
    max_bytes: int
    max_items: int = 5000
    counted: bytes = b",:"

    def check_size(self, size_bytes: int) -> None:
        """Raises `OutOfBounds` for a longer document."""
        if size_bytes > self.max_bytes:
            raise OutOfBounds(f"{self.what}: {size_bytes} bytes, at most {self.max_bytes} are read")

    def check_items(self, items: int) -> None:
        """Raises `OutOfBounds` for more items."""
        if items > self.max_items:
            raise OutOfBounds(f"{self.what}: {items} items, at most {self.max_items} are read")

    def json(self, document: bytes, decoder: ForeignDecoder[T]) -> T:
        """The decoded document. Raises `OutOfBounds`, or `ValueError` if it is something else."""
        self.check_size(size_bytes := len(document))
        if size_bytes > self.max_items:  # none has more items than bytes
            self.check_items(sum(map(document.count, self.counted)))  # at least as many as it has
        return _decoded(document, decoder)

    def msgpack(self, document: bytes | memoryview, decoder: ForeignDecoder[T]) -> T:
        """The same for msgpack. Only the items of its outermost list are counted: state a size for what is in them."""
        view = memoryview(document)
        self.check_size(len(view))
        self.check_items(_msgpack_items(view))
        return _decoded(view, decoder)


def _decoded(document: bytes | memoryview, decoder: ForeignDecoder[T]) -> T:
    try:
        return decoder.decode(document)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _msgpack_items(document: memoryview) -> int:
    """Items that a list or map claims to have; 0 for anything else."""
    first = document[0] if document else 0
    width = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}.get(first, 0)
    return int.from_bytes(document[1 : 1 + width], "big") if width else first & 15 if 0x80 <= first < 0xA0 else 0


def in_range(value: float, low: float, high: float) -> float | None:
    """The number if it lies within the bounds, which NaN never does; else None."""
    return value if low <= value <= high else None


def checked(what: str, value: float, low: float, high: float) -> float:
    """The number. Raises `OutOfRange` if it does not lie within the bounds."""
    if low <= value <= high:
        return value
    raise OutOfRange(f"{what} is {value:g}, expected {low:g} to {high:g}")


MAX_FLOAT_CHARACTERS = 32
"""The longest float that programs write has 24 characters."""


def short_float(text: str) -> float:
    """The `float_hook` of decoders of untyped fields: msgspec needs 5 to 20 us for a float such as 1.0123456789e-300,
    Python less than one for any of this length. `ValueError` for a longer text."""
    if len(text) > MAX_FLOAT_CHARACTERS:
        raise ValueError(f"has a number of {len(text)} characters, more than {MAX_FLOAT_CHARACTERS}")
    return float(text)
