"""Request bodies: parsing, errors and the removal of engine fields."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.engines.steering import CONTAINERS, STEERING_FIELDS
from router.errors import MalformedRequest
from router.request import parse
from router.request.parse import (
    MAX_DECODED_BYTES,
    MAX_NESTING,
    MAX_SEARCHED_BYTES,
    MAX_SEARCHED_FIELDS,
    PARSERS,
    has_engine_fields,
    may_be_json_object,
    read_other,
    without_engine_fields,
)
from router.types import Endpoint

DEEP = b"[" * 100_000 + b"]" * 100_000
endpoints = st.sampled_from(Endpoint)


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]} | fields).encode()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b"[]",
        b"\xff\xfe",
        b'{"model": "\xff", "messages": [{}]}',
        b'{"model": "m", "messages": [{"content": "\xff"}]}',
        b'{"model": "m", "messages": [{"content": "\\ud800"}]}',
        b'{"model": "m", "messages": [{"content": ' + DEEP + b"}]}",
        b'{"unknown": ' + DEEP + b', "model": "m", "messages": [{}]}',
    ],
    ids=lambda body: repr(body[:30]),
)
def test_invalid_json_is_malformed_and_has_no_model(body: bytes) -> None:
    """Truncated, not an object, not UTF-8, a lone surrogate, nested too deeply."""
    with pytest.raises(MalformedRequest):
        PARSERS[Endpoint.CHAT].parse(body)
    assert getattr(read_other(body), "model", "m") == "m"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": 5}, "model"),
        ({"messages": "hi"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [5]}, "messages[0]"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"stream": "perhaps"}, "stream"),
        ({"tools": [{"type": "function"}, 4]}, "tools[1]"),
        ({"temperature": []}, "temperature"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
)
def test_a_field_of_the_wrong_type_is_named(fields: dict[str, Any], param: str) -> None:
    """In the message and as `param`, with the index of the element."""
    with pytest.raises(MalformedRequest, match=f"`{param.partition('[')[0]}") as caught:
        PARSERS[Endpoint.CHAT].parse(chat(**fields))
    assert caught.value.param == param


@pytest.mark.parametrize("flags", [{"continue_final_message": True}, {"add_generation_prompt": True}])
def test_each_generation_flag_alone_is_valid(flags: dict[str, bool]) -> None:
    """Together they contradict each other."""
    assert PARSERS[Endpoint.CHAT].prompt_fields(PARSERS[Endpoint.CHAT].parse(chat(**flags))).items() >= flags.items()


def test_numbers_and_booleans_are_parsed_as_leniently_as_by_engines() -> None:
    """No body is refused that a pod would accept."""
    lenient = PARSERS[Endpoint.CHAT].parse(chat(max_tokens="16", temperature="0.5", stream="true", n=2.0, seed=2**70))
    assert (lenient.max_tokens, lenient.temperature, lenient.stream, lenient.n) == (16, 0.5, True, 2)
    nothing = PARSERS[Endpoint.CHAT].parse(chat(max_tokens=None, stream=None, stop=None, tools=None))
    assert (nothing.max_tokens, nothing.stream, nothing.stop, nothing.tools) == (None, None, None, None)
    assert PARSERS[Endpoint.CHAT].parse(chat(stream=1)).stream is True


def test_the_prompt_has_only_fields_that_determine_its_tokens() -> None:
    """Unchanged, without missing ones."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    parsed = PARSERS[Endpoint.CHAT].parse(chat(tools=tools, temperature=0.1, user="u"))
    fields = PARSERS[Endpoint.CHAT].prompt_fields(parsed)
    assert [json.loads(bytes(message)) for message in fields.pop("messages")] == [{"role": "user", "content": "hi"}]
    assert fields == {"tools": tools}
    completion = PARSERS[Endpoint.COMPLETIONS].parse(b'{"model": "m", "prompt": [1, 2], "max_tokens": 3}')
    assert PARSERS[Endpoint.COMPLETIONS].prompt_fields(completion) == {"prompt": msgspec.Raw(b"[1, 2]")}
    embeddings = PARSERS[Endpoint.EMBEDDINGS].parse(b'{"model": "m", "input": "x", "dimensions": 3}')
    assert PARSERS[Endpoint.EMBEDDINGS].prompt_fields(embeddings) == {"input": msgspec.Raw(b'"x"')}
    shortened = PARSERS[Endpoint.EMBEDDINGS].parse(b'{"model": "m", "input": "x", "truncate_prompt_tokens": 3}')
    assert PARSERS[Endpoint.EMBEDDINGS].prompt_fields(shortened)["truncate_prompt_tokens"] == msgspec.Raw(b"3")
    ranked = read_other(b'{"model": "m", "query": "x", "documents": ["y"], "top_n": 1}')
    assert PARSERS[Endpoint.OTHER].prompt_fields(ranked) == {
        "query": msgspec.Raw(b'"x"'),
        "documents": msgspec.Raw(b'["y"]'),
    }


