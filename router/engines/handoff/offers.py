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
"""A longer response without lines is sent, except for its last bytes, in which parameters may be incomplete."""
OFFER = Bound("offered transfer parameters", 64 * 1024, 4000, b":")
_KEY = b'"kv_transfer_params"'
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

    def feed(self, chunk: bytes) -> bytes:
        held = self._held + chunk
        ready = held.rfind(b"\n") + 1 if self._stream else 0
        if len(held) - ready > MAX_HELD_BYTES:
            held = without_offers(held, self._offered)
            ready = max(len(held) - OFFER.max_bytes, 0)
        self._held = held[ready:]
        return without_offers(held[:ready], self._offered)

    def end(self) -> bytes:
        rest, self._held = self._held, b""
        return without_offers(rest, self._offered)
