"""What has this router sent where and not seen finished?

The single owner of in-flight counts. A lease is booked synchronously after a decision, before anything is awaited, so
that two requests in the same tick see each other; it is released whatever happens. This file reads no clock and no pod
state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from router.types import InFlight, Lease, Pod, PodId

_NOTHING = InFlight()


class Ledger:
    """Leases by pod, with running totals."""

    def __init__(self) -> None:
        self._totals: dict[PodId, InFlight] = {}
        self._prefilling: set[int] = set()
        self._open: set[int] = set()
        self._next_id = 0

    def book(self, pod: Pod, prompt_tokens: int, cached_tokens: int) -> Lease:
        """Book a place for a prompt of which `cached_tokens` are expected to be cached there."""
        self._next_id += 1
        lease = Lease(
            id=self._next_id,
            pod=pod.id,
            prefill_tokens=prompt_tokens - cached_tokens,
            prefill_ms=pod.speed.prefill_ms(prompt_tokens, cached_tokens),
            context_tokens=prompt_tokens,
        )
        self._open.add(lease.id)
        self._prefilling.add(lease.id)
        self._add(lease, requests=1, prefills=1)
        return lease

    def first_token(self, lease: Lease) -> None:
        """Its prefill is done and no longer stands before others. Once; later calls change nothing."""
        if lease.id in self._prefilling:
            self._prefilling.discard(lease.id)
            self._add(lease, requests=0, prefills=-1)

    def release(self, lease: Lease) -> None:
        """Give the place back. Once; later calls change nothing."""
        if lease.id in self._open:
            self.first_token(lease)
            self._open.discard(lease.id)
            self._add(lease, requests=-1, prefills=0)

    def inflight(self) -> Mapping[PodId, InFlight]:
        """What is in flight now, as a copy that does not change later. O(pods with leases)."""
        return dict(self._totals)

    def _add(self, lease: Lease, *, requests: int, prefills: int) -> None:
        now = self._totals.get(lease.pod, _NOTHING)
        after = InFlight(
            requests=now.requests + requests,
            prefill_requests=now.prefill_requests + prefills,
            prefill_tokens=now.prefill_tokens + prefills * lease.prefill_tokens,
            prefill_ms=now.prefill_ms + prefills * lease.prefill_ms,
            context_tokens=now.context_tokens + requests * lease.context_tokens,
        )
        if not after.requests:
            self._totals.pop(lease.pod, None)
        elif not after.prefill_requests:  # sums of floats drift; nothing left to prefill is exactly zero
            self._totals[lease.pod] = replace(after, prefill_ms=0.0)
        else:
            self._totals[lease.pod] = after