def test_texts_to_embed_may_be_longer_than_what_is_decoded() -> None:
    """They stay undecoded."""
    text = b'"' + b"x" * (MAX_DECODED_BYTES + 1) + b'"'
    parsed = PARSERS[Endpoint.EMBEDDINGS].parse(b'{"model": "m", "input": ' + text + b"}")
    assert (parsed.model, parsed.input) == ("m", msgspec.Raw(text))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
NAMES = ["model", "messages", "prompt", "stream", "stop", "tools", "max_tokens", "n", "kv_transfer_params", "rid", "x"]
objects = st.dictionaries(st.sampled_from(NAMES), json_values).map(lambda fields: json.dumps(fields).encode())


@given(endpoint=endpoints, body=st.binary(max_size=60) | objects)
def test_any_bytes_are_parsed_or_malformed(endpoint: Endpoint, body: bytes) -> None:
    """No other exception."""
    read_other(body)
    for read in (lambda: PARSERS[endpoint].parse(body), lambda: without_engine_fields(body)):
        try:
            read()
        except MalformedRequest as error:
            assert str(error)


def test_removing_engine_fields_changes_nothing_else() -> None:
    """Order of keys, 64-bit integers, long floats, spaces and escapes inside values."""
    kept = [
        b'"zeta":{"b" : 1, "a":2.50}',
        b'"big":9223372036854775807',
        b'"bigger":123456789012345678901234567890',
        b'"float":0.30000000000000004441',
        b'"text":"caf\\u00e9 \xc3\xa9 \\/ \\n"',
        b'"alpha":[ 1,2 ]',
    ]
    planted = [b'"kv_transfer_params":{"a":[1]}', b'"bootstrap_room":7', b'"rid":"x"']
    mixed = [kept[0], planted[0], *kept[1:4], planted[1], *kept[4:], planted[2]]
    assert without_engine_fields(b"{" + b", ".join(mixed) + b"}") == b"{" + b",".join(kept) + b"}"


@pytest.mark.parametrize("name", sorted(STEERING_FIELDS))
def test_an_engine_field_with_an_escaped_key_is_removed(name: str) -> None:
    """Engines decode escapes in keys."""
    escaped = name[:2] + f"\\u{ord(name[2]):04x}" + name[3:]
    for key in (name, escaped):
        body = f'{{"model":"m","{key}" : {{"remote_host":"h"}}}}'.encode()
        assert name in json.loads(body)
        assert without_engine_fields(body) == b'{"model":"m"}'


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({"vllm_xargs": {"kv_transfer_params": 1, "a": 2}}, {"vllm_xargs": {"a": 2}}),
        ({"sampling_params": {"extra_args": {"kv_transfer_params": 1}}}, {"sampling_params": {"extra_args": {}}}),
        ({"sampling_params": [{"rid": 1}, {"n": 2}]}, {"sampling_params": [{}, {"n": 2}]}),
        ({"vllm_xargs": {"a": {"rid": 1}}}, {"vllm_xargs": {"a": {"rid": 1}}}),
        ({"vllm_xargs": '{"rid": 1}'}, {"vllm_xargs": None}),
        ({"messages": [{"rid": 1}], "tools": {"priority": 1}}, {"messages": [{"rid": 1}], "tools": {"priority": 1}}),
    ],
)
def test_engine_fields_are_removed_where_engines_look_for_them(given: Any, left: Any) -> None:
    """At the top and inside some objects; the same names elsewhere are data."""
    assert json.loads(without_engine_fields(json.dumps(given).encode())) == left


def test_duplicates_of_a_nested_object_cannot_hide_an_engine_field() -> None:
    """Whichever an engine reads."""
    body = b'{"vllm_xargs": {"rid": 1, "\\u0072id": 2}, "vllm_xargs": {"a": 1, "r\\u0069d": 3}}'
    assert without_engine_fields(body) == b'{"vllm_xargs":{"a":1}}'


