"""Checks large request bodies before they are decoded, in slices between which the event loop runs, and reads them in a
thread.

One call of a JSON decoder cannot be interrupted, and takes time for each item that it decodes. So the items of a body
are counted first. A body with fewer bytes than two for each allowed item needs no check. The next request of a chat
begins as the one before it, so the counts up to the end of each slice are remembered.
"""

from __future__ import annotations

import asyncio
from codecs import utf_8_decode
from copy import copy
from secrets import randbits

import msgspec
import numpy as np
import xxhash

from router.admission.tenant import OPEN_TENANT, Tenant
from router.errors import MalformedRequest, not_json
from router.frontends.fair_turns import FairTurns
from router.types import Endpoint

SLICE_BYTES = 128 * 1024
"""Checked at once: at most 3 ms."""
HASHED_BYTES = 4 * 1024 * 1024
"""Looked up at once: 0.3 ms."""
MAX_COUNTED = 4096
"""Beginnings of bodies whose counts are remembered, about 300 bytes each."""
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


class ItemCounter(msgspec.Struct, gc=False):
    """Counts the objects, lists, strings and separators of a JSON text that arrives in pieces, outside of strings, and
    checks that it is UTF-8."""

    fields: int = 0
    """Names at the top of an object."""
    containers: int = 0
    strings: int = 0
    commas: int = 0
    escapes: int = 0
    floats: int = 0
    other_bytes: int = 0
    _depth: int = 0
    _in_string: bool = False
    _escape: bytes = b""
    """A backslash whose escaped character is in the next piece."""
    _character: bytes = b""
    """The first bytes of a character that continues in the next piece."""

    def feed(self, piece: bytes) -> None:
        if self._character or not piece.isascii():
            text = self._character + piece
            self._character = text[utf_8_decode(text, "strict", False)[1] :]
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

    def end(self) -> None:
        """Raises `UnicodeDecodeError` if the last character is incomplete."""
        self._character.decode()

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
    """Checks one slice of a large body at a time, in fair `turns`. `max_items`: maximum number of items in a body."""

    def __init__(self, max_items: int, turns: FairTurns | None = None) -> None:
        self._max_items = max_items
        self._turns = turns or FairTurns()
        self._seed = randbits(64)
        self._counted: dict[bytes, ItemCounter] = {}
        """By a digest of the beginning of a body; the least recently used comes first."""

    def needs_check(self, body: bytes) -> bool:
        """Whether a body is so large that it might have too many items."""
        return len(body) > 2 * self._max_items

    async def check(self, endpoint: Endpoint, body: bytes, tenant: Tenant = OPEN_TENANT) -> None:
        """Raises `MalformedRequest` for a JSON object with too many items, or that is not UTF-8: the decoder does not
        check raw values. Counts are remembered for each tenant alone, because that shows in the time of a request."""
        head = body[:LEADING_BYTES].lstrip()
        if not head:
            raise MalformedRequest(f"The request body begins with more than {LEADING_BYTES} characters of whitespace.")
        if not head.startswith(b"{"):
            return
        counter, view = ItemCounter(), memoryview(body)
        digest = xxhash.xxh3_128(tenant.name.encode("utf-8", "surrogatepass"), seed=self._seed)
        try:
            for start in range(0, len(body), SLICE_BYTES):
                piece = view[start : start + SLICE_BYTES]
                async with self._turns.turn(tenant, start, len(piece)):
                    digest.update(piece)
                    known = self._counted.pop(key := digest.digest(), None)
                    counter = known or copy(counter)
                    if known is None:
                        counter.feed(bytes(piece))
                    self._check_items(endpoint, counter)
                    self._counted[key] = counter
                    if len(self._counted) > MAX_COUNTED:
                        del self._counted[next(iter(self._counted))]
                    if known is None or len(piece) + start & HASHED_BYTES - 1 == 0:
                        await asyncio.sleep(0)
            counter.end()
        except UnicodeDecodeError as error:
            raise not_json(error) from error

    def _check_items(self, endpoint: Endpoint, counted: ItemCounter) -> None:
        if endpoint.api.is_chat:
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
