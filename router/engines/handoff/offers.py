"""Removes transfer parameters from what a client receives.

With vLLM's `bidirectional_kv_xfer` a decode pod answers with an offer: the address of the KV of prompt and answer, for
the next turn's prefill pod. A client could read foreign KV with it. The router uses none, because the engine compares
no tokens. Source: docs/handoff.md#offers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeAlias

import msgspec

from router.engines.handoff.bodies import Opaque
from router.guards import Bound

MAX_HELD_BYTES = 128 * 1024
"""A longer response without lines is sent as far as no parameters begin in it."""
OFFER = Bound("offered transfer parameters", 512 * 1024, 4000, b":")
"""The blocks of a million tokens have 440 KB, and take 4 ms. With a longer offer, the response ends."""
_KEY = b'"kv_transfer_params"'
_BEGUN = re.compile(_KEY + rb"\s*+(?::|\Z)")
_LAST_BYTES = 1024
"""They may be a part of a key, with the comma before it."""
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'


def _object(levels: int) -> bytes:
    """A pattern of a JSON object with this many more levels in it, which never backtracks."""
    inner = rb"|" + _object(levels - 1) if levels else b""
    return rb'\{(?:[^{}"]++|' + _STRING + inner + rb")*+\}"


_FIELD = re.compile(_KEY + rb"\s*+:\s*+(" + _object(4) + rb"|" + _STRING + rb'|[^,{}"\s]++)(\s*+,)?', re.DOTALL)
"""Begins with a literal: a pattern that begins with white space takes quadratic time where there is much of it."""
_OPAQUE = msgspec.json.Decoder(Opaque)

Offered: TypeAlias = Callable[[Opaque], object]
"""Called with each offer that was removed."""


def without_offers(text: bytes, offered: Offered = lambda _: None) -> bytes:
    """JSON, or events with JSON, without its transfer parameters at any depth; no other byte changes. The key cannot be
    in a text: there its quotes are escaped."""
    kept, end = list[bytes](), 0
    for field in _FIELD.finditer(text) if _KEY in text else ():
        before, end = text[end : field.start()], field.end()
        if (shorter := before.rstrip()).endswith(b","):
            before = shorter if field[2] else shorter[:-1]
        kept.append(before)
        if field[1].startswith(b"{") and (offer := _decoded(field[1])):
            offered(offer)
    return b"".join((*kept, text[end:])) if end else text


def _decoded(offer: bytes) -> Opaque | None:
    try:
        return OFFER.json(offer, _OPAQUE)
    except ValueError:
        return None


class OfferFilter:
    """Removes transfer parameters from one response, chunk by chunk: from whole lines of a `stream`, and from another
    response at its `end`, or while it is longer than is held."""

    def __init__(self, stream: bool, offered: Offered = lambda _: None) -> None:
        self._stream = stream
        self._offered = offered
        self._held = b""
        self._has_ended = False

    def feed(self, chunk: bytes) -> bytes:
        if self._has_ended:
            return b""
        held = self._held + chunk
        ready = held.rfind(b"\n") + 1 if self._stream else 0
        if len(held) - ready > MAX_HELD_BYTES:
            held, ready = self._long(held)
        self._held = held[ready:]
        return without_offers(held[:ready], self._offered)

    def _long(self, held: bytes) -> tuple[bytes, int]:
        """What is held without complete parameters, and how much of it surely has none."""
        held = without_offers(held, self._offered)
        begun = _BEGUN.search(held)
        ready = max((begun.start() if begun else len(held)) - _LAST_BYTES, 0)
        self._has_ended |= len(held) - ready > OFFER.max_bytes + _LAST_BYTES
        return (held[:ready], ready) if self._has_ended else (held, ready)

    def end(self) -> bytes:
        rest, self._held = self._held, b""
        return without_offers(rest, self._offered)
