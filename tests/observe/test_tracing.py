"""Which trace a request belongs to, whether it is recorded, and what pods and clients learn of it."""

from __future__ import annotations

import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased

from router.config.schema import TracingConfig
from router.errors import ConfigError
from router.observe.ended import Ended
from router.observe.tracing import Header, RequestTrace, Tracing
from router.wiring.router import build_tracing

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01".encode()
UNSAMPLED = f"00-{TRACE}-{SPAN}-00".encode()
STATE = (b"tracestate", b"congo=t61rcWkgMzE,rojo=00f067aa0ba902b7")
SHAPE = re.compile(rb"00-[0-9a-f]{32}-[0-9a-f]{16}-0[01]")
HOSTILE = [
    b"",
    b"00-1",
    PARENT.upper(),
    PARENT + b"\n",
    PARENT + b"-more",
    b" " + PARENT,
    b"ff" + PARENT[2:],
    b"0" + PARENT,
    f"00-{'0' * 32}-{SPAN}-01".encode(),
    f"00-{TRACE}-{'0' * 16}-01".encode(),
    f"00-{TRACE}-{SPAN}-1".encode(),
    f"00-{TRACE}-{SPAN}-0g".encode(),
    f"01-{TRACE}-{SPAN}-01more".encode(),
    b"00-" + b"\xff" * 32 + b"-00f067aa0ba902b7-01",
    b"9" * 60_000,
]


class Kept:
    """A sink that keeps what it is given."""

    endpoint = "http://collector:4318"

    def __init__(self) -> None:
        self.ended: list[Ended] = []

    def add(self, trace: RequestTrace, ended: Ended) -> None:
        self.ended.append(ended)

    async def close(self) -> None:
        pass


def begun(headers: list[Header], *, share: float = 0.0, max_per_s: int = 10_000) -> RequestTrace:
    return Tracing(Kept(), sample_share=share, max_per_s=max_per_s).begin(headers, dict(reversed(headers)))


def sent(trace: RequestTrace, headers: list[Header]) -> list[Header]:
    """The trace headers that a pod receives."""
    return [header for header in trace.upstream(headers, "a", "a:80", "") if header[0].startswith(b"trace")]


@pytest.mark.parametrize(("parent", "is_recorded"), [(PARENT, True), (UNSAMPLED, False), (PARENT[:-1] + b"3", True)])
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_flag_of_the_client_decides(parent: bytes, is_recorded: bool, share: float) -> None:
    """For any share of the other requests."""
    trace = begun([(b"traceparent", parent)], share=share)
    assert (trace.trace_id, trace.parent_id, trace.sink is not None) == (TRACE, SPAN, is_recorded)


def test_a_recorded_request_is_the_parent_of_its_requests_to_pods() -> None:
    """Each has an id of its own; the client's tracestate is passed on."""
    headers = [(b"x", b"1"), (b"traceparent", PARENT), STATE]
    trace = begun(headers)
    first, second = sent(trace, headers), sent(trace, headers)
    ids = [leg.span_id for leg in trace.legs]
    assert len({SPAN, trace.span_id, *ids}) == 4
    for found, span_id in ((first, ids[0]), (second, ids[1])):
        assert sorted(found) == sorted([STATE, (b"traceparent", f"00-{TRACE}-{span_id}-01".encode())])


def test_the_context_of_a_request_that_is_not_recorded_is_passed_on() -> None:
    """As it came: its parent is the client's span."""
    headers = [(b"traceparent", UNSAMPLED), STATE]
    trace = begun(headers, share=1.0)
    assert sorted(sent(trace, headers)) == sorted(headers)
    assert trace.context() == (b"traceparent", UNSAMPLED)
    assert not trace.legs


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_request_without_a_context_begins_a_trace(share: float) -> None:
    """Pods receive its flag, so that they do not sample it again."""
    trace = begun([], share=share)
    [(_, value)] = sent(trace, [])
    assert SHAPE.fullmatch(value) and value.startswith(f"00-{trace.trace_id}-".encode())
    assert value.endswith(b"-01") is (share == 1.0)
    assert begun([]).trace_id != trace.trace_id


@pytest.mark.parametrize("hostile", HOSTILE)
def test_an_invalid_context_begins_a_trace(hostile: bytes) -> None:
    """W3C Trace Context, 3.2.2.5 and 3.3: neither header reaches a pod."""
    headers = [(b"traceparent", hostile), STATE]
    trace = begun(headers)
    [(name, value)] = sent(trace, headers)
    assert name == b"traceparent" and SHAPE.fullmatch(value) and TRACE.encode() not in value
    assert not trace.parent_id


def test_several_contexts_begin_a_trace() -> None:
    """A proxy could have added the second one; which is right is unknown."""
    headers = [(b"traceparent", PARENT), (b"traceparent", UNSAMPLED)]
    trace = begun(headers)
    assert not trace.parent_id
    assert len(sent(trace, headers)) == 1


def test_a_later_version_is_read_as_the_first() -> None:
    """W3C Trace Context, 3.2.4: its known part is valid, and the router sends version 00."""
    headers = [(b"traceparent", b"cc" + PARENT[2:] + b"-what-the-future-brings")]
    trace = begun(headers)
    assert (trace.trace_id, trace.parent_id) == (TRACE, SPAN)
    assert SHAPE.fullmatch(sent(trace, headers)[0][1])


@given(st.binary(max_size=80))
def test_pods_receive_a_valid_context_whatever_a_client_sends(value: bytes) -> None:
    headers = [(b"traceparent", value)]
    [(_, found)] = sent(begun(headers, share=0.5), headers)
    assert SHAPE.fullmatch(found)


@pytest.mark.parametrize("share", [0.01, 0.3])
def test_the_sample_is_that_of_opentelemetry(share: float) -> None:
    """Another service with the same share samples the same traces."""
    sampler = TraceIdRatioBased(share)
    for _ in range(2000):
        trace = begun([], share=share)
        decision = sampler.should_sample(None, int(trace.trace_id, 16), "x").decision
        assert (trace.sink is not None) is (decision is Decision.RECORD_AND_SAMPLE)


def test_clients_cannot_have_more_recorded_than_the_limit() -> None:
    """The others continue their trace with a cleared flag."""
    tracing, headers = Tracing(Kept(), sample_share=0.0, max_per_s=5), [(b"traceparent", PARENT)]
    traces = [tracing.begin(headers, dict(headers)) for _ in range(100)]
    recorded = [trace for trace in traces if trace.sink is not None]
    assert 5 <= len(recorded) <= 10  # a second may have ended
    refused = next(trace for trace in traces if trace.sink is None)
    assert sent(refused, headers) == [(b"traceparent", UNSAMPLED)]


# --- the extra ---


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "router.observe.spans", None)
    with pytest.raises(ConfigError, match=r"`pip install '\.\[otel\]'` in the clone"):
        build_tracing(TracingConfig(enabled=True))


def test_a_wrong_variable_of_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "1")
    with pytest.raises(ConfigError, match="OTEL_"):
        build_tracing(TracingConfig(enabled=True))
