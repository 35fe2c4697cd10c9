"""All errors that the router raises on purpose, by source: the client, the fleet, one pod, or the configuration.

Each class has its HTTP status; `request/error_responses.py` makes responses of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import ClassVar

import msgspec

INTERNAL = "internal_error"
"""Code of an error that is not a `RouterError`."""
_CHALLENGE = (b"www-authenticate", b"Bearer")
_NO_RETRY = (b"x-should-retry", b"false")
"""The SDKs of OpenAI and Anthropic then do not send the request again by themselves."""


def shortened(text: str, max_characters: int) -> str:
    """The text, or its beginning and end if it is longer: messages may contain what a client or a pod sent."""
    half = max_characters // 2
    return text if len(text) <= max_characters else f"{text[:half]} ... {text[-half:]}"


class RouterError(Exception):
    """Root of all errors that the router raises on purpose."""

    code: ClassVar[str] = INTERNAL
    """Its name in responses, metrics, logs and receipts."""
    http_status: ClassVar[int] = 500
    openai_type: ClassVar[str] = INTERNAL
    """`error.type` in OpenAI's API."""
    without_pods: str = ""
    """The message for clients that may not know pods; "" if no message of this class names one."""
    retry_after_s: float | None = None
    headers: Sequence[tuple[bytes, bytes]] = ()
    """What RFC 9110 15.5 demands of a response with its status, and `x-should-retry`."""


class ClientError(RouterError):
    """The request is at fault; it is never retried. `param` names the field in the OpenAI error body."""

    code, http_status, openai_type = "invalid_request", 400, "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class MalformedRequest(ClientError):
    code = "malformed_request"


DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoders of msgspec raise."""
_JSON_REASON = re.compile(r"JSON is malformed: (.*) \(byte (\d+)\)")
_HALF = "half of a surrogate pair (\\ud800 to \\udfff), which is no character,"
_JSON_MISTAKES = {
    **dict.fromkeys(("hex escape", "surrogate"), _HALF),
    "escape": "a backslash without a valid escape after it",
    "keys must be": "a name without double quotes",
    "trailing comma": "a comma after the last entry",
    "expected": "a missing colon, comma or quotation mark",
}
"""What is wrong, by a part of msgspec's reason."""


def not_json(error: Exception, body: bytes = b"", param: str | None = None) -> MalformedRequest:
    """What is wrong with a body, or with this field of it, that raised one of `DECODE_ERRORS`."""
    end = body[-64:].rstrip()
    if RecursionError in (type(error), type(error.__cause__)):
        why = "it is nested too deeply"
    elif isinstance(error, UnicodeDecodeError):
        why = "it is not UTF-8 text"
    elif isinstance(error, msgspec.ValidationError):
        problem = str(error).partition(" - at ")[0]
        why = "it must be an object" if problem.startswith("Expected") else f"it {problem}"
    elif found := _JSON_REASON.fullmatch(str(error)):
        mistakes = (ours for part, ours in _JSON_MISTAKES.items() if part in found[1])
        why = f"{next(mistakes, 'a character that cannot be there')} at byte {found[2]}"
    elif not end:
        why = "it is empty"
    else:  # msgspec reads six bytes for each half of a pair
        why = f"{_HALF} near its end" if end.endswith(b"}") and b"\\u" in end else "it ends before its last bracket"
    where = f"`{param}`" if param else "The request body"
    return MalformedRequest(f"{where} is not valid JSON: {why}.", param=param)


class ContextTooLong(ClientError):
    """The prompt is longer than every pod's `max_model_len`."""

    code = "context_length_exceeded"


class NotAuthenticated(ClientError):
    """The bearer token of the admin listener is missing or wrong."""

    code, http_status, openai_type = "invalid_bearer_token", 401, "authentication_error"
    headers = (_CHALLENGE,)


class InvalidKey(ClientError):
    """The API key is missing, unknown or expired."""

    code, http_status = "invalid_api_key", 401
    headers = (_CHALLENGE,)


class UnknownSigningKey(ClientError):
    """A token names a key of its issuer that is not known yet. It is being fetched."""

    code, http_status = "unknown_signing_key", 401
    retry_after_s = 1.0
    headers = (_CHALLENGE, (b"x-should-retry", b"true"))  # SDKs do not send a request again after 401 by themselves


class AccessDenied(ClientError):
    """This caller may not use the admin listener, or this tenant not this path."""

    code, http_status, openai_type = "access_denied", 403, "permission_error"


