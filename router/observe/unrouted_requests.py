"""Counts and logs the requests that end before they are routed: refused, invalid, or left by their client."""

from __future__ import annotations

import time

from router.errors import shortened
from router.observe.log import RequestLine, RequestLog
from router.observe.metrics import Metrics
from router.observe.receipts import CLIENT_GONE
from router.observe.tracing import EndedRequest, RequestTrace
from router.observe.used_tokens import UsageWriter, UsedTokens

MAX_ERROR_CHARACTERS = 500


class UnroutedRequests:
    """The count and the log line of each. `usage`: of those that a tenant sent, if there is a file of usage."""

    def __init__(self, metrics: Metrics, log: RequestLog | None, usage: UsageWriter | None = None) -> None:
        self._metrics = metrics
        self._log = log
        self._usage = usage

    def ended(
        self,
        endpoint: str,
        result: str,
        *,
        model: str = "",
        request_id: str = "",
        status: int = 0,
        error: str = "",
        trace: RequestTrace | None = None,
    ) -> None:
        """Record one. `model` is its label: a configured name, else ""."""
        self._metrics.requests.labels(endpoint, model, result).inc()
        if result == CLIENT_GONE:
            self._metrics.cancellations.labels("admit").inc()
        if self._log is None and trace is None:
            return
        line = RequestLine(
            id=request_id or None,
            trace_id="" if trace is None else trace.trace_id,
            endpoint=endpoint,
            model=model or None,
            status=status or None,
            result=result,
            error=shortened(error, MAX_ERROR_CHARACTERS) or None,
        )
        if trace is not None and trace.sink is not None:
            trace.sink.add(EndedRequest(trace, line))
        if self._log is not None:
            self._log.log(line)

    def bill(
        self, tenant: str, endpoint: str, result: str, request_id: str = "", status: int = 0, model: str = ""
    ) -> None:
        """Write the line of usage of one that this tenant sent and that used nothing; none without a tenant."""
        if not tenant or self._usage is None:
            return
        self._usage.write(
            UsedTokens(
                request_id=request_id,
                at_s=time.time(),
                tenant=tenant,
                model=model,
                endpoint=endpoint,
                status=status,
                result=result,
                prompt_tokens=0,
                cached_tokens=0,
                computed_tokens=0,
                output_tokens=0,
            )
        )
