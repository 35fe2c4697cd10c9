"""Maps each of the router's errors to an HTTP status and an OpenAI error body, in one complete table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from router import errors
from router.config.schema import Limits
from router.errors import ClientError, HeadersTooLarge, RouterError, shortened
from router.proxy.headers import HeaderList

MAX_MESSAGE_CHARACTERS = 1000
"""A longer message is shortened: it repeats what the client sent."""


@dataclass(frozen=True, slots=True)
class ErrorResponse:
    """Status, `error.type` and `error.code` of OpenAI's API. `retry_after_s` becomes a Retry-After header."""

    status: int
    type: str
    code: str | None = None
    retry_after_s: int | None = None


RESPONSES: Mapping[type[RouterError], ErrorResponse] = {
    errors.ClientError: ErrorResponse(400, "invalid_request_error"),
    errors.MalformedRequest: ErrorResponse(400, "invalid_request_error"),
    errors.ContextTooLong: ErrorResponse(400, "invalid_request_error", "context_length_exceeded"),
    errors.NotAuthenticated: ErrorResponse(401, "authentication_error", "invalid_bearer_token"),
    errors.AccessDenied: ErrorResponse(403, "permission_error", "access_denied"),
    errors.UnsupportedContentType: ErrorResponse(415, "invalid_request_error", "unsupported_content_type"),
    errors.RequestTimeout: ErrorResponse(408, "invalid_request_error", "request_timeout"),
    errors.HeadersTooLarge: ErrorResponse(431, "invalid_request_error", "headers_too_large"),
    errors.BodyTooLarge: ErrorResponse(413, "invalid_request_error", "body_too_large"),
    errors.UnknownModel: ErrorResponse(404, "invalid_request_error", "model_not_found"),
    errors.UnknownEndpoint: ErrorResponse(404, "invalid_request_error", "unknown_url"),
    errors.MethodNotAllowed: ErrorResponse(405, "invalid_request_error", "method_not_allowed"),
    errors.FleetError: ErrorResponse(503, "service_unavailable_error", retry_after_s=1),
    errors.NoReadyPod: ErrorResponse(503, "service_unavailable_error", "no_ready_pod", retry_after_s=1),
    errors.Stopping: ErrorResponse(503, "service_unavailable_error", "stopping", retry_after_s=1),
    errors.Saturated: ErrorResponse(503, "service_unavailable_error", "saturated", retry_after_s=1),
    errors.UpstreamError: ErrorResponse(502, "upstream_error"),
    errors.ConnectFailed: ErrorResponse(502, "upstream_error", "connect_failed"),
    errors.StaleConnection: ErrorResponse(502, "upstream_error", "connect_failed"),
    errors.UpstreamBroken: ErrorResponse(502, "upstream_error", "upstream_broken"),
    errors.UpstreamTimeout: ErrorResponse(504, "upstream_error", "upstream_timeout"),
    errors.HandoffFailed: ErrorResponse(502, "upstream_error", "handoff_failed"),
}

INTERNAL = ErrorResponse(500, "internal_error")


def response_for(error: BaseException) -> ErrorResponse:
    """The response for an error. An unknown one is an internal error without details."""
    return RESPONSES.get(type(error), INTERNAL) if isinstance(error, RouterError) else INTERNAL


def error_headers(error: BaseException, body: bytes) -> HeaderList:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    after_s = response_for(error).retry_after_s
    return headers if after_s is None else [*headers, (b"retry-after", b"%d" % after_s)]


def error_body(error: BaseException) -> bytes:
    """The OpenAI error object."""
    response = response_for(error)
    message = "Internal error of the router; see its log." if response is INTERNAL else str(error)
    param = error.param if isinstance(error, ClientError) else None
    return error_object(message, response.type, param, response.code)


def error_object(message: str, kind: str, param: str | None = None, code: str | None = None) -> bytes:
    """The OpenAI error object with these fields."""
    fields = {"message": shortened(message, MAX_MESSAGE_CHARACTERS), "type": kind, "param": param, "code": code}
    return msgspec.json.encode({"error": fields})


def headers_too_large(limits: Limits) -> HeadersTooLarge:
    return HeadersTooLarge(f"The headers are larger than {limits.max_header_bytes} bytes (limits.max_header_bytes).")


def too_many_headers(limits: Limits) -> HeadersTooLarge:
    return HeadersTooLarge(f"The request has more than {limits.max_headers} headers (limits.max_headers).")
