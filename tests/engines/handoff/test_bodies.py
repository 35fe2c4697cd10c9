"""Edits of fields of a body, and prefill responses."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.engines.handoff.bodies import edited, read_prefill, whole_response
from router.engines.steering import HANDOFF_FIELDS
from router.errors import MalformedRequest
from tests.engines.handoff.pairs import answer

ODD = rb'{"seed" : -9223372036854775808,"big":12345678901234567890123,"p":1.0e-0,"q":-0.0,"r":1E400, "m":[ 1,  "\ud83d\ude00" ],"max_tokens":9}'  # noqa: E501

DEEP = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
keys = st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | st.sampled_from(
    ["max_tokens", "n", "stream", *sorted(HANDOFF_FIELDS)]
)


def raws(body: bytes) -> dict[str, bytes]:
    return {name: bytes(value) for name, value in msgspec.json.decode(body, type=dict[str, msgspec.Raw]).items()}


def test_untouched_fields_keep_their_bytes_and_place() -> None:
    """Long integers, odd floats, whitespace and escapes inside values."""
    changed = edited(ODD, {"max_tokens": 1, "stream": False})
    assert changed == (
        rb'{"seed":-9223372036854775808,"big":12345678901234567890123,"p":1.0e-0,"q":-0.0,"r":1E400,'
        rb'"m":[ 1,  "\ud83d\ude00" ],"max_tokens":1,"stream":false}'
    )


def test_an_edit_without_effect_returns_the_same_bytes() -> None:
    """Including whitespace between the fields."""
    assert edited(ODD, drop=("stop",), amend={"stream": False}) is ODD


def test_only_present_fields_are_amended() -> None:
    """It keeps its place."""
    assert edited(b'{"a":1,"b":2}', amend={"a": 7, "c": 7}) == b'{"a":7,"b":2}'


def test_escaped_keys_are_recognized() -> None:
    """Engines read an escaped key as a plain one."""
    assert edited(rb'{"\u006e":5,"kv_transfer\u005fparams":{"x":1},"\u00e9\"":2}', drop=("n",)) == b'{"\xc3\xa9\\"":2}'


def test_the_last_of_duplicate_keys_counts() -> None:
    """As in every engine."""
    assert edited(b'{"a":1,"b":2,"a":3}', {"c": 4}) == b'{"a":3,"b":2,"c":4}'
    assert edited(b'{"n":1,"b":2,"n":3}', drop=("n",)) == b'{"b":2}'


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b'{"a":1} x', rb'{"\ud800":1}', b'{"\xff":1}', DEEP], ids=lambda body: repr(body[:12])
)
def test_anything_but_an_object_is_an_error(body: bytes) -> None:
    with pytest.raises(MalformedRequest):
        edited(body, {"max_tokens": 1})


@given(
    st.dictionaries(keys, json_values, max_size=6),
    st.dictionaries(keys, st.integers(0, 9), max_size=3),
    st.sets(keys, max_size=3),
    st.dictionaries(keys, st.integers(0, 9), max_size=3),
    st.booleans(),
)
def test_any_edit_equals_the_same_edit_of_the_decoded_object(
    fields: dict[str, Any], put: dict[str, int], drop: set[str], amend: dict[str, int], ascii_only: bool
) -> None:
    """Names keep their order, untouched values every byte."""
    body = json.dumps(fields, ensure_ascii=ascii_only, indent=1).encode("utf-8", "surrogatepass")
    kept = {name: value for name, value in fields.items() if name not in HANDOFF_FIELDS and name not in drop}
    wanted = {**kept, **put, **{name: value for name, value in amend.items() if name in kept}}
    before, after = raws(body), raws(edited(body, put, drop, amend))
    assert list(after) == list(wanted)
    for name, value in after.items():
        touched = name in put or name in amend
        assert value == (json.dumps(wanted[name]).encode() if touched else before[name])


# --- prefill responses ---


@pytest.mark.parametrize(
    "reply",
    [
        answer(prompt_token_ids=[1, 2]),
        answer({"prompt_token_ids": [1, 2]}),
        answer(prompt_token_ids=[[1, 2]]),
    ],
)
def test_prompt_tokens_are_found_where_each_engine_has_them(reply: bytes) -> None:
    """Chat, completion, and TensorRT-LLM's list per prompt."""
    found = read_prefill(reply)
    assert found is not None
    tokens = found.token_ids()
    assert tokens is not None
    assert json.loads(bytes(tokens)) == [1, 2]


@pytest.mark.parametrize("reply", [answer(), answer(prompt_token_ids=None), answer(prompt_token_ids=["a"])])
def test_missing_tokens_are_none(reply: bytes) -> None:
    """The rest is read."""
    found = read_prefill(reply)
    assert found is not None
    assert found.token_ids() is None


def test_cached_tokens_are_none_where_the_engine_omits_them() -> None:
    """vLLM writes null unless a flag enables it."""
    for usage, cached in [
        ({"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}, 4),
        ({"prompt_tokens": 9, "prompt_tokens_details": None}, None),
        (None, None),
    ]:
        found = read_prefill(answer(usage=usage))
        assert found is not None
        assert found.cached_tokens == cached


def test_a_whole_response_lacks_only_the_routers_own_fields() -> None:
    """Every other byte stays."""
    reply = (
        b'{"id":"x","created":1.0e3,"choices":[{"index":0,"text":" a","token_ids":[5],'
        b'"disaggregated_params":{"a":1},"finish_reason":"stop"}],"prompt_token_ids":[1],"kv_transfer_params":null}'
    )
    assert whole_response(reply) == (
        b'{"id":"x","created":1.0e3,"choices":[{"index":0,"text":" a","finish_reason":"stop"}]}'
    )
    assert json.loads(whole_response(answer())) == json.loads(answer())


def test_an_answer_that_is_not_utf8_is_none() -> None:
    """Also where only the name of an unknown field is not UTF-8."""
    assert read_prefill(b'{"choices":[{"\xc3\xa4":1}]}')
    assert read_prefill(b'{"choices":[{"\xff":1}]}') is None
