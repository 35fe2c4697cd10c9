"""Maps each of the router's errors to an HTTP status and an error body, in one complete table.

The error object is that of the API that was called.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

import msgspec

from router import errors
from router.config.schema import Limits
from router.endpoints import conventions_of
from router.errors import (
    ClientError,
    HeadersTooLarge,
    Overloaded,
    QuotaExceeded,
    RouterError,
    ShareExceeded,
    UnknownSigningKey,
    code_of,
    shortened,
)
from router.request.inbound import HeaderList

MAX_MESSAGE_CHARACTERS = 1000
"""A longer message is shortened: it repeats what the client sent."""


@dataclass(frozen=True, slots=True)
class ErrorResponse:
    """Status and `error.type` of OpenAI's API. `retry_after_s` becomes a Retry-After header."""

    status: int
    type: str
    retry_after_s: int | None = None


RESPONSES: Mapping[type[RouterError], ErrorResponse] = {
    errors.ClientError: ErrorResponse(400, "invalid_request_error"),
    errors.MalformedRequest: ErrorResponse(400, "invalid_request_error"),
    errors.ContextTooLong: ErrorResponse(400, "invalid_request_error"),
    errors.NotAuthenticated: ErrorResponse(401, "authentication_error"),
    errors.InvalidKey: ErrorResponse(401, "invalid_request_error"),
    errors.UnknownSigningKey: ErrorResponse(401, "invalid_request_error", retry_after_s=1),
    errors.AccessDenied: ErrorResponse(403, "permission_error"),
    errors.UnsupportedContentType: ErrorResponse(415, "invalid_request_error"),
    errors.QuotaExceeded: ErrorResponse(429, "requests"),
    errors.ShareExceeded: ErrorResponse(429, "requests"),
    errors.RequestTimeout: ErrorResponse(408, "invalid_request_error"),
    errors.HeadersTooLarge: ErrorResponse(431, "invalid_request_error"),
    errors.BodyTooLarge: ErrorResponse(413, "invalid_request_error"),
    errors.UnknownModel: ErrorResponse(404, "invalid_request_error"),
    errors.UnknownEndpoint: ErrorResponse(404, "invalid_request_error"),
    errors.UnknownResponse: ErrorResponse(404, "invalid_request_error"),
    errors.MethodNotAllowed: ErrorResponse(405, "invalid_request_error"),
    errors.FleetError: ErrorResponse(503, "service_unavailable_error", retry_after_s=1),
    errors.NoReadyPod: ErrorResponse(503, "service_unavailable_error", retry_after_s=1),
    errors.Stopping: ErrorResponse(503, "service_unavailable_error", retry_after_s=1),
    errors.Saturated: ErrorResponse(503, "service_unavailable_error", retry_after_s=1),
    errors.Overloaded: ErrorResponse(503, "service_unavailable_error", retry_after_s=1),
    errors.UpstreamError: ErrorResponse(502, "upstream_error"),
    errors.ConnectFailed: ErrorResponse(502, "upstream_error"),
    errors.StaleConnection: ErrorResponse(502, "upstream_error"),
    errors.UpstreamBroken: ErrorResponse(502, "upstream_error"),
    errors.UpstreamTimeout: ErrorResponse(504, "upstream_error"),
    errors.HandoffFailed: ErrorResponse(502, "upstream_error"),
}

INTERNAL = ErrorResponse(500, "internal_error")


def response_for(error: BaseException) -> ErrorResponse:
    """The response for an error. An unknown one is an internal error without details."""
    return RESPONSES.get(type(error), INTERNAL) if isinstance(error, RouterError) else INTERNAL


def error_headers(error: BaseException, body: bytes) -> HeaderList:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    response = response_for(error)
    if response.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))  # RFC 9110 15.5.2
    if isinstance(error, UnknownSigningKey):
        headers.append((b"x-should-retry", b"true"))  # the SDKs do not try again after 401 by themselves
    if isinstance(error, QuotaExceeded):
        return [*headers, *error.headers, *_retry_headers(error.retry_after_s)]
    if isinstance(error, Overloaded | ShareExceeded):
        return [*headers, *_retry_headers(error.retry_after_s)]
    after_s = response.retry_after_s
    return headers if after_s is None else [*headers, (b"retry-after", b"%d" % after_s)]


def _retry_headers(after_s: float | None) -> HeaderList:
    """When to send the request again, also for the SDKs of OpenAI and Anthropic, which try again by themselves; they
    do not if the time is None."""
    if after_s is None:
        return [(b"x-should-retry", b"false")]
    return [(b"retry-after", b"%d" % ceil(after_s)), (b"retry-after-ms", b"%d" % ceil(after_s * 1000))]


def error_body(error: BaseException, path: str = "", *, names_pods: bool = True) -> bytes:
    """The error object of the API that has this path. `names_pods`: whether the client may know pods."""
    return msgspec.json.encode(conventions_of(path).error_object(_error_fields(error, path, names_pods)))


def stream_error_body(error: BaseException, path: str = "", *, names_pods: bool = True) -> bytes:
    """The data of an event `error` on which the SDKs of OpenAI and Anthropic raise in any stream: the
    error object of both APIs, and the top-level fields of an error of OpenAI's Responses API."""
    fields = _error_fields(error, path, names_pods)
    top = {name: fields[name] for name in ("code", "message", "param")}
    return msgspec.json.encode({"type": "error", **top, "error": fields})


def error_object(message: str, kind: str) -> bytes:
    return msgspec.json.encode({"error": _fields(message, kind)})


def _error_fields(error: BaseException, path: str, names_pods: bool) -> dict[str, str | None]:
    response = response_for(error)
    message = "Internal error of the router; see its log."
    if response is not INTERNAL and isinstance(error, RouterError):
        message = str(error) if names_pods else error.without_pods or str(error)
    param = error.param if isinstance(error, ClientError) else None
    kind = "tokens" if isinstance(error, QuotaExceeded) and error.is_tokens else response.type
    return _fields(message, conventions_of(path).error_kind(response.status, kind), param, code_of(error))


def _fields(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, str | None]:
    return {"message": shortened(message, MAX_MESSAGE_CHARACTERS), "type": kind, "param": param, "code": code}


def headers_too_large(limits: Limits) -> HeadersTooLarge:
    return HeadersTooLarge(f"The headers are larger than {limits.max_header_bytes} bytes (limits.max_header_bytes).")


def too_many_headers(limits: Limits) -> HeadersTooLarge:
    return HeadersTooLarge(f"The request has more than {limits.max_headers} headers (limits.max_headers).")
