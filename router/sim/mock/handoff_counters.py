"""What does an engine count of its handoffs?

KV that silently was the wrong one counts nowhere, as in the engines. This file never decides what counts.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class HandoffCounters:
    """Of one life of an engine."""

    receiving: int = 0
    """Requests that wait for their KV at this moment."""
    failed: int = 0
    """Decode legs that did not get their KV."""
    expired: int = 0
    """Prefill legs whose KV nobody came for."""
