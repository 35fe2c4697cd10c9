"""Headers that are passed on."""

from __future__ import annotations

import httptools
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from router.errors import MalformedRequest
from router.proxy.headers import (
    ENGINE_CONTROL,
    HOP_BY_HOP,
    HeaderList,
    downstream_headers,
    request_message,
    upstream_headers,
)

PLAIN: HeaderList = [(b"authorization", b"Bearer x"), (b"traceparent", b"00-1"), (b"x-mine", b"1"), (b"x-mine", b"2")]


@pytest.mark.parametrize("name", sorted(HOP_BY_HOP))
def test_hop_by_hop_headers_are_dropped_in_both_directions(name: bytes) -> None:
    """RFC 9110 7.6.1."""
    headers = [*PLAIN, (name, b"x")]
    assert upstream_headers(headers, trusted=True) == PLAIN
    assert downstream_headers(headers) == PLAIN


def test_headers_named_by_connection_are_dropped_in_both_directions() -> None:
    """In any case and spacing, in several headers."""
    headers = [*PLAIN, (b"connection", b"X-One ,keep-alive"), (b"connection", b"x-two")]
    headers += [(b"x-one", b"1"), (b"x-two", b"2")]
    assert upstream_headers(headers, trusted=True) == PLAIN
    assert downstream_headers(headers) == PLAIN


@pytest.mark.parametrize("name", sorted(ENGINE_CONTROL))
def test_engine_control_headers_pass_only_from_trusted_clients(name: bytes) -> None:
    """A client could make an engine fetch KV from, or send it to, any address."""
    headers = [*PLAIN, (name, b"10.0.0.1:5600")]
    assert upstream_headers(headers, trusted=False) == PLAIN
    assert upstream_headers(headers, trusted=True) == headers


@pytest.mark.parametrize("name", [b"host", b"content-length", b"expect", b"accept-encoding", b"x-request-id"])
def test_headers_that_the_router_sets_are_dropped(name: bytes) -> None:
    """Duplicates would be ambiguous."""
    assert upstream_headers([*PLAIN, (name, b"1")], trusted=True) == PLAIN


def test_the_pods_length_and_type_reach_the_client() -> None:
    """The body is not changed."""
    headers = [(b"content-type", b"text/event-stream"), (b"content-length", b"5"), (b"server", b"uvicorn")]
    assert downstream_headers(headers) == headers[:2]


class Parsed:
    """A request as a pod's parser sees it."""

    def __init__(self, message: bytes) -> None:
        self.target, self.body, self.messages = b"", b"", 0
        self.headers: HeaderList = []
        self.parser = httptools.HttpRequestParser(self)
        self.parser.feed_data(message)

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.messages += 1


names = st.text("abcdefgh-", min_size=1, max_size=8).map(str.encode)
values = st.text("abc :;,=\x80é", max_size=8).map(lambda text: text.strip().encode("latin-1"))


@settings(max_examples=60)
@given(headers=st.lists(st.tuples(names, values), max_size=5), body=st.binary(max_size=40))
def test_a_pod_parses_the_request_as_sent(headers: HeaderList, body: bytes) -> None:
    """One request, with host and exact length."""
    seen = Parsed(request_message("POST", b"/v1/x?a=b", b"pod:8000", headers, body))
    assert (seen.messages, seen.target, seen.body) == (1, b"/v1/x?a=b", body)
    length = (b"content-length", str(len(body)).encode())
    assert seen.headers == [(b"host", b"pod:8000"), *headers, length]


def test_a_get_without_a_body_has_no_length() -> None:
    """As clients send it."""
    assert request_message("GET", b"/", b"h", [], b"") == b"GET / HTTP/1.1\r\nhost: h\r\n\r\n"


@settings(max_examples=100)
@given(
    texts=st.lists(st.text("ab:\r\n ", max_size=8).map(str.encode), min_size=3, max_size=3),
)
def test_no_text_can_add_a_line(texts: list[bytes]) -> None:
    """A line break in path, name or value is refused at any position."""
    target, name, value = texts
    assume(any(mark in text for text in texts for mark in (b"\r", b"\n")))
    with pytest.raises(MalformedRequest):
        request_message("POST", b"/" + target, b"pod:8000", [(name, value)], b"")


def test_a_body_may_have_any_line_breaks() -> None:
    """Only the head consists of lines."""
    assert request_message("POST", b"/", b"h", [], b"a\r\n\r\nb").endswith(b"content-length: 6\r\n\r\na\r\n\r\nb")
