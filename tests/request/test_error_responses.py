"""Every error of the router has a status and an error body of the API that was called."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from router import errors
from router.errors import INTERNAL, ConfigError, MalformedRequest, RouterError, code_of, status_of
from router.request.error_responses import (
    MAX_MESSAGE_CHARACTERS,
    error_body,
    error_headers,
    stream_error_body,
)


def subclasses(root: type[RouterError]) -> Iterator[type[RouterError]]:
    for child in root.__subclasses__():
        yield child
        yield from subclasses(child)


ERRORS = set(subclasses(RouterError)) - {ConfigError}
"""`ConfigError` is raised before any request."""


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.MalformedRequest, 400),
        (errors.ContextTooLong, 400),
        (errors.NotAuthenticated, 401),
        (errors.InvalidKey, 401),
        (errors.UnknownSigningKey, 401),
        (errors.AccessDenied, 403),
        (errors.UnknownModel, 404),
        (errors.UnknownEndpoint, 404),
        (errors.UnknownResponse, 404),
        (errors.MethodNotAllowed, 405),
        (errors.RequestTimeout, 408),
        (errors.BodyTooLarge, 413),
        (errors.UnsupportedContentType, 415),
        (errors.UnsupportedEncoding, 415),
        (errors.QuotaExceeded, 429),
        (errors.ShareExceeded, 429),
        (errors.HeadersTooLarge, 431),
        (errors.UpstreamTimeout, 504),
    ],
)
def test_clients_are_told_by_the_status(error: type[RouterError], status: int) -> None:
    assert error.http_status == status


DEMANDED: dict[int, set[bytes]] = {
    401: {b"www-authenticate"},  # 15.5.2
    405: {b"allow"},  # 15.5.6
    415: {b"accept", b"accept-encoding"},  # 15.5.16: one of them
    503: {b"retry-after"},  # 15.6.4
}
"""What RFC 9110 demands, or recommends, of a response with this status. 408 closes the connection (`test_protocol`)."""


def instance(error: type[RouterError]) -> RouterError:
    """One with what its class requires."""
    if issubclass(error, errors.ShareExceeded | errors.Overloaded):
        return error("x", 1.0)
    return error("x", {"POST", "GET"}) if issubclass(error, errors.MethodNotAllowed) else error("x")


@pytest.mark.parametrize("error", sorted(ERRORS, key=str))
def test_each_error_has_the_headers_that_its_status_demands(error: type[RouterError]) -> None:
    """And no header twice."""
    headers = error_headers(instance(error), b"{}")
    names = [name for name, _ in headers]
    assert len(set(names)) == len(names)
    demanded = DEMANDED.get(error.http_status, set())
    assert not demanded or len(demanded & set(names)) == 1
    assert dict(headers).get(b"allow", b"GET, POST") == b"GET, POST"
    assert error is not errors.UnsupportedEncoding or dict(headers)[b"accept-encoding"] == b"gzip, zstd"


def test_sdks_send_a_request_again_only_where_that_may_help() -> None:
    """A timed-out answer would be computed again to time out again; a queue empties."""
    obeyed = {error: dict(error_headers(instance(error), b"{}")).get(b"x-should-retry") for error in ERRORS}
    assert {error for error, value in obeyed.items() if value == b"false"} == {
        errors.UpstreamTimeout,
        errors.QuotaExceeded,  # without a time after which it would fit
    }
    assert {error for error, value in obeyed.items() if value == b"true"} == {errors.UnknownSigningKey}


def test_no_error_of_a_request_is_answered_as_an_unexpected_one() -> None:
    """Only an error that nobody expected is answered with 500."""
    assert {error.http_status // 100 * 100 for error in ERRORS if issubclass(error, errors.ClientError)} == {400}
    assert {error.http_status for error in ERRORS if not issubclass(error, errors.ClientError)} == {502, 503, 504}


def test_every_error_has_a_code_of_its_own() -> None:
    """Responses, metrics, logs and receipts have the same one."""
    codes = [error.code for error in ERRORS]
    assert len(set(codes)) == len(codes) and INTERNAL not in codes
    assert all(re.fullmatch("[a-z_]+", code) for code in codes)
    assert (code_of(errors.Saturated("x")), code_of(ValueError("x"))) == ("saturated", INTERNAL)


@pytest.mark.parametrize(
    ("base", "status"), [(errors.ClientError, 400), (errors.FleetError, 503), (errors.UpstreamError, 502)]
)
def test_base_classes_have_statuses_too(base: type[RouterError], status: int) -> None:
    """For errors without a class of their own."""
    assert status_of(base("x")) == status


def test_errors_that_pass_ask_clients_to_retry_after_a_second() -> None:
    """Those of the fleet, and a key that is being fetched; no other error does."""
    passing = (errors.FleetError, errors.UnknownSigningKey)
    for error in ERRORS:
        assert error.retry_after_s == (1 if issubclass(error, passing) else None)
    assert error_headers(errors.Saturated("x"), b"{}")[-2:] == [(b"retry-after", b"1"), (b"retry-after-ms", b"1000")]
    assert error_headers(MalformedRequest("x"), b"{}") == [
        (b"content-type", b"application/json"),
        (b"content-length", b"2"),
    ]


@pytest.mark.parametrize("refusal", [errors.Overloaded, errors.ShareExceeded])
def test_refusals_name_the_seconds_after_which_the_request_would_be_in_time(
    refusal: type[errors.Overloaded | errors.ShareExceeded],
) -> None:
    """Rounded up, and at least one."""
    assert (b"retry-after", b"3") in error_headers(refusal("late", 2.1), b"{}")
    assert (b"retry-after", b"1") in error_headers(refusal("late", 0.01), b"{}")


def test_a_body_has_openais_four_fields() -> None:
    """`param` names the wrong field."""
    error = json.loads(error_body(MalformedRequest("no messages", param="messages")))["error"]
    assert error == {
        "message": "no messages",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "malformed_request",
    }


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (MalformedRequest("x"), "invalid_request_error"),
        (errors.NotAuthenticated("x"), "authentication_error"),
        (errors.AccessDenied("x"), "permission_error"),
        (errors.UnknownModel("x"), "not_found_error"),
        (errors.BodyTooLarge("x"), "request_too_large"),
        (errors.HeadersTooLarge("x"), "invalid_request_error"),
        (errors.Saturated("x"), "overloaded_error"),
        (errors.UpstreamBroken("x"), "api_error"),
        (errors.UpstreamTimeout("x"), "timeout_error"),
        (ValueError("x"), "api_error"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_messages_have_the_words_of_anthropic(error: Exception, word: str) -> None:
    """On the path itself and on those below it."""
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        body = json.loads(error_body(error, path))
        assert (body["type"], body["error"]["type"]) == ("error", word)
    assert json.loads(error_body(error, "/v1/messagesx")) == json.loads(error_body(error))


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_an_error_in_a_stream_has_the_fields_of_every_api(path: str) -> None:
    """`error` as before the stream, and its fields at the top as in OpenAI's Responses API."""
    gone = errors.UpstreamBroken("pod a: gone")
    body = json.loads(stream_error_body(gone, path))
    assert body.pop("error") == json.loads(error_body(gone, path))["error"]
    assert body == {"type": "error", "code": "upstream_broken", "message": "pod a: gone", "param": None}


