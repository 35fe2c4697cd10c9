"""What may input from outside cost?

A reader of bytes or numbers of a client, a pod, a publisher or Redis states a `Bound` and reads through it. The readers
that do not are listed with their reasons in `tests/style/test_guards.py`. This file neither logs nor ejects: the caller
decides what follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class OutOfBounds(ValueError):
    """Foreign input exceeds a bound. The message names the input, the bound, and what was found."""


class ForeignDecoder(Protocol[T_co]):
    """A decoder of msgspec. Raises `msgspec.DecodeError`, which is a `ValueError`, `UnicodeDecodeError`, or
    `RecursionError`."""

    def decode(self, document: bytes, /) -> T_co: ...


@dataclass(frozen=True, slots=True)
class Bound:
    """What one document of a kind may contain. `what` names the kind in messages. `max_items`: values in lists and
    objects; each costs up to a microsecond, so 5,000 of them fit into a turn of the event loop."""

    what: str
    max_bytes: int
    max_items: int

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
        self.check_size(len(document))
        self.check_items(document.count(b",") + document.count(b":"))  # at least as many as it has
        return _decoded(document, decoder)

    def msgpack(self, document: bytes, decoder: ForeignDecoder[T]) -> T:
        """The same for msgpack, in which an item takes at least a byte."""
        self.check_size(len(document))
        return _decoded(document, decoder)


def _decoded(document: bytes, decoder: ForeignDecoder[T]) -> T:
    try:
        return decoder.decode(document)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def in_range(value: float, low: float, high: float) -> float | None:
    """The number if it lies within the bounds, which NaN never does; else None."""
    return value if low <= value <= high else None
