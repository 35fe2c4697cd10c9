"""What is wrong with a request body is said in words of the API, not of the decoder."""

from __future__ import annotations

import re

import msgspec
import pytest

from router.errors import MalformedRequest, not_json
from router.request.parse import PARSERS
from router.types import Endpoint

ODD = {
    "surrogate": rb'"\ud800"',
    "surrogates": rb'"\ud800\ud800 and more"',
    "escape": rb'"\x"',
    "short escape": rb'"\u12"',
    "NUL": rb'"\u0000"',
    "control": b'"\x01"',
    "not UTF-8": b'"\xff"',
    "long": b'"%b"' % (b"x" * 2000),
    "text": b'"warm"',
    "empty": b'""',
    "huge": b"9" * 400,
    "integers": b"1" * 40,
    "infinite": b"1e999",
    "NaN": b"NaN",
    "Infinity": b"-Infinity",
    "zero": b"01",
    "negative": b"-1",
    "true": b"true",
    "null": b"null",
    "object": b"{}",
    "list": b"[1]",
    "lists": b'[[["a"]]]',
    "deep": b"[" * 3000 + b"]" * 3000,
    "open": b'"a',
    "comma": b"1,",
    "single": b"'a'",
    "twice": b'1, "model": 1, "messages": 1',
}
"""Values that some rule refuses, or may refuse."""
BODIES = [b"", b" ", b"[]", b"3", b"null", b'"a"', b"{", b'{"model": "m"', b'{"model" "m"}', b"{'model': 1}", b"\0"]
BODIES += ['{"model": "m"}'.encode("utf-16"), b'\xef\xbb\xbf{"model": "m"}', b'{"model": "m",}', b'{"model": "m"} x']
LIBRARY = re.compile(
    r"Expected|malformed|truncated|got `|codec|recursion|utf-16|Object |matching regex|\$|`(?:str|int|bool|float)`"
)
"""Words of msgspec and Python."""


def refusals(endpoint: Endpoint) -> dict[str, MalformedRequest]:
    """What the parser says of each field of the endpoint with each odd value."""
    fields = endpoint.api.body.__struct_fields__
    whole = {"model": b'"m"', "messages": b'[{"role": "user", "content": "a"}]', "prompt": b'"a"'}
    usual = {name: value for name, value in whole.items() if name in fields}
    found = {}
    for field in fields:
        for odd, value in ODD.items():
            pairs = {**usual, field: value}.items()
            try:
                PARSERS[endpoint].parse(b"{%b}" % b",".join(b'"%b":%b' % (name.encode(), text) for name, text in pairs))
            except MalformedRequest as error:
                found[f"{field}: {odd}"] = error
    return found


@pytest.mark.parametrize("endpoint", list(Endpoint))
def test_each_field_says_what_it_must_be(endpoint: Endpoint) -> None:
    """Or what is wrong with the JSON; never in words of a library."""
    found = refusals(endpoint)
    assert len(found) > len(endpoint.api.body.__struct_fields__)
    for case, error in found.items():
        message = str(error)
        assert not LIBRARY.search(message), f"{case}: {message}"
        about_json = message.startswith("The request body is not valid JSON: ")
        assert about_json or (error.param and message.startswith(f"`{error.param}` ")), f"{case}: {message}"
        assert len(message) < 300


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("endpoint", [Endpoint.CHAT, Endpoint.RESPONSES, Endpoint.MESSAGES])
def test_a_body_that_is_no_object_says_so(endpoint: Endpoint, body: bytes) -> None:
    with pytest.raises(MalformedRequest) as caught:
        PARSERS[endpoint].parse(body)
        pytest.skip("accepted")
    assert not LIBRARY.search(str(caught.value))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "it is empty"),
        (b'{"model": "m"', "it ends before its last bracket"),
        (rb'{"model": "m", "messages": [{"role": "user", "content": "\ud83d"}]}', "half of a surrogate pair"),
        (rb'{"model": "m", "messages": [{"role": "user", "content": "\ud83d, and more"}]}', "half of a surrogate pair"),
        (rb'{"model": "m", "user": "\udc00"}', "half of a surrogate pair"),
        (b'{"model": "m", "messages": [{"role": "user", "content": "\xff"}]}', "it is not UTF-8 text"),
        (b'{"model": "m",}', "a comma after the last entry at byte 14"),
    ],
)
def test_what_is_no_json_says_why(body: bytes, message: str) -> None:
    with pytest.raises(MalformedRequest, match=f"is not valid JSON: {message}"):
        PARSERS[Endpoint.CHAT].parse(body)


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        (b'"model": 3', "`model` must be a string or null, got an integer.", "model"),
        (b'"model": "m", "temperature": "hot"', '`temperature` must be a number or null, got "hot".', "temperature"),
        (b'"model": "m", "n": 1e999', "`n` is a number out of range, got 1e999.", "n"),
        (b'"model": "m", "stop": [1]', "`stop[0]` must be a string, got an integer.", "stop[0]"),
        (
            b'"model": "m", "session_id": "%b"' % (b"x" * 1025),
            "`session_id` must be a string of at most 1024 characters, got more.",
            "session_id",
        ),
    ],
)
def test_a_wrong_field_is_named_with_what_it_has(fields: bytes, message: str, param: str) -> None:
    with pytest.raises(MalformedRequest) as caught:
        PARSERS[Endpoint.CHAT].parse(b'{"messages": [{"role": "user", "content": "a"}], %b}' % fields)
    assert (str(caught.value), caught.value.param) == (message, param)


def test_every_error_of_the_decoder_has_words_of_ours() -> None:
    """Each reason that msgspec's decoder of JSON has, by a document that causes it."""
    documents = [
        b"",
        b"{",
        b"[1",
        b"[1,]",
        b'{"a":1,}',
        b"{a:1}",
        b'{"a"1}',
        b"[1 2]",
        b"1 2",
        b"tru",
        b"01",
        b"-",
        b"1.",
    ]
    documents += [
        b"1e",
        b'"\x01"',
        b'"\xff"',
        b'"a',
        rb'"\q"',
        rb'"\u12"',
        rb'"\u12zz"',
        rb'"\ud800"',
        rb'"\ud800\n    "',
    ]
    documents += [rb'"\ud800\u0041  "', rb'"\udc00      "', b"\0", b"[" * 9000]
    for document in documents:
        with pytest.raises((msgspec.DecodeError, UnicodeDecodeError, RecursionError)) as caught:
            msgspec.json.decode(document)
        assert not LIBRARY.search(str(not_json(caught.value, document))), document