def test_a_searched_object_has_a_bounded_size() -> None:
    """Searching it blocks other requests."""
    for count, is_refused in ((1000, False), (MAX_SEARCHED_BYTES, True)):
        body = b'{"sampling_params": [%b]}' % b",".join([b"{}"] * count)
        if is_refused:
            with pytest.raises(MalformedRequest, match="sampling_params"):
                without_engine_fields(body)
        else:
            assert json.loads(without_engine_fields(body)) == json.loads(body)


@pytest.mark.parametrize(
    "body",
    [
        b'{"vllm_xargs":[%b]}' % b",".join([b"1"] * 5_000),
        b'{"vllm_xargs":[[%b]]}' % b",".join([b"{}"] * 5_000),
        b'{"vllm_xargs":{"extra_args":{%b}}}' % b",".join(b'"%d":1' % n for n in range(5_000)),
        b'{"priority":1,%b}' % b",".join(b'"%d":1' % n for n in range(5_000)),
        b"{%b}" % b",".join(b'"%b":[%b]' % (name.encode(), b",".join([b"{}"] * 1_500)) for name in CONTAINERS),
    ],
    ids=["numbers", "nested", "inner-fields", "fields", "containers"],
)
def test_a_search_for_engine_fields_visits_a_bounded_number_of_values(body: bytes) -> None:
    """However they are spread over lists and objects."""
    with pytest.raises(MalformedRequest, match=f"{MAX_SEARCHED_FIELDS} fields"):
        without_engine_fields(body)


@pytest.mark.parametrize("endpoint", [Endpoint.CHAT, Endpoint.COMPLETIONS])
@pytest.mark.parametrize("number", [b"1" * 65, b'"%b"' % (b"1" * 65), b"1." + b"0" * 63 + b"e-300"])
@pytest.mark.parametrize("name", ["temperature", "top_p", "seed", "n", "max_tokens", "truncate_prompt_tokens"])
def test_an_endless_number_is_refused(endpoint: Endpoint, number: bytes, name: str) -> None:
    """Decoding one takes milliseconds."""
    body = b'{"model":"m","messages":[{}],"prompt":"a","%b":%b}' % (name.encode(), number)
    with pytest.raises(MalformedRequest, match=f"`{name}` has .* bytes, more than 64") as caught:
        PARSERS[endpoint].parse(body)
    assert caught.value.param == name


def test_only_the_last_of_a_repeated_number_is_decoded() -> None:
    """As Python does; a float may take 5 us."""
    body = chat(seed=1)[:-1] + b',"temperature":[1],"temperature":0.5}'
    assert PARSERS[Endpoint.CHAT].parse(body).temperature == 0.5


@pytest.mark.parametrize("name", ["tools", "documents"])
def test_a_long_float_in_a_free_field_is_refused(name: str) -> None:
    """One takes up to 25 us."""
    short, long = b"1.0123456789012345e-300", b"1." + b"0" * 100 + b"e-300"
    body = b'{"model":"m","messages":[{}],"%b":[{"a":[%b]}]}'
    assert getattr(PARSERS[Endpoint.CHAT].parse(body % (name.encode(), short)), name) == [{"a": [float(short)]}]
    with pytest.raises(MalformedRequest, match=rf"`{name}\S* has a number of 107 characters, more than 32"):
        PARSERS[Endpoint.CHAT].parse(body % (name.encode(), long))


SMALL_FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "model": st.sampled_from(["m", 5]),
        "tools": st.sampled_from([None, [], [{"a": 1.5}], [1], "x"]),
        "stop": st.sampled_from([None, "a", ["a"], 1]),
        "seed": st.sampled_from([None, 1, "2", 1.5, []]),
        "stream": st.sampled_from([None, True, 1, "true"]),
        "cache_salt": st.sampled_from([None, "s", 1]),
        "vllm_xargs": st.sampled_from([None, {}, 1]),
        "unknown": st.sampled_from([None, 1]),
    },
)


def parsed_or_refused(endpoint: Endpoint, body: bytes) -> Any:
    try:
        parsed = PARSERS[endpoint].parse(body)
    except MalformedRequest:
        return "refused"
    return PARSERS[endpoint].prompt_fields(parsed), parsed.stream, parsed.cache_salt, has_engine_fields(parsed)


@given(fields=SMALL_FIELDS, endpoint=st.sampled_from([Endpoint.CHAT, Endpoint.COMPLETIONS]))
def test_a_large_body_is_read_as_a_small_one(fields: dict[str, Any], endpoint: Endpoint) -> None:
    body = json.dumps({"messages": [{}], "prompt": "a", **fields}).encode()
    small = parsed_or_refused(endpoint, body)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parse, "MAX_DECODED_BYTES", len(body) - 1)
        assert parsed_or_refused(endpoint, body) == small


