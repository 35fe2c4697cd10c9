"""A sampled message is asked for as a chat: both are what vLLM makes of them itself.

`messages.jsonl`: streams of a real vLLM 0.32 with ids, without the head of each event, and what its own converter makes
of them. `message_chats.jsonl`: bodies, and the chats that its handler makes of them; `merge`: where the template takes
no late system message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.frontends.http.relay import WholeReply, message_error
from router.prompt.apis.vllm_messages import VllmMessages
from router.request.continuation.messages import MessageStream, chat_of, converts
from router.request.continuation.plan import first_body
from router.request.continuation.stream import Recorder
from router.request.continuation.terms import terms_of
from router.types import Endpoint, PrefixTrust
from tests.kit.cores import CoreOfPods, pods_at
from tests.request.continuation.test_any_fault import in_pieces

FOLDER = Path(__file__).parent


def lines(name: str) -> list[Any]:
    return [json.loads(line) for line in (FOLDER / name).read_text(encoding="utf-8").split("\n") if line]


STREAMS, CHATS = lines("messages.jsonl"), lines("message_chats.jsonl")
MESSAGE: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 20,
    "stream": True,
    "messages": [{"role": "user", "content": "Hi"}],
}
TOOL = {"name": "look", "input_schema": {"type": "object"}}
USER = {"role": "user", "content": "Hi"}


class Merging(VllmMessages):
    merges_system = cached_property(lambda _: True)


class Late(VllmMessages):
    merges_system = cached_property(lambda _: False)


def chat(body: dict[str, Any], *, merge: bool = False) -> Any:
    raw = json.dumps(body, ensure_ascii=False).encode()
    made = chat_of(raw, (Merging if merge else Late)(None))
    return json.loads(made) if made else None


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_nulls(one) for name, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


def without_signatures(events: str) -> str:
    return re.sub(r'"signature":"[0-9a-f]{32}"', '"signature":""', events)


def sent(stream: dict[str, Any]) -> bytes:
    """What the pod has sent, with ids."""
    events = [f"{stream['head']}{rest}\n\n" for rest in stream["chat"]]
    return "".join([*events, "data: [DONE]\n\n"]).encode()


def received(stream: dict[str, Any], pieces: Sequence[bytes]) -> str:
    """What the client gets."""
    terms = terms_of(Endpoint.CHAT, json.dumps(chat(stream["body"])).encode())
    recorder, message = Recorder(terms, asks_ids=True), MessageStream()
    return b"".join([message.feed(recorder.feed(piece)) for piece in pieces]).decode()


@pytest.mark.parametrize("stream", STREAMS, ids=lambda one: one["name"])
def test_message_is_that_of_the_engine_byte_for_byte_but_for_signatures(stream: dict[str, Any]) -> None:
    whole = sent(stream)
    for pieces in ([whole], [event + b"\n\n" for event in whole.split(b"\n\n")[:-1]]):
        assert without_signatures(received(stream, pieces)) == without_signatures(stream["message"])


@given(st.sampled_from(STREAMS), st.data())
def test_message_does_not_depend_on_how_its_chat_is_cut(stream: dict[str, Any], data: st.DataObject) -> None:
    whole = sent(stream)
    sizes = data.draw(st.lists(st.integers(1, 900), min_size=1, max_size=8))
    assert received(stream, list(in_pieces(whole, sizes))) == received(stream, [whole])


def test_signatures_of_an_answer_differ_and_do_not_change() -> None:
    stream = next(one for one in STREAMS if one["name"] == "thinking")
    other = {**stream, "head": stream["head"].replace("chatcmpl-", "chatcmpl-other-")}
    signatures = [re.findall(r'"signature":"(\w+)"', received(one, [sent(one)])) for one in (stream, stream, other)]
    assert signatures[0] == signatures[1] != signatures[2]


@pytest.mark.parametrize("number", range(len(CHATS)))
def test_chat_is_that_which_the_engine_makes_of_the_message(number: int) -> None:
    one = CHATS[number]
    assert without_nulls(chat(one["body"], merge=one["merge"])) == one["chat"]


def test_late_system_message_depends_on_the_template() -> None:
    body = {**MESSAGE, "messages": [USER, {"role": "system", "content": "Be brief."}]}
    raw = json.dumps(body).encode()
    assert chat_of(raw, VllmMessages(None)) == b""
    assert [one["role"] for one in chat(body)["messages"]] == ["user", "system"]
    assert [one["role"] for one in chat(body, merge=True)["messages"]] == ["system", "user"]


PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
REFERENCE = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "tool_reference", "tool_name": "look"}]}


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking": {"type": "disabled"}},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"thinking": {"type": "enabled", "budget_tokens": 9}, "max_tokens": 4096},
        {"thinking": {"type": "enabled"}, "max_tokens": 4096},
        {"thinking": {"type": "other"}},
        {"thinking": {}},
        {"tool_choice": {"type": "other"}, "tools": [TOOL]},
        {"output_config": {"format": {"type": "other", "schema": {"type": "object"}}}},
        {"output_config": {"format": "json"}},
        {"unknown": 1},
        {"kv_transfer_params": {}},
        {"max_tokens": 0},
        {"max_tokens": "20"},
        {"tools": []},
        {"tool_choice": {"type": "any"}},
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}},
        {"tools": [{"name": "search", "type": "web_search_20250305"}]},
        {"output_config": {"effort": "huge"}},
        {"messages": [{"role": "user", "content": [PICTURE]}]},
        {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
        {"messages": [{"role": "user", "content": [REFERENCE]}], "tools": [TOOL]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "look"}]}]},
        {"messages": [{"role": "user", "content": [{**REFERENCE, "content": [{"type": "image", "source": "x"}]}]}]},
        {"messages": [USER] * 4000},
        {"tools": [{"name": "look", "input_schema": {"enum": [10**4000] * 60}}]},
        {"system": "x" * 256 * 1024},
    ],
    ids=lambda fields: str(fields)[:60],
)
def test_what_is_not_known_exactly_is_not_converted(fields: dict[str, Any]) -> None:
    assert chat(MESSAGE) is not None
    assert chat({**MESSAGE, **fields}) is None


def test_fields_that_the_engine_ignores_are_left_out() -> None:
    assert chat({**MESSAGE, "metadata": {"user_id": "u"}, "context_management": {"edits": []}}) == chat(MESSAGE)


def test_only_pods_that_have_shown_both_are_asked_for_chats() -> None:
    known: dict[str, Any] = {"engine": "vllm", "version": "0.32.0", "trust": PrefixTrust.TRUSTED}
    shown = {"continues": frozenset({Endpoint.CHAT}), "converts": frozenset({Endpoint.MESSAGES})}
    pod = replace(CoreOfPods(pods_at({"a": "http://a"})).pod("a"), **(known | shown))
    assert converts(pod)
    others: list[dict[str, Any]] = [
        {"engine": "sglang"},
        {"version": "0.33.0"},
        {"version": "0.3"},
        {"continues": frozenset({Endpoint.COMPLETIONS})},
        {"converts": frozenset()},
        {"trust": PrefixTrust.UNTESTED},
    ]
    for other in others:
        assert not converts(replace(pod, **other)), other


HEAD = b'data: {"id":"a","model":"m","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'


def said(delta: str) -> bytes:
    return b'data: {"id":"a","model":"m","choices":[{"index":0,"delta":%b}]}\n\n' % delta.encode()


@pytest.mark.parametrize(
    "event",
    [
        said('{"tool_calls":[7]}'),
        said('{"tool_calls":[{"function":{"arguments":"{}"}}]}'),
        b"data: {]\n\n",
        b"data: {}\n\n",
        b'data: {"id":"a","choices":[],"usage":{"prompt_tokens":"7"}}\n\n',
    ],
    ids=str,
)
def test_event_of_another_form_is_not_written(event: bytes) -> None:
    stream = MessageStream()
    assert stream.feed(HEAD).startswith(b"event: message_start\n")
    with pytest.raises((ValueError, LookupError, TypeError, AttributeError)):
        stream.feed(event)


def test_stream_without_an_id_is_not_written() -> None:
    """Each of its events would begin the message again."""
    with pytest.raises(ValueError, match="no id"):
        MessageStream().feed(HEAD.replace(b'"id":"a"', b'"id":""'))


@pytest.mark.anyio
async def test_error_of_a_chat_loses_the_headers_of_its_body() -> None:
    headers = [(b"content-encoding", b"gzip"), (b"content-length", b"3"), (b"retry-after", b"1")]
    error = await message_error(WholeReply("a", 400, headers, b"\x1f\x8b\x08"))
    assert error.headers == [(b"retry-after", b"1"), (b"content-type", b"application/json")]
    assert json.loads(error.body)["error"] == {"type": "api_error", "message": "status 400"}


def test_what_a_stream_remembers_is_bounded() -> None:
    stream = MessageStream()
    stream.feed(HEAD + said('{"tool_calls":[{"index":0,"id":"a","function":{"name":"look"}}]}'))
    text = said(json.dumps({"content": "x" * 100_000}))
    with pytest.raises(ValueError, match="text inside a call"):
        for _ in range(20):
            stream.feed(text)


def test_text_that_comes_inside_a_call_is_a_block_behind_it() -> None:
    call = said('{"tool_calls":[{"index":0,"id":"a","function":{"name":"look","arguments":"{}"}}]}')
    stream = MessageStream()
    written = stream.feed(HEAD + call + said('{"content":"b\\u0041"}') + said('{"content":"c"}') + b"data: [DONE]\n\n")
    events = [json.loads(event.partition(b"data: ")[2]) for event in written.split(b"\n\n")[:-1]]
    assert [(event["type"], event.get("index")) for event in events[1:]] == [
        ("content_block_start", 0),
        ("content_block_delta", 0),
        ("content_block_stop", 0),
        ("content_block_start", 1),
        ("content_block_delta", 1),
        ("content_block_stop", 1),
        ("message_stop", None),
    ]
    assert events[5]["delta"] == {"type": "text_delta", "text": "bAc"}


def test_terms_are_those_of_the_chat() -> None:
    body = json.dumps(chat({**MESSAGE, "tools": [TOOL]})).encode()
    terms = terms_of(Endpoint.CHAT, body)
    assert (terms.announced, terms.max_tokens, terms.wants_usage) == ("until=tool-call", 20, True)
    assert b'"return_token_ids":true' in first_body(body, terms)
