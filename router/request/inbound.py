"""A client's request without its body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeAlias

import msgspec

from router.phases import Phases

HeaderList: TypeAlias = list[tuple[bytes, bytes]]
EVENT_STREAM, JSON = b"text/event-stream", b"application/json"
"""Media types of bodies that the router reads."""


class IncomingResponse(Protocol):
    status: int
    headers: HeaderList

    async def read(self) -> bytes:
        """All bytes of the body since the last call; b"" at the end. Raises `UpstreamError`."""

    def close(self) -> None:
        """Stop reading. Idempotent."""


class Trace(Protocol):
    """The trace that a request belongs to; `observe/tracing.py` has it."""

    trace_id: str
    parent_id: str
    phases: Phases | None

    @property
    def is_recorded(self) -> bool:
        """Whether spans are made of the request."""

    def context(self, span_id: str = "") -> tuple[bytes, bytes]:
        """The header that names a span, the request's own by default, as the parent."""

    def upstream(self, headers: HeaderList, pod: str, address: str, part: str) -> HeaderList:
        """The headers of a request to a pod at `address`, with the context of this trace. `part`: "prefill" or "decode"
        where two pods serve the request, else ""."""

    def prefill_ended(self) -> None:
        """The response to the last prefill request is complete."""


class Head(msgspec.Struct, frozen=True, gc=False):
    """A client's request without its body. A front builds it once; it is admitted, forwarded and logged by it."""

    id: str
    method: str
    target: bytes
    """Path and query, raw."""
    headers: HeaderList
    path: str = ""
    """As sent, without the query."""
    named: Mapping[bytes, bytes] = {}
    """The first header of each name."""
    methods: frozenset[str] = frozenset()
    """Those of its path; empty if no pod, but the listener's own application answers."""
    fault: str = ""
    """Why its path or a header is refused."""
    peer: str = ""
    """The client's address."""
    network: str = ""
    """Its network; empty if only a proxy is known."""
    given_id: str = ""
    """The client's own request id, cut, where it was replaced: for the log only."""
    trace: Trace | None = None
    """With `tracing.enabled`."""
    pods_allowed: frozenset[str] | None = None
    """Addresses of the pods among which a gateway lets choose; None for all."""

    @property
    def needs_key(self) -> bool:
        """Whether only tenants may send it."""
        return bool(self.methods) or self.path.startswith("/v1/")


def media_type(named: Mapping[bytes, bytes]) -> bytes:
    """That of a body with these headers, without parameters."""
    return named.get(b"content-type", b"").partition(b";")[0].strip().lower()


def first_values(headers: HeaderList) -> Mapping[bytes, bytes]:
    return dict(reversed(headers))