@pytest.mark.parametrize("name", ["tools", "documents", "stop", "user", "model", "chat_template", "tool_choice"])
def test_a_body_has_a_bounded_number_of_bytes_to_decode(name: str) -> None:
    """Besides messages and prompt."""
    value = {"tools": b'[{"a":"%b"}]', "documents": b'[{"a":"%b"}]'}.get(name, b'"%b"') % (b"a" * 4 * 1024 * 1024)
    body = b'{"model":"m","messages":[{"content":"%b"}],"%b":%b}'
    with pytest.raises(MalformedRequest, match="besides messages and prompt, more than 4194304"):
        PARSERS[Endpoint.CHAT].parse(body % (b"a", name.encode(), value))
    assert PARSERS[Endpoint.CHAT].parse(body % (value.replace(b'"', b""), b"x", b"1")).model == "m"


def test_large_prompt_embeddings_stay_undecoded() -> None:
    """They are forwarded, and change the prompt inside the engine."""
    body = b'{"model":"m","prompt":"a","prompt_embeds":%b}'
    large = PARSERS[Endpoint.COMPLETIONS].parse(body % (b'"%b"' % (b"A" * 5 * 1024 * 1024)))
    assert len(memoryview(PARSERS[Endpoint.COMPLETIONS].prompt_fields(large)["prompt_embeds"])) > 5 * 1024 * 1024
    null = PARSERS[Endpoint.COMPLETIONS].parse(body % b"null" + b" " * 5 * 1024 * 1024)
    assert "prompt_embeds" not in PARSERS[Endpoint.COMPLETIONS].prompt_fields(null)


def test_only_the_last_of_a_repeated_field_of_a_large_body_is_decoded() -> None:
    """Four strings of 8 MiB would be decoded in 40 ms."""
    body = b'{"model":"m","messages":[{}],"user":"%b","user":5,"user":"u"}' % (b"a" * 4 * 1024 * 1024)
    assert PARSERS[Endpoint.CHAT].parse(body).user == "u"


@pytest.mark.parametrize("name", ["suffix", "prompt_embeds"])
def test_a_completion_has_no_field_of_any_type(name: str) -> None:
    """A list of two million numbers would be decoded."""
    with pytest.raises(MalformedRequest, match=f"`{name}"):
        PARSERS[Endpoint.COMPLETIONS].parse(b'{"model":"m","prompt":"a","%b":[1.5,2.5]}' % name.encode())


@pytest.mark.parametrize("name", sorted(CONTAINERS))
def test_deeply_nested_objects_cost_no_more_than_shallow_ones(name: str) -> None:
    """Below a few levels they are dropped."""
    deep = f'{{"{name}":' * 500 + "1" + "}" * 500
    assert without_engine_fields(deep.encode()).count(name.encode()) == MAX_NESTING + 1


@pytest.mark.parametrize(
    "body",
    [
        b'{ "model" : "m" }',
        b'{ "model" : "say \\"rid\\" and \\u0022kv_transfer_params\\u0022" }',
        b'{ "text" : "rid", "inner": {"rid": 1} }',
        b'{ "label" : "rid" }',
    ],
)
def test_a_body_without_engine_fields_is_unchanged(body: bytes) -> None:
    """Also if one appears in a text or in a nested object."""
    assert without_engine_fields(body) is body


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"])
def test_bodies_in_other_encodings_are_refused(encoding: str) -> None:
    """Python's JSON module, which engines use, would decode them."""
    body = ' {"rid": "x"}'.encode(encoding)
    assert json.loads(body) == {"rid": "x"}
    assert may_be_json_object(body)
    with pytest.raises(MalformedRequest):
        without_engine_fields(body)


@pytest.mark.parametrize("body", [b"", b"--boundary\r\n", b"model=m", b"[1]"])
def test_bodies_that_no_engine_decodes_as_an_object_are_not_parsed(body: bytes) -> None:
    """Mostly forms with files."""
    assert not may_be_json_object(body)


@pytest.mark.parametrize(
    "body", [b'{"rid": 1', b'["rid"]', b'{"x": ' + DEEP + b', "rid": 1}', b'{"\xff": 1, "rid": 1}']
)
def test_an_undecodable_body_that_may_have_engine_fields_is_refused(body: bytes) -> None:
    """It is never forwarded unchecked."""
    with pytest.raises(MalformedRequest):
        without_engine_fields(body)
