"""Which trace does a request belong to, and is it recorded?

W3C Trace Context: `traceparent` and `tracestate` of clients are continued at the pods, by each request that is sent to
one. Spans are built from the facts of a request after it has ended, in `spans.py`; this module imports no SDK.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from random import getrandbits
from time import monotonic
from typing import Protocol

import msgspec

from router.addresses import split_url
from router.observe.ended import Ended
from router.phases import Phases
from router.types import PodId, PromptPrefix

# Versions above 00 may append fields; ff and ids of zeros are invalid (W3C Trace Context, 3.2.2).
_TRACEPARENT = re.compile(
    rb"(?!ff)([0-9a-f]{2})-((?!0{32})[0-9a-f]{32})-((?!0{16})[0-9a-f]{16})-([0-9a-f]{2})((?:-.*)?)"
)
_SAMPLED = 1
_TRACE_HEADERS = frozenset({b"traceparent", b"tracestate"})
Header = tuple[bytes, bytes]


class Leg(msgspec.Struct, eq=False):
    """One request to a pod at `address`, as sent; times of `monotonic`. `part` is "prefill" or "decode" if two pods
    serve the client's request, else ""."""

    pod: PodId
    address: str
    part: str
    span_id: str
    began_s: float
    ended_s: float | None = None
    """Only for a prefill, which ends before the client's response."""


GRPC_PORT = 4317


def collector_hint(endpoint: str) -> str:
    """What to do where a collector at this URL does not accept spans."""
    if split_url(endpoint).port == GRPC_PORT:
        return f"{GRPC_PORT} is its port of gRPC, and spans are sent by HTTP: name that port, usually 4318"
    return "check tracing.endpoint, and that it receives OTLP over HTTP there"


class SpanSink(Protocol):
    """Where recorded requests go."""

    endpoint: str

    def add(self, trace: RequestTrace, ended: Ended) -> None:
        """Export the spans of a request later; does not wait."""

    async def close(self) -> None:
        """Export what is left, for a few seconds at most."""


class RequestTrace(msgspec.Struct, eq=False):
    """One request's trace; ids are lower-case hex. `sink`: None if not recorded; `span_id` is the client's then."""

    trace_id: str
    span_id: str
    parent_id: str = ""
    sink: SpanSink | None = None
    phases: Phases | None = None
    legs: list[Leg] = []

    @property
    def is_recorded(self) -> bool:
        return self.sink is not None

    def context(self, span_id: str = "") -> Header:
        """The header that names a span, the request's own by default, as the parent."""
        flags = "00" if self.sink is None else "01"
        return b"traceparent", f"00-{self.trace_id}-{span_id or self.span_id}-{flags}".encode()

    def upstream(self, headers: list[Header], pod: PodId, address: str, part: str) -> list[Header]:
        """Headers to a pod with the context of this trace. A `tracestate` without a valid `traceparent` is dropped."""
        span_id = ""
        if self.sink is not None:
            span_id = new_span_id()
            self.legs.append(Leg(pod, address, part, span_id, monotonic()))
        if self.parent_id:
            kept = [header for header in headers if header[0] != b"traceparent"]
        else:
            kept = [header for header in headers if header[0] not in _TRACE_HEADERS]
        kept.append(self.context(span_id))
        return kept

    def prefill_ended(self) -> None:
        """The response to the last prefill request is complete."""
        for leg in reversed(self.legs):
            if leg.part == "prefill":
                leg.ended_s = monotonic()
                return


class Tracing:
    """Begins the trace of each request. A client's sampled flag is followed; of requests without a valid `traceparent`,
    `sample_share` are recorded. At most `max_per_s` are recorded in a second, because clients can set the flag."""

    def __init__(self, sink: SpanSink, *, sample_share: float, max_per_s: int) -> None:
        self.sink = sink
        self._bound = int(sample_share * 2**64)
        self._max_per_s = max_per_s
        self._second = 0
        self._recorded = 0

    def begin(self, headers: list[Header], named: Mapping[bytes, bytes]) -> RequestTrace:
        """The trace of a request with these headers; `named`: the first of each name."""
        if (given := named.get(b"traceparent")) is not None and (parent := _parent(headers, given)):
            trace_id, parent_id, is_sampled = parent
            if is_sampled and self._may_record():
                return RequestTrace(trace_id, new_span_id(), parent_id, self.sink)
            return RequestTrace(trace_id, parent_id, parent_id)
        number = getrandbits(128)
        # The low half, as OpenTelemetry's TraceIdRatioBased.
        sink = self.sink if number & 0xFFFF_FFFF_FFFF_FFFF < self._bound and self._may_record() else None
        return RequestTrace(f"{number or 1:032x}", new_span_id(), "", sink)

    def _may_record(self) -> bool:
        second = int(monotonic())
        if second != self._second:
            self._second, self._recorded = second, 0
        self._recorded += 1
        return self._recorded <= self._max_per_s


def _parent(headers: list[Header], given: bytes) -> tuple[str, str, bool] | None:
    """(trace id, span id, sampled) of a `traceparent`; None if it is invalid or there are several."""
    found = _TRACEPARENT.fullmatch(given)
    if found is None or sum(name == b"traceparent" for name, _ in headers) > 1:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if more and version == b"00":
        return None
    return trace_id.decode(), span_id.decode(), bool(int(flags, 16) & _SAMPLED)


def new_span_id() -> str:
    return f"{getrandbits(64) or 1:016x}"


def trace_ended(ended: Ended, _prompt: PromptPrefix | None = None) -> None:
    """Export the spans of a request, if it is recorded."""
    trace = ended.trace
    if isinstance(trace, RequestTrace) and trace.sink is not None:
        trace.sink.add(trace, ended)
