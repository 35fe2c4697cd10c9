"""Error bodies and headers of the router's errors.

The error object is that of the API that was called.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

import msgspec

from router.endpoints import conventions_of
from router.errors import (
    ClientError,
    HeadersTooLarge,
    QuotaExceeded,
    RequestTimeout,
    RouterError,
    code_of,
    shortened,
    status_of,
)
from router.request.inbound import HeaderList

if TYPE_CHECKING:
    from router.config.schema import Limits

MAX_MESSAGE_CHARACTERS = 1000
"""A longer message is shortened: it repeats what the client sent."""


def error_headers(error: BaseException, body: bytes) -> HeaderList:
    """Also when to send the request again, for the SDKs of OpenAI and Anthropic, which try again by themselves."""
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if isinstance(error, RouterError):
        headers += error.headers
    if isinstance(error, RouterError) and (after_s := error.retry_after_s) is not None:
        headers += (b"retry-after", b"%d" % ceil(after_s)), (b"retry-after-ms", b"%d" % ceil(after_s * 1000))
    return headers


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
    status, message, kind = status_of(error), "Internal error of the router; see its log.", RouterError.openai_type
    if status != RouterError.http_status and isinstance(error, RouterError):
        message = str(error) if names_pods else error.without_pods or str(error)
        kind = "tokens" if isinstance(error, QuotaExceeded) and error.is_tokens else error.openai_type
    param = error.param if isinstance(error, ClientError) else None
    return _fields(message, conventions_of(path).error_kind(status, kind), param, code_of(error))


def _fields(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, str | None]:
    return {"message": shortened(message, MAX_MESSAGE_CHARACTERS), "type": kind, "param": param, "code": code}


def headers_too_large(limits: Limits) -> HeadersTooLarge:
    return HeadersTooLarge(f"The headers are larger than {limits.max_header_bytes} bytes (limits.max_header_bytes).")


def too_many_headers(limits: Limits) -> HeadersTooLarge:
    return HeadersTooLarge(f"The request has more than {limits.max_headers} headers (limits.max_headers).")


def late_request(limits: Limits) -> RequestTimeout:
    why = f"in {limits.request_timeout_s:g} s (limits.request_timeout_s)"
    return RequestTimeout(f"The request is incomplete: neither its end nor another MiB of its body came {why}.")
