"""The spans of a request, and their export over OTLP.

One span for the request, one for each of its phases, and one for each request to a pod; their attributes follow
OpenTelemetry's conventions for generative AI. They are built once, after the request has ended. No attribute has a
prompt, a response or another text of a client. Imported only if tracing is on: the SDK is in the extra `otel`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise

import structlog
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from router import __version__
from router.addresses import split_url
from router.decision import Split
from router.endpoints import endpoint_of
from router.observe.ended import CLIENT_GONE, Ended
from router.observe.tracing import Leg, RequestTrace, collector_hint, new_span_id
from router.types import PodId

BATCH_SPANS = 64
"""Encoding a batch holds the interpreter for about a millisecond."""
CLOSE_S = 2.0
"""The longest time that the last spans may take when the router stops."""
_SCOPE = InstrumentationScope("warmroute", __version__)
_ERROR = Status(StatusCode.ERROR)
_UNSET = Status(StatusCode.UNSET)
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_SDK_LOGGERS = (
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.sdk._shared_internal",
)

Attributes = dict[str, str | int | float | bool]

log = structlog.get_logger()


def spans_of(trace: RequestTrace, ended: Ended, resource: Resource) -> Iterator[ReadableSpan]:
    """The spans of one request, its own last."""
    builder = _Spans(trace, ended, resource)
    yield from builder.phases()
    yield from builder.legs()
    yield builder.request()


class _Spans:
    def __init__(self, trace: RequestTrace, ended: Ended, resource: Resource) -> None:
        self._trace, self._ended = trace, ended
        self._failures = [(failure.pod, failure.error) for failure in ended.failures]
        self._resource = resource
        self._now_s, self._now_ns = time.monotonic(), time.time_ns()
        self._phases = trace.phases.intervals(self._now_s) if trace.phases else []
        self._own = self._context(trace.span_id)
        endpoint = str(ended.endpoint)
        operation = endpoint_of(endpoint).api.operation
        self._name = f"{operation} {ended.model}".rstrip() if operation else endpoint
        self._shared = _present(
            {
                "gen_ai.operation.name": operation or None,
                "gen_ai.request.model": ended.name or ended.model or None,
                "gen_ai.response.model": ended.model if ended.name else None,
            }
        )

    def request(self) -> ReadableSpan:
        """From arrival to the last byte of the response."""
        trace, ended, status = self._trace, self._ended, self._ended.status
        served, is_refused = ended.served, 400 <= status < 500
        attributes = self._shared | _present(
            {
                "http.response.status_code": status or None,
                "warmroute.request_id": ended.id or None,
                "warmroute.pod": served.pod.id if served else None,
                "warmroute.prefill_pod": served.plan.prefill.id if served and isinstance(served.plan, Split) else None,
                "warmroute.policy": ended.policy or None,
                "warmroute.workload": ended.workload or None,
                "warmroute.tries": ended.tries if ended.tries > 1 else None,
                "warmroute.result": ended.result,
                "error.type": None if is_refused or ended.result in ("ok", CLIENT_GONE) else ended.result,
                "gen_ai.usage.input_tokens": ended.prompt_tokens or None,
                "gen_ai.usage.output_tokens": ended.output_tokens,
                "gen_ai.usage.cache_read.input_tokens": ended.cached_tokens,
                "gen_ai.response.time_to_first_chunk": None if ended.ttft_ms is None else ended.ttft_ms / 1000,
            }
        )
        parent = self._context(trace.parent_id, is_remote=True) if trace.parent_id else None
        began_s = self._phases[0][1] if self._phases else self._now_s
        return self._span(self._name, self._own, parent, (began_s, self._now_s), attributes, SpanKind.SERVER)

    def phases(self) -> Iterator[ReadableSpan]:
        """One for each time that a phase was entered. A failed attempt has the error and its pod."""
        failures = iter(self._failures)
        for phase, *times_s in self._phases:
            pod, error = next(failures, ("", "")) if phase == "attempt" else ("", "")
            attributes = _present({"warmroute.pod": pod or None, "error.type": error or None})
            began_s, ended_s = times_s
            yield self._span(phase, self._context(new_span_id()), self._own, (began_s, ended_s), attributes)

    def legs(self) -> Iterator[ReadableSpan]:
        """One for each request to a pod. It ends with its attempt, as a prefill before that."""
        failures = self._failures
        attempts = [began_s for phase, began_s, _ in self._phases if phase == "attempt"]
        for number, (began_s, end_s) in enumerate(pairwise([*attempts, self._phases[-1][1]] if attempts else [])):
            pod, error = failures[number] if number < len(failures) else ("", "")
            tried = [leg for leg in self._trace.legs if began_s <= leg.began_s < end_s]
            failed = next((leg for leg in tried if leg.pod == pod), tried[-1]) if tried and error else None
            for leg in tried:
                yield self._leg(leg, end_s, error if leg is failed else "")

    def _leg(self, leg: Leg, end_s: float, error: str) -> ReadableSpan:
        server = split_url(f"//{leg.address}")
        attributes = self._shared | _present(
            {
                "gen_ai.provider.name": self._engines().get(leg.pod),
                "server.address": server.hostname,
                "server.port": server.port,
                "warmroute.pod": leg.pod,
                "error.type": error or None,
            }
        )
        times_s = (leg.began_s, leg.ended_s or end_s)
        name = f"{leg.part} {self._name}".lstrip()
        return self._span(name, self._context(leg.span_id), self._own, times_s, attributes, SpanKind.CLIENT)

    def _engines(self) -> Mapping[PodId, str]:
        """The engines of the pods that were tried last."""
        served = self._ended.served
        if served is None:
            return {}
        plan = served.plan
        pods = (plan.prefill, plan.decode) if isinstance(plan, Split) else (plan.pod,)
        return {pod.id: pod.engine for pod in pods}

    def _context(self, span_id: str, *, is_remote: bool = False) -> SpanContext:
        return SpanContext(int(self._trace.trace_id, 16), int(span_id, 16), is_remote, _SAMPLED)

    def _span(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        times_s: tuple[float, float],
        attributes: Attributes,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> ReadableSpan:
        began_ns, ended_ns = (self._now_ns - int((self._now_s - at_s) * 1e9) for at_s in times_s)
        return ReadableSpan(
            name,
            context,
            parent,
            self._resource,
            attributes,
            kind=kind,
            status=_ERROR if "error.type" in attributes else _UNSET,
            start_time=began_ns,
            end_time=ended_ns,
            instrumentation_scope=_SCOPE,
        )


def _present(attributes: Mapping[str, str | int | float | bool | None]) -> Attributes:
    return {name: value for name, value in attributes.items() if value is not None}


class SpanExport:
    """Exports spans in batches, in a thread. Its queue is bounded: a slow or dead collector costs the oldest spans.

    `endpoint`: the collector's base URL; without one, the SDK's environment variables apply. They also set headers,
    certificates, compression, timeout (`OTEL_EXPORTER_OTLP_*`), resource (`OTEL_RESOURCE_ATTRIBUTES`,
    `OTEL_SERVICE_NAME`), queue and delay (`OTEL_BSP_*`). Raises `ValueError` for invalid ones."""

    def __init__(self, endpoint: str | None) -> None:
        self._exporter = _Exporter(f"{endpoint}/v1/traces" if endpoint else None)
        self.endpoint = self._exporter._endpoint
        self._processor = BatchSpanProcessor(self._exporter, max_export_batch_size=BATCH_SPANS)
        defaults = {"service.name": "warmroute", "service.version": __version__}
        self._resource = Resource.create(defaults).merge(OTELResourceDetector().detect())

    def add(self, trace: RequestTrace, ended: Ended) -> None:
        for span in spans_of(trace, ended, self._resource):
            self._processor.on_end(span)

    async def close(self) -> None:
        """Export what is queued, for at most `CLOSE_S`."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def shut_down() -> None:
            self._processor.shutdown()  # type: ignore[no-untyped-call]
            self._exporter.unfilter()
            with suppress(RuntimeError):  # the loop is closed by now
                loop.call_soon_threadsafe(done.set)

        threading.Thread(target=shut_down, daemon=True).start()
        try:
            await asyncio.wait_for(done.wait(), CLOSE_S)
        except TimeoutError:
            self._exporter.shutdown()


class _Exporter(OTLPSpanExporter):
    """Logs the first failure and the first success after it; the SDK's own lines only of the first failure."""

    def __init__(self, endpoint: str | None) -> None:
        super().__init__(endpoint)
        self._is_failing = False
        self._lost = 0
        for name in _SDK_LOGGERS:
            logging.getLogger(name).addFilter(self._is_new)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = super().export(spans)
        if result is not SpanExportResult.SUCCESS:
            self._lost += len(spans)
            if not self._is_failing:
                hint = collector_hint(self._endpoint)
                log.warning("traces cannot be exported", endpoint=self._endpoint, hint=hint)
            self._is_failing = True
        elif self._is_failing:
            log.info("traces are exported again", lost_spans=self._lost)
            self._is_failing, self._lost = False, 0
        return result

    def shutdown(self) -> None:
        super().shutdown()  # type: ignore[no-untyped-call]

    def unfilter(self) -> None:
        for name in _SDK_LOGGERS:
            logging.getLogger(name).removeFilter(self._is_new)

    def _is_new(self, _record: logging.LogRecord) -> bool:
        return not self._is_failing
