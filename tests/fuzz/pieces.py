"""Cuts an input into pieces, as a network would.

The cuts follow from the checksum of the input, so that seeds stay readable files.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from random import Random
from zlib import crc32

MOST_SINGLE_BYTES = 1024


def in_pieces(data: bytes) -> Iterator[list[bytes]]:
    """The same bytes in a few pieces, twice, and byte by byte for short inputs."""
    dice = Random(crc32(data))
    for count in (1, 5):
        places = sorted(dice.choices(range(len(data) + 1), k=count))
        yield [data[start:end] for start, end in pairwise([0, *places, len(data)]) if start < end]
    if len(data) <= MOST_SINGLE_BYTES:
        yield [data[at : at + 1] for at in range(len(data))]
