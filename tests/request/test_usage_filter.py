"""What a client sees of the usage of its stream, on streams recorded from real engines."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from router.admission.tenant import OPEN_TENANT
from router.engines.lacks import USAGE_OF_STREAMS
from router.request.usage_filter import MAX_EVENT_BYTES, MAX_HELD_BYTES, MAX_READ, UsageFilter
from router.types import Endpoint, InferenceRequest, UsageShown
from tests.kit.memory_front import MemoryExchange
from tests.kit.scripts import LAST, ScriptedPods, responding
from tests.request.test_reading import CHAT, make_reader

RECORDED: dict[str, str] = json.loads((Path(__file__).parent / "recorded_usage.json").read_text())
PATHS = ("/v1/chat/completions", "/v1/completions")
VLLM, LLAMACPP = "vllm plain", "llamacpp"
COMPLETION = {"model": "m", "prompt": "hi"}
FINISH = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
TEXT = b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":null}]}\n\n'
DONE = b"data: [DONE]\n\n"


def recorded(engine: str, path: str, asked: str, choices: int = 1) -> bytes:
    """The stream of an engine whose client has asked for `none`, `false`, `cont`, `true` (usage) or `both`."""
    return RECORDED[f"{engine} {path} {asked} n={choices}"].encode()


def filtered(stream: bytes, *cuts: int, shown: UsageShown = UsageShown.NONE, steps: bool = True) -> bytes:
    """What the client gets of a stream that comes in pieces."""
    one = UsageFilter(shown is UsageShown.NONE, hides_steps=steps)
    places = [0, *sorted(cuts), len(stream)]
    return b"".join(one.feed(stream[begin:end]) for begin, end in pairwise(places) if begin < end) + one.end()


def of_choice(stream: bytes, index: int) -> list[bytes]:
    return [event for event in stream.split(b"\n\n") if b'"index":%d' % index in event]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("asked", ["none", "false", "cont"])
@pytest.mark.parametrize("engine", [VLLM, "vllm forced"])
def test_a_client_that_did_not_ask_sees_the_stream_of_an_engine_that_nobody_asked(
    engine: str, asked: str, path: str
) -> None:
    """Byte for byte, the fingerprint included; also with `--enable-force-include-usage`."""
    expected = recorded(VLLM, path, asked)
    assert expected == recorded(VLLM, path, "none")
    assert filtered(recorded(engine, path, "true")) == filtered(recorded(engine, path, "both")) == expected


@pytest.mark.parametrize("path", PATHS)
def test_a_client_that_asked_sees_what_it_asked_for_of_an_engine_that_is_forced(path: str) -> None:
    """Usage at the end, and none in each event."""
    forced = recorded("vllm forced", path, "true")
    assert filtered(forced, shown=UsageShown.AT_END) == recorded(VLLM, path, "true")


@pytest.mark.parametrize("path", PATHS)
def test_llamacpp_shows_what_it_would_have_shown(path: str) -> None:
    """Its timings are where they would have been, and the usage that it sends with the last choice of a completion."""
    assert filtered(recorded(LLAMACPP, path, "true"), steps=False) == recorded(LLAMACPP, path, "none")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("engine", [VLLM, "vllm forced"])
def test_each_of_two_choices_is_as_if_nobody_had_asked(engine: str, path: str) -> None:
    seen, expected = filtered(recorded(engine, path, "true", 2)), recorded(VLLM, path, "none", 2)
    assert all(of_choice(seen, index) == of_choice(expected, index) for index in range(2))
    assert seen.endswith(DONE) and b"usage" not in seen


STREAMS = st.sampled_from(
    [recorded(engine, path, asked) for engine in (VLLM, "vllm forced") for path in PATHS for asked in ("true", "none")]
)


@given(stream=STREAMS, cuts=st.lists(st.integers(0, 4000), max_size=20), data=st.data())
def test_where_pieces_are_cut_does_not_matter(stream: bytes, cuts: list[int], data: st.DataObject) -> None:
    shown = data.draw(st.sampled_from([UsageShown.NONE, UsageShown.AT_END]))
    assert filtered(stream, *(min(cut, len(stream)) for cut in cuts), shown=shown) == filtered(stream, shown=shown)


@given(st.lists(st.binary(max_size=200), max_size=20))
def test_no_bytes_of_a_pod_raise(pieces: list[bytes]) -> None:
    one = UsageFilter(hides_total=True, hides_steps=True)
    shown = b"".join(map(one.feed, pieces)) + one.end()
    if not any(word in b"".join(pieces) for word in (b"usage", b"finish_reason")):
        assert shown == b"".join(pieces)


@pytest.mark.parametrize(
    "event",
    [
        b": keep-alive\n\n",
        b"data: not JSON, with a usage\n\n",
        b'data: {"usage":null,"choices":[]}\n\n',
        b'data: {"choices":[{"delta":{"content":"\\"usage\\":{}"},"finish_reason":null}]}\n\n',
        b'data: {"error":{"message":"usage"}}\n\n',
    ],
)
def test_other_events_pass_as_they_came(event: bytes) -> None:
    assert filtered(TEXT + event + DONE) == TEXT + event + DONE


def test_the_end_of_a_choice_passes_where_no_usage_follows() -> None:
    """With `[DONE]`, or when the pod sends no more."""
    assert filtered(TEXT + FINISH + DONE) == TEXT + FINISH + DONE
    assert filtered(TEXT + FINISH) == TEXT + FINISH
    assert filtered(TEXT + FINISH[:-10]) == TEXT + FINISH[:-10]


def test_lines_may_end_with_a_carriage_return() -> None:
    lines = recorded(VLLM, PATHS[0], "true").replace(b"\n", b"\r\n")
    assert filtered(lines) == recorded(VLLM, PATHS[0], "none").replace(b"\n", b"\r\n")


def test_usage_that_is_the_first_field_is_removed_as_well() -> None:
    assert filtered(b'data: {"usage":{"a":1},"choices":[1]}\n\n') == b'data: {"choices":[1]}\n\n'


def test_what_is_held_of_a_long_event_is_bounded() -> None:
    one = UsageFilter(hides_total=True, hides_steps=True)
    sent = sum(len(one.feed(b"usage" * 1000)) for _ in range(1000))
    assert sent > 5_000_000 - MAX_EVENT_BYTES - 5000


def test_what_is_held_of_ends_is_bounded() -> None:
    """An evil pod ends choices for ever, and sends no usage."""
    one, sent = UsageFilter(hides_total=True, hides_steps=True), 0
    for _ in range(10_000):
        sent += len(one.feed(FINISH))
    assert sent > 10_000 * len(FINISH) - MAX_HELD_BYTES - len(FINISH)


def test_the_work_for_one_piece_is_bounded() -> None:
    """An evil pod sends the smallest events with usage: those beyond the bound pass unread."""
    event = b'data: {"usage":{"a":1},"choices":[]}\n\n'
    assert filtered(event * (MAX_READ + 10)) == event * 10


# --- what pods are asked for ---


def asked(fields: dict[str, Any], path: Endpoint = Endpoint.CHAT, *, sees: bool = True) -> InferenceRequest:
    body = json.dumps({**(CHAT if path is Endpoint.CHAT else COMPLETION), **fields}).encode()
    return make_reader().read(path, {}, body, "r", OPEN_TENANT, sees_response=sees)


OPTIONS: list[tuple[dict[str, Any], dict[str, Any] | None, UsageShown]] = [
    ({}, {"include_usage": True}, UsageShown.NONE),
    ({"stream_options": None}, {"include_usage": True}, UsageShown.NONE),
    ({"stream_options": {}}, {"include_usage": True}, UsageShown.NONE),
    ({"stream_options": {"include_usage": False}}, {"include_usage": True}, UsageShown.NONE),
    (
        {"stream_options": {"continuous_usage_stats": True}},
        {"continuous_usage_stats": True, "include_usage": True},
        UsageShown.NONE,
    ),
    ({"stream_options": {"include_usage": True}}, {"include_usage": True}, UsageShown.AT_END),
    (
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"include_usage": True, "continuous_usage_stats": True},
        UsageShown.ALL,
    ),
]


@pytest.mark.parametrize(("given_fields", "sent", "shown"), OPTIONS)
@pytest.mark.parametrize("path", [Endpoint.CHAT, Endpoint.COMPLETIONS])
def test_the_pod_is_asked_for_the_usage_of_every_stream(
    given_fields: dict[str, Any], sent: dict[str, Any], shown: UsageShown, path: Endpoint
) -> None:
    request = asked({"stream": True, **given_fields}, path)
    assert (json.loads(request.body)["stream_options"], request.usage) == (sent, shown)
    assert request.body.count(b"stream_options") == 1  # some engines refuse a field that is there twice


@pytest.mark.parametrize("fields", [{}, {"stream": False}, {"stream": None}, {"stream_options": {}}])
def test_nothing_is_asked_of_an_answer_in_one_piece(fields: dict[str, Any]) -> None:
    """Engines refuse `stream_options` without `stream`."""
    request = asked(fields)
    assert (json.loads(request.body), request.usage) == ({**CHAT, **fields}, UsageShown.ALL)


def test_nothing_is_asked_where_the_response_does_not_pass_here() -> None:
    """A gateway sends it to the client, which would see what it has not asked for."""
    request = asked({"stream": True}, sees=False)
    assert (json.loads(request.body), request.usage) == ({**CHAT, "stream": True}, UsageShown.ALL)


@pytest.mark.parametrize("options", ["text", 5, [1], {"include_usage": "maybe"}, {"x": [1] * 200}])
def test_options_that_no_engine_accepts_are_forwarded_as_they_came(options: object) -> None:
    """The engine says what is wrong."""
    request = asked({"stream": True, "stream_options": options})
    assert (json.loads(request.body)["stream_options"], request.usage) == (options, UsageShown.ALL)


# --- engines that refuse ---

UNKNOWN = responding(400, b'{"error":{"message":"Extra inputs are not permitted: stream_options"}}')
ASKING = b'{"stream":true,"stream_options":{"include_usage":true}}'
PLAIN = b'{"stream":true}'


def chat(pods: ScriptedPods, body: bytes, usage: UsageShown) -> MemoryExchange:
    """Serve a stream with this body, as it is read from a client that sees this usage."""
    context = pods.context(*pods.plans(), stream=True, usage=usage)
    context.request = replace(context.request, body=body)
    return pods.serve(context)


def test_a_pod_that_refuses_is_asked_again_without() -> None:
    """The client notices nothing, no failure is held against the pod, and one that is known to refuse is not asked."""
    bodies: list[bytes] = []

    def refuse(exchange: MemoryExchange) -> None:
        assert exchange.context is not None
        bodies.append(exchange.context.request.body)
        (UNKNOWN if b"stream_options" in bodies[-1] else responding(200, TEXT, DONE, is_stream=True))(exchange)

    pods = ScriptedPods(a=refuse, b=refuse)
    first = chat(pods, ASKING, UsageShown.NONE)
    pods.fleet.learn("a", lacks=frozenset({USAGE_OF_STREAMS}))
    second = chat(pods, ASKING, UsageShown.NONE)
    assert [(one.status, one.received) for one in (first, second)] == [(200, TEXT + DONE)] * 2
    assert bodies == [ASKING, PLAIN, PLAIN]
    assert (first.asked, second.asked, pods.held_against("a")) == (["a", "a"], ["a"], [(0, 0)])
    assert pods.is_idle()


@pytest.mark.parametrize(
    ("status", "error", "body", "usage"),
    [
        (400, b'{"error":{"message":"messages is missing"}}', ASKING, UsageShown.NONE),
        (500, b'{"error":{"message":"stream_options"}}', ASKING, UsageShown.NONE),
        (400, b'{"error":{"message":"stream_options"}}', ASKING, UsageShown.AT_END),
    ],
)
def test_other_errors_are_the_clients(status: int, error: bytes, body: bytes, usage: UsageShown) -> None:
    """They are about another field, or about what the client itself has asked for."""
    pods = ScriptedPods(a=responding(status, error))
    served = chat(pods, body, usage)
    assert (served.status, served.received, served.asked) == (status, error, ["a"])


def test_usage_is_counted_although_the_client_does_not_see_it() -> None:
    pods = ScriptedPods(a=responding(200, TEXT, FINISH + LAST, is_stream=True))
    served = chat(pods, ASKING, UsageShown.NONE)
    assert served.received == TEXT + FINISH + DONE
    assert served.context is not None and served.context.reader.output_tokens == 1
