"""Decodes long lists of token ids in slices.

One call of a JSON decoder cannot be interrupted: a million ids in one would hold the interpreter for 20 ms.
"""

from __future__ import annotations

from array import array
from typing import Annotated

import msgspec

from router.hashing import token_array

SLICE_BYTES = 1 << 16
"""Bytes of a list that are decoded at once."""


class TokenIds:
    """Decodes ids below `vocabulary_size`."""

    def __init__(self, vocabulary_size: int) -> None:
        self._ids = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, lt=vocabulary_size)]])

    def read(self, listed: memoryview) -> array[int]:
        """The ids of a JSON list, which begins with `[`. `ValueError` or `RecursionError` for anything else."""
        ids, inner, start = token_array(), listed[1:-1], 0
        while start < len(inner):
            piece = inner[start : start + SLICE_BYTES].tobytes()
            if start + SLICE_BYTES < len(inner):
                piece = piece[: piece.rindex(b",")]
            ids.extend(self._ids.decode(b"[%b]" % piece))
            start += len(piece) + 1
        return ids
