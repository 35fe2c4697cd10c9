"""Checks large request bodies before they are decoded, in slices between which the event loop runs, and reads them in a
thread.

One call of a JSON decoder cannot be interrupted, and takes time for each item that it decodes. So the items of a body
are counted first. A body with fewer bytes than two for each allowed item needs no check.
"""

from __future__ import annotations

import asyncio
from codecs import IncrementalDecoder, getincrementaldecoder
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from router.errors import MalformedRequest
from router.types import CONVERTED, Endpoint

SLICE_BYTES = 128 * 1024
"""Checked at once: at most 3 ms."""
LEADING_BYTES = 1024
"""A large body must begin within as many bytes of whitespace."""
NUMBERS = 16
"""Outside of chats, this many numbers count as one item: token ids are decoded in slices."""
NUMBER_BYTES = 8
"""As many bytes between strings count as one number: whitespace, and long numbers."""
FLOATS = 4
"""In chats, a point or an exponent counts as this many items: a float takes five times as long as an integer."""
ESCAPES = 24
"""This many escaped characters count as one item: the decoder needs five times as long for them as for others."""
MAX_FIELDS = 4096
"""At the top of a large body: to decode the names of as many takes a millisecond."""
_STRUCTURE = b"{[]}:"
_OTHERS = bytes(set(range(256)).difference(_STRUCTURE))
_DEPTH_CHANGES = np.zeros(256, np.int64)
_DEPTH_CHANGES[list(b"{[")], _DEPTH_CHANGES[list(b"]}")] = 1, -1
_UTF8 = getincrementaldecoder("utf-8")
_Result = TypeVar("_Result")


class ItemCounter:
    """Counts the objects, lists, strings and separators of a JSON text that arrives in pieces, outside of strings.
    `fields`: names at the top of an object."""

    def __init__(self) -> None:
        self.fields = self._depth = 0
        self.containers = self.strings = self.commas = self.escapes = self.floats = self.other_bytes = 0
        self._in_string = False
        self._escape = b""
        """A backslash whose escaped character is in the next piece."""

    def feed(self, piece: bytes) -> None:
        """Count the next piece."""
        piece = self._escape + piece
        odd = (len(piece) - len(piece.rstrip(b"\\"))) % 2
        self._escape = b"\\" * odd
        if odd:
            piece = piece[:-1]
        if b"\\" in piece:
            piece = self._without_escaped(piece)
        parts = piece.split(b'"')
        outside = b"".join(parts[self._in_string :: 2])
        self.containers += outside.count(b"{") + outside.count(b"[")
        self.commas += outside.count(b",")
        self.floats += outside.count(b".") + outside.count(b"e") + outside.count(b"E")
        self.other_bytes += len(outside)
        self._count_fields(outside.translate(None, _OTHERS))
        quotes = len(parts) - 1
        self.strings += (quotes + (not self._in_string)) // 2
        self._in_string ^= quotes % 2 == 1

    def _without_escaped(self, piece: bytes) -> bytes:
        """Count the backslashes, and overwrite what they escape. Three times as fast as `replace`."""
        codes = np.frombuffer(piece, np.uint8)
        backslashes = np.flatnonzero(codes == ord("\\"))
        self.escapes += len(backslashes)
        begins = np.flatnonzero(np.diff(backslashes, prepend=-2) != 1)
        lengths = np.diff(begins, append=len(backslashes))
        behind = backslashes[begins] + lengths  # each run; its last backslash escapes that if their number is odd
        overwritten = codes.copy()
        overwritten[behind[lengths % 2 == 1]] = 0
        return overwritten.tobytes()

    def _count_fields(self, structure: bytes) -> None:
        """Count the colons at depth 1. `structure`: the brackets and colons of a piece."""
        if structure:
            codes = np.frombuffer(structure, np.uint8)
            depths = self._depth + np.cumsum(_DEPTH_CHANGES[codes])
            self.fields += int(np.count_nonzero((codes == ord(":")) & (depths == 1)))
            self._depth = int(depths[-1])


class LargeBodies:
    """Checks large bodies one after the other. `max_items`: maximum number of items in a body."""

    def __init__(self, max_items: int) -> None:
        self._max_items = max_items
        self._turn = asyncio.Lock()

    def are_checked(self, body: bytes) -> bool:
        """Whether a body is so large that it might have too many items."""
        return len(body) > 2 * self._max_items

    async def run(self, work: Callable[..., _Result], *arguments: Any) -> _Result:
        """The result of `work` in a thread, one at a time: a call of a JSON decoder holds the interpreter in
        any thread, but the event loop runs between two calls."""
        async with self._turn:
            return await asyncio.to_thread(work, *arguments)

    async def check(self, endpoint: Endpoint, body: bytes) -> None:
        """Raises `MalformedRequest` for a JSON object with too many items, or that is not UTF-8: the decoder does not
        check raw values."""
        head = body[:LEADING_BYTES].lstrip()
        if not head:
            raise MalformedRequest(f"The request body begins with more than {LEADING_BYTES} characters of whitespace.")
        if not head.startswith(b"{"):
            return
        counter, text = ItemCounter(), _UTF8()
        async with self._turn:
            for start in range(0, len(body), SLICE_BYTES):
                piece = body[start : start + SLICE_BYTES]
                counter.feed(piece)
                if text.getstate()[0] or not piece.isascii():
                    _decode(text, piece)
                self._check_items(endpoint, counter)
                await asyncio.sleep(0)
            _decode(text, b"", final=True)

    def _check_items(self, endpoint: Endpoint, counted: ItemCounter) -> None:
        if endpoint is Endpoint.CHAT or endpoint in CONVERTED:
            numbers = counted.other_bytes // NUMBER_BYTES
            items = counted.containers + max(counted.commas, counted.floats * FLOATS, numbers)
        else:
            numbers = max(counted.commas, counted.other_bytes // NUMBER_BYTES)
            items = counted.containers + counted.strings + numbers // NUMBERS
        if counted.fields > MAX_FIELDS:
            raise MalformedRequest(f"A large request body may have {MAX_FIELDS} fields at its top.")
        if items + counted.escapes // ESCAPES > self._max_items:
            raise MalformedRequest(
                f"The request body has more than {self._max_items} items: objects, lists and their elements, "
                "also long numbers, whitespace and escaped characters (limits.max_json_items)."
            )


def _decode(decoder: IncrementalDecoder, piece: bytes, *, final: bool = False) -> None:
    try:
        decoder.decode(piece, final)
    except UnicodeDecodeError as error:
        raise MalformedRequest(f"The request body is not valid JSON: {error.reason}") from error
