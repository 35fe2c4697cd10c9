"""Events of whole messages."""

from __future__ import annotations

from router.index.events import decode_events
from router.types import KvEvent


def decode_batch(payload: bytes) -> tuple[KvEvent, ...]:
    """Those that can be indexed."""
    return tuple(event for event in decode_events(payload) if event is not None)
