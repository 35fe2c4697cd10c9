"""What can go wrong, whose fault is it, and may it be tried elsewhere?

    RouterError
    +-- ClientError                 the request is at fault; never retried
    |   +-- MalformedRequest        400  not JSON, wrong types, contradictory fields
    |   +-- ContextTooLong          400  longer than every pod's max_model_len
    |   +-- RequestTimeout          408  not whole in time
    |   +-- BodyTooLarge            413
    |   +-- HeadersTooLarge         431
    |   +-- UnknownModel            404
    |   +-- UnknownEndpoint         404
    |   +-- MethodNotAllowed        405
    +-- FleetError                  no pod could take it
    |   +-- NoReadyPod              503
    |   +-- Stopping                503  the router was told to end, and its patience with this answer is over
    |   +-- Saturated               503  the router itself has as much to do as it takes
    +-- UpstreamError               a pod failed
    |   +-- ConnectFailed           502  nothing was sent: always safe to try the next candidate
    |   +-- StaleConnection         502  a reused connection died before any answer: once, anew
    |   +-- UpstreamBroken          502  the pod broke off; only retryable while no byte went downstream
    |   +-- UpstreamTimeout         504
    |   +-- HandoffFailed           502  no KV came from the other pod; the next candidate does without
    +-- ConfigError                 a config or policy file is wrong; names file, line and key

This file never maps an error to a response; `api/error_responses.py` does, in one table that a test proves complete.
"""

from __future__ import annotations


class RouterError(Exception):
    """Root of every error that we raise on purpose."""


class ClientError(RouterError):
    """The request is at fault. `param` names the field in the OpenAI error body."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class MalformedRequest(ClientError):
    """The body is not what the endpoint takes."""


class ContextTooLong(ClientError):
    """No pod of this model accepts a prompt of this length."""


class BodyTooLarge(ClientError):
    """The body exceeds the configured limit."""


class HeadersTooLarge(ClientError):
    """The request's line and headers exceed the configured limit."""


class RequestTimeout(ClientError):
    """The request took too long to arrive."""


class UnknownModel(ClientError):
    """No pod serves this model."""


class UnknownEndpoint(ClientError):
    """The router does not forward this path."""


class MethodNotAllowed(ClientError):
    """The path exists, the method does not."""


class FleetError(RouterError):
    """The request is fine but no pod can take it now."""


class NoReadyPod(FleetError):
    """Pods of this model exist, none is ready."""


class Saturated(FleetError):
    """As many requests are being served, or as many clients are connected, as the configuration allows."""


class Stopping(FleetError):
    """The router ends before the answer could."""


class UpstreamError(RouterError):
    """A pod failed. `pod` is its id."""

    def __init__(self, message: str, *, pod: str = "") -> None:
        super().__init__(message)
        self.pod = pod


class ConnectFailed(UpstreamError):
    """The connection was never made: the pod has seen nothing. `refused`: no process accepts connections there, unlike
    after a timeout."""

    def __init__(self, message: str, *, pod: str = "", refused: bool = False) -> None:
        super().__init__(message, pod=pod)
        self.refused = refused


class StaleConnection(UpstreamError):
    """A kept-alive connection died before a byte of the answer."""


class UpstreamBroken(UpstreamError):
    """The pod closed or garbled the exchange."""


class UpstreamTimeout(UpstreamError):
    """The pod did not answer in time."""


class HandoffFailed(UpstreamError):
    """A pod would not go on with what another one handed over. `pod` is "" where none is to blame."""


class ConfigError(RouterError):
    """A config or policy file is wrong. The message names file, line and key."""
