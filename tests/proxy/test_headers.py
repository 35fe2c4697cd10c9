"""Headers that are passed on."""

from __future__ import annotations

import httptools
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from router.engines.forwarded_headers import CREDENTIALS, HOP_BY_HOP, PROXY_CLAIMS, REWRITTEN
from router.engines.steering import STEERING_HEADERS
from router.errors import MalformedRequest
from router.frontends.http.headers import HeaderRules, request_message
from router.request.inbound import HeaderList

STRICT, TRUSTING = HeaderRules(), HeaderRules(trust_engine_fields=True)
PLAIN: HeaderList = [(b"anthropic-version", b"1"), (b"traceparent", b"00-1"), (b"x-mine", b"1"), (b"x-mine", b"2")]


@pytest.mark.parametrize("name", sorted(HOP_BY_HOP))
def test_hop_by_hop_headers_are_dropped_in_both_directions(name: bytes) -> None:
    """RFC 9110 7.6.1."""
    headers = [*PLAIN, (name, b"x")]
    assert TRUSTING.upstream(headers) == PLAIN
    assert STRICT.downstream(headers) == PLAIN


def test_headers_named_by_connection_are_dropped_in_both_directions() -> None:
    """In any case and spacing, in several headers."""
    headers = [*PLAIN, (b"connection", b"X-One ,keep-alive"), (b"connection", b"x-two")]
    headers += [(b"x-one", b"1"), (b"x-two", b"2")]
    assert TRUSTING.upstream(headers) == PLAIN
    assert STRICT.downstream(headers) == PLAIN


@pytest.mark.parametrize("name", sorted(STEERING_HEADERS))
def test_engine_control_headers_pass_only_from_trusted_clients(name: bytes) -> None:
    """A client could make an engine fetch KV from, or send it to, any address."""
    headers = [*PLAIN, (name, b"10.0.0.1:5600")]
    assert STRICT.upstream(headers) == PLAIN
    assert TRUSTING.upstream(headers) == headers


@pytest.mark.parametrize("name", sorted(REWRITTEN))
def test_headers_that_the_router_sets_are_dropped(name: bytes) -> None:
    """Duplicates would be ambiguous."""
    assert TRUSTING.upstream([*PLAIN, (name, b"1")]) == PLAIN


@pytest.mark.parametrize("name", sorted(CREDENTIALS | PROXY_CLAIMS))
def test_credentials_and_proxy_claims_pass_only_if_the_operator_names_them(name: bytes) -> None:
    """They are for the router, and any client can claim to be a proxy."""
    headers = [*PLAIN, (name, b"x")]
    assert STRICT.upstream(headers) == TRUSTING.upstream(headers) == PLAIN
    assert HeaderRules(forward=[name.decode()]).upstream(headers) == headers


@pytest.mark.parametrize("name", [b"x_api_key", b"x_data-parallel_rank", b"x_forwarded_for", b"x_mine"])
def test_names_with_underscores_pass_only_if_the_operator_names_them(name: bytes) -> None:
    """Servers in the tradition of CGI read them as names with hyphens."""
    headers = [*PLAIN, (name, b"x")]
    assert STRICT.upstream(headers) == TRUSTING.upstream(headers) == PLAIN
    assert HeaderRules(forward=[name.decode()]).upstream(headers) == headers


@pytest.mark.parametrize(("asked", "answer"), [("authorization", b"www-authenticate"), ("cookie", b"set-cookie")])
def test_a_pods_answer_to_credentials_passes_with_them(asked: str, answer: bytes) -> None:
    """A pod's challenge is for the router's credentials, and another pod would receive its cookie."""
    headers = [*PLAIN, (answer, b"x")]
    assert STRICT.downstream(headers) == PLAIN
    assert HeaderRules(forward=[asked]).downstream(headers) == headers


def test_the_pods_length_and_type_reach_the_client() -> None:
    """The body is not changed."""
    headers = [(b"content-type", b"text/event-stream"), (b"content-length", b"5"), (b"server", b"uvicorn")]
    assert STRICT.downstream(headers) == headers[:2]


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


def test_the_key_of_anthropics_clients_is_forwarded_as_engines_read_it() -> None:
    """Where the operator forwards `authorization`, and the client sends none."""
    sent = [(b"x-api-key", b"k")]
    assert HeaderRules().upstream(sent) == []
    rules = HeaderRules(forward=["authorization"])
    assert rules.upstream(sent) == [(b"authorization", b"Bearer k")]
    assert rules.upstream([*sent, (b"authorization", b"Bearer own")]) == [(b"authorization", b"Bearer own")]
