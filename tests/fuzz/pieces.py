"""How may bytes arrive?

A seed stays a file that one can read: where it is cut is not part of it but follows from its checksum.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from random import Random
from zlib import crc32

MOST_SINGLE_BYTES = 1024


def in_pieces(data: bytes) -> Iterator[list[bytes]]:
    """The same bytes in a few pieces, twice, and one by one where they are not too many."""
    dice = Random(crc32(data))
    for count in (1, 5):
        places = sorted(dice.choices(range(len(data) + 1), k=count))
        yield [data[start:end] for start, end in pairwise([0, *places, len(data)]) if start < end]
    if len(data) <= MOST_SINGLE_BYTES:
        yield [data[at : at + 1] for at in range(len(data))]
