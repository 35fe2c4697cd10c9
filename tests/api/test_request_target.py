"""Which targets are refused, and which paths reach a pod."""

from __future__ import annotations

import json
from typing import Any, cast
from urllib.parse import unquote

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.config.schema import Edge
from router.engines.forwarded_paths import INFERENCE_PATHS, ForwardedPaths
from router.frontends.http.exchange import Exchange
from router.frontends.http.request_head import MAX_SHOWN_CHARACTERS, read_target, shown
from router.request.context import RequestContext
from tests.api.test_openai_edge import make_edge
from tests.api.test_protocol import connected, post, read_answer, whole

AMBIGUOUS = [
    b"/v1/../metrics",
    b"/v1/./chat/completions",
    b"/v1/..",
    b"/v1/..;/metrics",
    b"/v1/..;a=b/metrics",
    b"/v1/%2e%2e/metrics",
    b"/v1/.%2E/metrics",
    b"/v1/%252e%252e/metrics",
    b"/v1/%c0%ae%c0%ae/metrics",
    b"/v1/..%2fmetrics",
    b"/v1%2fchat/completions",
    b"/v1/..\\metrics",
    b"/v1/..%5cmetrics",
    b"/v1//chat/completions",
    b"//v1/chat/completions",
    b"/v1/chat/completions%00",
    b"/v1/chat/completions%0d%0a",
    b"/v1/chat/completions%7f",
    b"/v1/ch%61t/completions",
    b"/%76%31/models",
    b"/v1/models/..%2f..%2fmetrics",
    b"/v1/models/../metrics",
    b"/v1/chat/completions%",
    b"/v1/chat/completions%zz",
]
PLAIN = [
    b"/v1/chat/completions",
    b"/v1/messages?beta=true",
    b"/v1/models/meta-llama%2FLlama-3",
    b"/v1/models/caf%C3%A9",
    b"/admin/pods/10.0.0.7:8000%2Fa%231",
    b"/v1/files/a.b",
    b"/v1/...",
    b"/",
]
UNKNOWN = [b"/v1/chat/completions/", b"/V1/chat/completions", b"/v1/load_lora_adapter", b"/tokenizer_info", b"/v1/x"]


@pytest.mark.parametrize("url", AMBIGUOUS)
def test_a_path_with_two_readings_is_refused(url: bytes) -> None:
    """Dot segments, backslashes, empty segments, control bytes; also encoded once or twice."""
    target = read_target(url)
    assert "ambiguous" in target.fault and not ForwardedPaths().methods(target.path)


@pytest.mark.parametrize(
    ("url", "fault"),
    [
        (b"/v1//chat/completions", "an empty segment. Did you mean /v1/chat/completions?"),
        (b"//v1/messages", "an empty segment. Did you mean /v1/messages?"),
        (b"/v1/responses//cancel", "an empty segment. Send"),
        (b"/v1/models//", "an empty segment. Did you mean /v1/models?"),
        (b"/v1/a\\b", "a backslash. Send"),
        (b"/v1/../metrics", "a dot segment. Send"),
        (b"/v1/a%", "a percent sign that encodes nothing. Send"),
        (b"/v1%2fx", "an encoded slash"),
        (b"/v1/ch%61t/x", "an encoded character that needs no encoding. Send"),
    ],
)
def test_a_refused_path_says_what_is_wrong_with_it(url: bytes, fault: str) -> None:
    """And what was meant, if that is known."""
    assert fault in read_target(url).fault


@pytest.mark.parametrize("url", PLAIN)
def test_a_plain_path_is_accepted(url: bytes) -> None:
    """Names of models and pods may have encoded slashes: only the router reads them."""
    path, _, query = url.partition(b"?")
    assert read_target(url) == (path.decode(), url, "") and unquote(query.decode()) == query.decode()


@pytest.mark.parametrize("byte", [b"\x00", b"\t", b"\r", b"\n", b" ", b"\x7f", b"\xff"])
def test_a_target_has_visible_ascii_characters(byte: bytes) -> None:
    """In path and query. The pod receives both as they are."""
    for url in (b"/v1/messages" + byte, b"/v1/messages?a=" + byte):
        with pytest.raises(httptools.HttpParserError):
            read_target(url)


def test_a_shown_path_is_short_and_printable() -> None:
    """It comes from the client."""
    assert len(shown("/" + "a" * 10_000)) < MAX_SHOWN_CHARACTERS + 5
    assert shown("/é\x1b").isascii() and shown("/a") == "/a"


pieces = st.sampled_from(["/", "v1", "chat/completions", "..", ".", "%2e", "%2f", "\\", "metrics", ";", "models"])


@given(path=st.lists(pieces, max_size=8).map("".join))
def test_only_paths_of_the_table_are_forwarded(path: str) -> None:
    """No spelling of another path is taken for one of them."""
    assert bool(ForwardedPaths().methods(read_target(b"/" + path.encode()).path)) == ("/" + path in INFERENCE_PATHS)


@pytest.mark.net
@pytest.mark.anyio
@pytest.mark.parametrize(
    ("url", "status"), [*((url, 400) for url in AMBIGUOUS), *((url, 404) for url in UNKNOWN), (PLAIN[1], 200)]
)
async def test_a_pod_receives_only_the_path_that_was_checked(url: bytes, status: int) -> None:
    """Over a connection."""
    targets: list[bytes] = []

    async def forward(context: RequestContext, client: Exchange) -> None:
        targets.append(context.head.target)
        await whole(b"{}")(client)

    edge = cast(Any, make_edge(forward=forward))
    edge.connections = set()
    async with connected(edge) as (reader, writer):
        writer.write(post(b'{"model": "m", "messages": []}', path=url))
        head, body = await read_answer(reader)
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert targets == ([url] if status == 200 else [])
    assert status != 400 or "ambiguous" in json.loads(body)["error"]["message"]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/extra", True),
        ("/Extra", False),
        ("/extra/", False),
        ("/v1/sleep", True),
        ("/sleep", False),
    ],
)
def test_the_operators_paths_are_forwarded_exactly(path: str, expected: bool) -> None:
    """`edge.extra_paths` and `edge.control_paths`."""
    edge = make_edge(edge=Edge(extra_paths=("/extra",), control_paths=("/v1/sleep",)))
    assert bool(edge.methods(path)) is expected
