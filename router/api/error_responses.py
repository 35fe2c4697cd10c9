"""Which status and which OpenAI error body does each of our errors become?

One table over the error tree; a test walks the subclasses and proves it complete. This file never decides whether
something is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from router.errors import (
    BodyTooLarge,
    ClientError,
    ConnectFailed,
    ContextTooLong,
    FleetError,
    HandoffFailed,
    HeadersTooLarge,
    MalformedRequest,
    MethodNotAllowed,
    NoReadyPod,
    RequestTimeout,
    RouterError,
    Saturated,
    StaleConnection,
    Stopping,
    UnknownEndpoint,
    UnknownModel,
    UpstreamBroken,
    UpstreamError,
    UpstreamTimeout,
)
from router.proxy.headers import HeaderList


@dataclass(frozen=True, slots=True)
class ErrorResponse:
    """Status, `error.type` and `error.code` as OpenAI's clients know them. `retry_after_s`: when to ask again."""

    status: int
    type: str
    code: str | None = None
    retry_after_s: int | None = None


RESPONSES: Mapping[type[RouterError], ErrorResponse] = {
    ClientError: ErrorResponse(400, "invalid_request_error"),
    MalformedRequest: ErrorResponse(400, "invalid_request_error"),
    ContextTooLong: ErrorResponse(400, "invalid_request_error", "context_length_exceeded"),
    RequestTimeout: ErrorResponse(408, "invalid_request_error", "request_timeout"),
    HeadersTooLarge: ErrorResponse(431, "invalid_request_error", "headers_too_large"),
    BodyTooLarge: ErrorResponse(413, "invalid_request_error", "body_too_large"),
    UnknownModel: ErrorResponse(404, "invalid_request_error", "model_not_found"),
    UnknownEndpoint: ErrorResponse(404, "invalid_request_error", "unknown_url"),
    MethodNotAllowed: ErrorResponse(405, "invalid_request_error", "method_not_allowed"),
    FleetError: ErrorResponse(503, "service_unavailable_error", retry_after_s=1),
    NoReadyPod: ErrorResponse(503, "service_unavailable_error", "no_ready_pod", retry_after_s=1),
    Stopping: ErrorResponse(503, "service_unavailable_error", "stopping", retry_after_s=1),
    Saturated: ErrorResponse(503, "service_unavailable_error", "saturated", retry_after_s=1),
    UpstreamError: ErrorResponse(502, "upstream_error"),
    ConnectFailed: ErrorResponse(502, "upstream_error", "connect_failed"),
    StaleConnection: ErrorResponse(502, "upstream_error", "connect_failed"),
    UpstreamBroken: ErrorResponse(502, "upstream_error", "upstream_broken"),
    UpstreamTimeout: ErrorResponse(504, "upstream_error", "upstream_timeout"),
    HandoffFailed: ErrorResponse(502, "upstream_error", "handoff_failed"),
}

INTERNAL = ErrorResponse(500, "internal_error")


def response_for(error: BaseException) -> ErrorResponse:
    """The shape of an error of ours; anything else is an internal error that tells the client nothing."""
    return RESPONSES.get(type(error), INTERNAL) if isinstance(error, RouterError) else INTERNAL


def error_headers(error: BaseException, body: bytes) -> HeaderList:
    """What goes before `body`, its error object."""
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    after_s = response_for(error).retry_after_s
    return headers if after_s is None else [*headers, (b"retry-after", b"%d" % after_s)]


def error_body(error: BaseException) -> bytes:
    """The OpenAI error object."""
    shape = response_for(error)
    message = "The router failed; see its log." if shape is INTERNAL else str(error)
    param = error.param if isinstance(error, ClientError) else None
    return msgspec.json.encode({"error": {"message": message, "type": shape.type, "param": param, "code": shape.code}})
