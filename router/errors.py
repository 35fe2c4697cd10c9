"""All errors that the router raises on purpose, by source.

    RouterError
    +-- ClientError                 the request is at fault; never retried
    |   +-- MalformedRequest        400  not JSON, wrong types, contradictory fields
    |   +-- ContextTooLong          400  longer than every pod's max_model_len
    |   +-- NotAuthenticated        401  the bearer token is missing or wrong
    |   +-- InvalidKey              401  the API key is missing, unknown or expired
    |   +-- UnknownSigningKey       401  the key that has signed the token is not known yet
    |   +-- AccessDenied            403  this caller may not use the admin listener, this tenant not this path
    |   +-- QuotaExceeded           429  the tenant has used what it may
    |   +-- RequestTimeout          408  not received completely in time
    |   +-- BodyTooLarge            413
    |   +-- ShareExceeded           429  the answer would be late, because its tenant uses its share
    |   +-- UnsupportedContentType  415  an admin call without a JSON content type
    |   +-- HeadersTooLarge         431
    |   +-- UnknownModel            404
    |   +-- UnknownEndpoint         404
    |   +-- UnknownResponse         404  no pod has the stored response
    |   +-- MethodNotAllowed        405
    +-- FleetError                  no pod can serve it now
    |   +-- NoReadyPod              503
    |   +-- Stopping                503  the router is shutting down and the drain time is over
    |   +-- Saturated               503  a limit of the router itself is reached
    |   +-- Overloaded              503  the answer would be late
    +-- UpstreamError               a pod failed
    |   +-- ConnectFailed           502  nothing was sent: always safe to try the next candidate
    |   +-- StaleConnection         502  a reused connection died before any answer: retried once on the same pod
    |   +-- UpstreamBroken          502  the pod aborted; retryable only before the first byte to the client
    |   +-- UpstreamTimeout         504
    |   +-- HandoffFailed           502  the KV of a split did not arrive; the next candidate works without it
    +-- ConfigError                 a config or policy file is wrong; names file, line and key

`request/error_responses.py` maps them to responses; a test proves its table complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import ClassVar

INTERNAL = "internal_error"
"""Code of an error that is not a `RouterError`."""


def shortened(text: str, max_characters: int) -> str:
    """The text, or its beginning and end if it is longer: messages may contain what a client or a pod sent."""
    half = max_characters // 2
    return text if len(text) <= max_characters else f"{text[:half]} ... {text[-half:]}"


class RouterError(Exception):
    """Root of all errors that the router raises on purpose."""

    code: ClassVar[str] = INTERNAL
    """Its name in responses, metrics, logs and receipts."""
    without_pods: ClassVar[str] = ""
    """The message for clients that may not know pods; "" if no message of this class names one."""


class ClientError(RouterError):
    """The request is at fault. `param` names the field in the OpenAI error body."""

    code = "invalid_request"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class MalformedRequest(ClientError):
    code = "malformed_request"


class ContextTooLong(ClientError):
    code = "context_length_exceeded"


class NotAuthenticated(ClientError):
    code = "invalid_bearer_token"


class InvalidKey(ClientError):
    code = "invalid_api_key"


class UnknownSigningKey(ClientError):
    """A token names a key of its issuer that is not known yet. It is being fetched."""

    code = "unknown_signing_key"


class AccessDenied(ClientError):
    code = "access_denied"


class QuotaExceeded(ClientError):
    """The tenant has used what it may. `retry_after_s`: when it may use enough again; None: never. `headers`: those of
    the API that was called, with the limits."""

    code = "rate_limit_exceeded"

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
        self.headers = headers


class ShareExceeded(ClientError):
    """The tenant uses its share of the pods, and the answer would be late; or its share of a limit of the router, which
    others need, too. As `Overloaded`."""

    code = "share_exceeded"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnsupportedContentType(ClientError):
    code = "unsupported_content_type"


class BodyTooLarge(ClientError):
    code = "body_too_large"


class HeadersTooLarge(ClientError):
    code = "headers_too_large"


class RequestTimeout(ClientError):
    code = "request_timeout"


class UnknownModel(ClientError):
    code = "model_not_found"


class UnknownEndpoint(ClientError):
    code = "unknown_url"


class UnknownResponse(ClientError):
    code = "response_not_found"


class MethodNotAllowed(ClientError):
    code = "method_not_allowed"


class FleetError(RouterError):
    code = "unavailable"


class NoReadyPod(FleetError):
    """Pods of this model exist, none is ready. `model` is its configured name, where no pod has reported it yet."""

    code = "no_ready_pod"
    without_pods = "No pod can serve this model now; retry later."

    def __init__(self, message: str, *, model: str = "") -> None:
        super().__init__(message)
        self.model = model


class Saturated(FleetError):
    code = "saturated"


class Overloaded(FleetError):
    """The answer would be late. `retry_after_s` later it would have been in time."""

    code = "overloaded"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Stopping(FleetError):
    code = "stopping"


class UpstreamError(RouterError):
    """A pod failed. `pod` is its id. `doubtful`: the request may be the cause, even if another pod serves it."""

    code = "upstream_error"
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
    code = "stale_connection"
    without_pods = "The pod closed the connection."


MAX_SAID_BYTES = 256


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


class UpstreamTimeout(UpstreamError):
    code = "upstream_timeout"
    without_pods = "The pod did not respond in time."


class HandoffFailed(UpstreamError):
    """A pod could not continue after a handoff. `pod` is "" if no pod is at fault."""

    code = "handoff_failed"
    without_pods = "The handoff between two pods failed."


class ConfigError(RouterError):
    """A config or policy file is wrong. The message names file, line and key."""


def code_of(error: BaseException) -> str:
    return error.code if isinstance(error, RouterError) else INTERNAL