def test_an_unexpected_error_is_answered_without_details() -> None:
    """Its message could contain secrets."""
    error = ValueError("a secret")
    assert status_of(error) == 500
    assert b"secret" not in error_body(error) + stream_error_body(error)


def test_a_message_that_repeats_a_large_value_is_shortened() -> None:
    """Its beginning and its end say what is wrong."""
    message = json.loads(error_body(errors.UnknownModel(f"The model `{'x' * 10_000}` does not exist.")))
    text = message["error"]["message"]
    assert len(text) <= MAX_MESSAGE_CHARACTERS + 5
    assert text.startswith("The model `xxx") and text.endswith("xxx` does not exist.")


def test_a_request_above_a_quota_names_when_to_retry() -> None:
    """Rounded up, also in milliseconds for the SDKs; one that never fits asks them not to retry."""
    limits = [(b"x-ratelimit-limit-tokens", b"5")]
    error = errors.QuotaExceeded("x", is_tokens=True, retry_after_s=1.2341, headers=limits)
    headers = dict(error_headers(error, b""))
    assert headers[b"retry-after"] == b"2" and headers[b"retry-after-ms"] == b"1235"
    assert headers[b"x-ratelimit-limit-tokens"] == b"5"
    assert json.loads(error_body(error))["error"]["type"] == "tokens"
    assert json.loads(error_body(error, "/v1/messages"))["error"]["type"] == "rate_limit_error"
    never = dict(error_headers(errors.QuotaExceeded("x"), b""))
    assert never[b"x-should-retry"] == b"false" and b"retry-after" not in never
