"""A client's `uuid` of a picture is removed from bodies, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import MalformedRequest
from router.prompt.pictures.uuids import MAX_DEPTH, may_have_uuid, without_uuids

PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
NAMED = {**PICTURE, "uuid": "theirs"}
TEXT = {"type": "text", "text": 'a "uuid" of 1.50'}


def chat(*parts: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": list(parts), **fields}]}


def cleaned(body: Any) -> Any:
    return json.loads(without_uuids(json.dumps(body).encode()))


@pytest.mark.parametrize(
    "item",
    [
        PICTURE,
        {"type": "input_image", "image_url": "data:,"},
        {"image_url": "data:,"},
        {"type": "text", "text": "a", "image_url": "data:,"},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": "https://a"}},
        {"type": "video_url", "video_url": {"url": "https://a"}},
        {"type": "image_embeds", "image_embeds": {"grid": "AAAA"}},
    ],
)
@pytest.mark.parametrize(
    "around",
    [
        lambda part: chat(TEXT, part, PICTURE),
        lambda part: {"messages": [[{"role": "user", "content": [part]}]]},
        lambda part: {
            "input": [{"role": "user", "content": [part]}, {"type": "function_call_output", "output": [part]}]
        },
        lambda part: {"model": "m", "documents": {"content": [part]}},
    ],
)
def test_a_uuid_is_removed(item: Any, around: Any) -> None:
    """From what vLLM reads as a picture, sound or video, in chats, batches of them, responses and documents."""
    assert cleaned(around({**item, "uuid": "theirs"})) == around(item)
    assert cleaned(around({"uuid": 7, **item})) == around(item)


@pytest.mark.parametrize(
    "name", ["uuid", "\\u0075uid", "u\\u0075id", "uu\\u0069d", "uui\\u0064", "\\u0075\\u0075\\u0069\\u0064"]
)
def test_a_name_with_escapes_is_removed(name: str) -> None:
    """As the engine's decoder reads it."""
    body = json.dumps(chat(NAMED)).replace('"uuid"', f'"{name}"').encode()
    assert may_have_uuid(body)
    assert json.loads(without_uuids(body)) == chat(PICTURE)


def test_the_bytes_of_all_other_values_stay() -> None:
    """Numbers and escapes, too."""
    body = b'{"temperature": 1.50, "messages": [{"content": [{"text": "\\u00e9", "type": "text"}, %b]}], "n": 1e0}'
    part = b'{"image_url": {"url":  "data:,"}, "uuid": "a"}'
    assert without_uuids(body % part) == (
        b'{"temperature":1.50,"messages":[{"content":[{"text": "\\u00e9", "type": "text"},'
        b'{"image_url":{"url":  "data:,"}}]}],"n":1e0}'
    )


@pytest.mark.parametrize(
    "body",
    [
        chat(TEXT, PICTURE),
        chat({"type": "text", "text": "a", "uuid": "b"}),
        chat({**PICTURE, "uuid": None}),
        {**chat(TEXT), "tools": [{"function": {"parameters": {"properties": {"uuid": {}, "image_url": {}}}}}]},
        chat(TEXT, tool_calls=[{"function": {"arguments": {"uuid": "a", "image_url": "b"}}}]),
        chat(TEXT, tool_calls=[{"function": {"arguments": {"content": [NAMED]}}}]),
        {"metadata": NAMED},
        {"uuid": "a", "image_url": "b"},
    ],
)
def test_other_bodies_stay_as_they_are(body: Any) -> None:
    """Also tools and their arguments with such fields."""
    raw = json.dumps(body).encode()
    assert without_uuids(raw) is raw


def test_what_is_no_object_stays_as_it_is() -> None:
    for raw in (b"", b"--form\r\nuuid", b'["uuid"]', b'"uuid"'):
        assert without_uuids(raw) is raw


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "uuid": "theirs"},
        {"type": "image_url", "image_url": None, "uuid": "theirs"},
        {"image_url": "", "uuid": "theirs"},
        {"type": "image_url", "image_url": {"url": None, "detail": "low"}, "uuid": "theirs"},
        {"type": "image_url", "image_url": {}, "uuid": "theirs"},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}, "uuid": "theirs"},
    ],
)
def test_a_uuid_alone_is_refused(part: Any) -> None:
    """It would ask for what the engine has cached of it."""
    with pytest.raises(MalformedRequest, match="trust_engine_fields") as caught:
        cleaned(chat(TEXT, part))
    assert caught.value.param == "messages[0].content[1].uuid"


@pytest.mark.parametrize("raw", [b'{"uuid"', b'{"messages": ["uuid"}', b'{"uuid": "\xff"}' * 2])
def test_broken_json_is_refused(raw: bytes) -> None:
    with pytest.raises(MalformedRequest):
        without_uuids(raw)


def test_hostile_depth_is_not_followed() -> None:
    deep = b'{"a":' * 100_000 + b'"uuid"' + b"}" * 100_000
    with pytest.raises(MalformedRequest):
        without_uuids(deep)
    body: Any = [NAMED]
    for _ in range(MAX_DEPTH):
        body = {"content": body}
    assert cleaned(body) == body


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["uuid", "image_url", "content", "type", "a"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["messages", "input", "a"]), json_values, max_size=2), st.booleans())
def test_nothing_but_a_uuid_next_to_media_is_removed(body: Any, escaped: bool) -> None:
    raw = json.dumps(body, ensure_ascii=escaped).encode()
    try:
        result = json.loads(without_uuids(raw))
    except MalformedRequest as error:
        assert "uuid" in str(error.param)
        return

    def compare(before: Any, after: Any) -> None:
        if isinstance(before, dict):
            gone = before.keys() - after.keys()
            assert gone <= {"uuid"}
            assert not gone or "image_url" in before
            for name in after:
                compare(before[name], after[name])
        elif isinstance(before, list):
            assert len(before) == len(after)
            for one, other in zip(before, after, strict=True):
                compare(one, other)
        else:
            assert before == after

    compare(body, result)