class QuotaExceeded(ClientError):
    """The tenant has used what it may. `retry_after_s`: when it may use enough again; None: never. `headers`: those of
    the API that was called, with the limits."""

    code, http_status, openai_type = "rate_limit_exceeded", 429, "requests"

    def __init__(
        self,
        message: str,
        *,
        is_tokens: bool = False,
        retry_after_s: float | None = None,
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        super().__init__(message)
        self.is_tokens = is_tokens
        self.retry_after_s = retry_after_s
        self.headers = headers if retry_after_s is not None else (*headers, _NO_RETRY)


class ShareExceeded(ClientError):
    """The tenant uses its share of the pods, and the answer would be late; or its share of a limit of the router, which
    others need, too. As `Overloaded`."""

    code, http_status, openai_type = "share_exceeded", 429, "requests"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnsupportedContentType(ClientError):
    code, http_status = "unsupported_content_type", 415
    headers = ((b"accept", b"application/json"),)


class UnsupportedEncoding(ClientError):
    code, http_status = "unsupported_content_encoding", 415
    headers = ((b"accept-encoding", b"gzip, zstd"),)


class BodyTooLarge(ClientError):
    code, http_status = "body_too_large", 413


class HeadersTooLarge(ClientError):
    code, http_status = "headers_too_large", 431


class RequestTimeout(ClientError):
    code, http_status = "request_timeout", 408


class UnknownModel(ClientError):
    code, http_status = "model_not_found", 404


class UnknownEndpoint(ClientError):
    code, http_status = "unknown_url", 404


class UnknownResponse(ClientError):
    """No pod has the stored response."""

    code, http_status = "response_not_found", 404


class MethodNotAllowed(ClientError):
    """`allowed`: the methods of the path."""

    code, http_status = "method_not_allowed", 405

    def __init__(self, message: str, allowed: Iterable[str]) -> None:
        super().__init__(message)
        self.headers = ((b"allow", ", ".join(sorted(allowed)).encode()),)


class FleetError(RouterError):
    """No pod can serve the request now."""

    code, http_status, openai_type = "unavailable", 503, "service_unavailable_error"
    retry_after_s = 1.0


class NoReadyPod(FleetError):
    """Pods of this model exist, none is ready. `model` is its configured name, where no pod has reported it yet, and
    requests may wait for one; `stream`: whether this one asks for a stream."""

    code = "no_ready_pod"
    without_pods = "No pod can serve this model now; retry later."

    def __init__(self, message: str, *, model: str = "", stream: bool = False) -> None:
        super().__init__(message)
        self.model = model
        self.stream = stream


class Saturated(FleetError):
    """A limit of the router itself is reached."""

    code = "saturated"


class Overloaded(FleetError):
    """The answer would be late. `retry_after_s` later it would have been in time."""

    code = "overloaded"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Stopping(FleetError):
    """The router is shutting down, and the drain time is over."""

    code = "stopping"


class UpstreamError(RouterError):
    """A pod failed. `pod` is its id. `doubtful`: the request may be the cause, even if another pod serves it."""

    code, http_status, openai_type = "upstream_error", 502, "upstream_error"
    without_pods = "The pod failed."

    def __init__(self, message: str, *, pod: str = "", doubtful: bool = False) -> None:
        super().__init__(message)
        self.pod = pod
        self.doubtful = doubtful


class ConnectFailed(UpstreamError):
    """The connection failed: nothing was sent to the pod. `refused`: no process accepts connections there, unlike
    after a timeout. `local`: the router has no file, port or memory left for a connection to any pod."""

    code = "connect_failed"
    without_pods = "The pod cannot be reached."

    def __init__(self, message: str, *, pod: str = "", refused: bool = False, local: bool = False) -> None:
        super().__init__(message, pod=pod)
        self.refused = refused
        self.local = local


class StaleConnection(UpstreamError):
    """A reused connection died before any answer: retried once on the same pod."""

    code = "stale_connection"
    without_pods = "The pod closed the connection."


MAX_SAID_BYTES = 1024
"""How much of an error is read."""


class UpstreamBroken(UpstreamError):
    """The pod closed the connection early or sent an invalid response. `status` and `said`: of a response to the router
    itself that is not 200, and the start of its body."""

    code = "upstream_broken"
    without_pods = "The pod sent an invalid or incomplete response."

    def __init__(self, message: str, *, pod: str = "", doubtful: bool = False, status: int = 0) -> None:
        super().__init__(message, pod=pod, doubtful=doubtful)
        self.status = status
        self.said = b""


def unexpected_status(status: int, path: str, pod: str, body: bytes = b"") -> UpstreamBroken:
    """The error for a response to a GET or POST of the router itself."""
    phrase = f" {HTTPStatus(status).phrase}" if status in HTTPStatus.__members__.values() else ""
    error = UpstreamBroken(f"pod {pod}: {status}{phrase} from {path}", pod=pod, status=status)
    error.said = body[:MAX_SAID_BYTES]
    return error


class NotServed(UpstreamError):
    """The pod lacks what the request needs, such as an endpoint, and has said so at once: no failure of the pod."""

    code = "not_served"
    without_pods = "The pod does not serve this request."


class UpstreamTimeout(UpstreamError):
    """A pod has worked on the request for as long as it may; a request that is sent again is computed again."""

    code, http_status = "upstream_timeout", 504
    headers = (_NO_RETRY,)
    without_pods = "The pod did not respond in time."


class HandoffFailed(UpstreamError):
    """A pod could not continue after a handoff. `pod` is "" if no pod is at fault."""

    code = "handoff_failed"
    without_pods = "The handoff between two pods failed."


class ConfigError(RouterError):
    """A config or policy file is wrong. The message names file, line and key."""


def code_of(error: BaseException) -> str:
    return error.code if isinstance(error, RouterError) else INTERNAL


def status_of(error: BaseException) -> int:
    return error.http_status if isinstance(error, RouterError) else RouterError.http_status
