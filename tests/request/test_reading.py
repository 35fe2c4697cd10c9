"""What a request is made of, and the fields of its body that no engine gets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from router.admission.tenant import OPEN_TENANT, Tenant
from router.config.schema import Edge, Limits
from router.endpoints import endpoint_of
from router.engines.steering import STEERING_FIELDS
from router.errors import MalformedRequest, NoReadyPod, UnknownModel
from router.fleet.fleet import Fleet
from router.request.inbound import first_values
from router.request.reading import RequestReader
from router.types import MAX_NAME_CHARACTERS, Endpoint, InferenceRequest, Pod
from tests.kit.scenes import make_pod

POD = make_pod("a", models=("m",), adapters=("lora",))
OTHER_POD = make_pod("b", models=("n",))
Headers = Sequence[tuple[bytes, bytes]]
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
FORWARDED = {"id": "x", "model": "m", "prompt": "p"}


def make_reader(
    *pods: Pod,
    edge: Edge | None = None,
    max_messages: int = Limits().max_messages,
    configured: frozenset[str] = frozenset(),
) -> RequestReader:
    fleet = Fleet()
    fleet.sync(pods or [POD])
    return RequestReader(fleet, edge or Edge(), max_messages, configured)


def read(reader: RequestReader, body: object, path: str = "/v1/rerank", headers: Headers = ()) -> InferenceRequest:
    """The request with a body of these bytes, or of this JSON."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return reader.read(endpoint_of(path), first_values([*headers]), raw, "r", OPEN_TENANT)


@pytest.mark.parametrize(
    ("body", "is_refused"),
    [
        (b'{"model":"m","\xff":1}', True),
        (b'{"model":"m","rid":"\xff"}', False),
        (b'{"model":"m","pr\\u0069ority":1,"input":"\xc3\xa9"}', False),
    ],
)
def test_a_body_of_another_endpoint_is_read_once(body: bytes, *, is_refused: bool) -> None:
    """Only one that is not UTF-8 is read again; keys must be."""
    reader = make_reader()
    if is_refused:
        with pytest.raises(MalformedRequest, match="not valid JSON"):
            read(reader, body)
    else:
        left = read(reader, body).body
        assert not {"rid", "priority"} & json.loads(left.decode(errors="replace")).keys()


def test_a_chat_with_too_many_messages_is_refused() -> None:
    reader, fields = make_reader(max_messages=2), {**CHAT, "messages": CHAT["messages"] * 3}
    with pytest.raises(MalformedRequest, match=r"3 items, more than 2 \(limits\.max_messages\)") as caught:
        read(reader, fields, "/v1/chat/completions")
    assert caught.value.param == "messages"
    assert read(reader, {**CHAT, "messages": CHAT["messages"] * 2}, "/v1/chat/completions").prompt


def test_engine_fields_are_removed_from_the_body_and_the_prompt_is_kept() -> None:
    reader = make_reader()
    messages = [{"role": "user", "content": text} for text in "abc"]
    plain = json.dumps({"model": "m", "messages": messages}).encode()
    steering = json.dumps({"model": "m", "messages": messages, "kv_transfer_params": {"remote": 1}}).encode()
    for body in (plain, steering):
        request = read(reader, body, Endpoint.CHAT)
        assert json.loads(request.body) == {"model": "m", "messages": messages}
        assert [json.loads(bytes(message)) for message in request.prompt["messages"]] == messages
    assert read(reader, plain, Endpoint.CHAT).body is plain


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings", "/v1/responses", "/tokenize"])
@pytest.mark.parametrize("name", sorted(STEERING_FIELDS))
def test_engine_fields_are_removed_on_every_path(path: str, name: str) -> None:
    """Also where the router reads only the model."""
    reader = make_reader(edge=Edge(extra_paths=("/tokenize",)))
    assert json.loads(read(reader, {**FORWARDED, name: 1}, path).body) == FORWARDED


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings", "/v1/responses"])
def test_engine_fields_are_removed_from_nested_objects(path: str) -> None:
    """On every path; the other members stay."""
    nested = {"vllm_xargs": {"kv_transfer_params": {"remote_host": "h"}, "mine": 1}}
    assert json.loads(read(make_reader(), {**FORWARDED, **nested}, path).body) == {
        **FORWARDED,
        "vllm_xargs": {"mine": 1},
    }


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
def test_engine_fields_of_trusted_clients_are_kept(path: str) -> None:
    """With `edge.trust_engine_fields`."""
    reader = make_reader(edge=Edge(trust_engine_fields=True))
    fields = {**FORWARDED, "kv_transfer_params": {"remote": 1}}
    assert json.loads(read(reader, fields, path).body) == fields


def test_passed_through_bodies_that_are_not_objects_are_unchanged() -> None:
    """They go to the only model; no engine finds a field in them."""
    reader = make_reader()
    for body in (b"--boundary\r\n{}", b"", b"[1]"):
        assert read(reader, body).body is body


def test_passed_through_bodies_in_other_encodings_are_refused() -> None:
    """Engines would decode them; a trusted client may send them."""
    body = json.dumps(FORWARDED).encode("utf-16")
    with pytest.raises(MalformedRequest):
        read(make_reader(), body)
    assert read(make_reader(edge=Edge(trust_engine_fields=True)), body).body is body


def test_a_request_has_the_fields_that_routing_needs() -> None:
    """From body and headers."""
    headers = [(b"x-tenant-id", b"t"), (b"x-session-id", b"s")]
    fields = {"model": "lora", "messages": [{}], "stream": True, "cache_salt": "c", "max_tokens": 7}
    request = read(make_reader(), fields, "/v1/chat/completions", headers)
    assert (request.id, request.endpoint, request.model, request.adapter) == ("r", Endpoint.CHAT, "m", "lora")
    assert (request.stream, request.tenant, request.session, request.salt) == (True, "t", "s", "c")
    assert request.max_output_tokens == 7


def test_a_passed_through_request_has_tenant_and_session() -> None:
    """By the configured headers, in any case of letters."""
    reader = make_reader(edge=Edge(tenant_header="X-Org", session_headers=("X-Chat",)))
    request = read(reader, FORWARDED, headers=[(b"x-org", b"t"), (b"x-chat", b"s")])
    assert (request.id, request.endpoint, request.tenant, request.session) == ("r", Endpoint.OTHER, "t", "s")
    assert (request.model, request.adapter) == ("m", "")


@pytest.mark.parametrize(
    ("place", "kept"),
    [
        ("session_id", "session"),
        ("cache_salt", "salt"),
        ("x-session-id", "session"),
        ("x-tenant-id", "tenant"),
        ("x-claude-code-session-id", "session"),
    ],
)
def test_a_name_that_is_kept_has_a_limit(place: str, kept: str) -> None:
    """A longer one is refused with its place and the limit."""

    def send(name: str) -> InferenceRequest:
        if place.startswith("x-"):
            return read(make_reader(), CHAT, Endpoint.CHAT, [(place.encode(), name.encode())])
        return read(make_reader(), {**CHAT, place: name}, Endpoint.CHAT)

    assert getattr(send("n" * MAX_NAME_CHARACTERS), kept) == "n" * MAX_NAME_CHARACTERS
    with pytest.raises(MalformedRequest, match=rf"`{place}`.*|.*`{place}`") as caught:
        send("n" * (MAX_NAME_CHARACTERS + 1))
    assert str(MAX_NAME_CHARACTERS) in str(caught.value) and caught.value.param == place


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"max_tokens": 5}, 5),
        ({"max_tokens": 5, "max_completion_tokens": 6}, 6),
        ({"max_tokens": 0}, None),
        ({"max_tokens": -1}, None),
        ({"max_tokens": 1}, 1),
    ],
)
def test_the_output_limit_is_the_positive_one(fields: dict[str, int], expected: int | None) -> None:
    """`max_completion_tokens` before `max_tokens`."""
    body = {"model": "m", "messages": [{}], **fields}
    assert read(make_reader(), body, "/v1/chat/completions").max_output_tokens == expected


def test_the_session_header_overrides_the_body() -> None:
    """`session_id` of the body is used without a header."""
    body = {"model": "m", "messages": [{}], "session_id": "body"}
    assert read(make_reader(), body, "/v1/chat/completions").session == "body"
    headers = [(b"x-session-id", b"header")]
    assert read(make_reader(), body, "/v1/chat/completions", headers).session == "header"


@pytest.mark.parametrize("header", [b"x-session-id", b"session-id", b"x-claude-code-session-id"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_the_headers_of_coding_agents_name_the_session(header: bytes, path: str) -> None:
    """By default, on every endpoint."""
    body = {"model": "m", "messages": [{}], "input": "x"}
    assert read(make_reader(), body, path, [(header, b"s")]).session == "s"


def test_the_first_configured_session_header_that_is_present_counts() -> None:
    """Not the first that was sent; an empty one counts as absent."""
    body = {"model": "m", "messages": [{}], "session_id": "body"}
    sent = [(b"x-claude-code-session-id", b"third"), (b"session-id", b"second"), (b"x-session-id", b"")]
    assert read(make_reader(), body, Endpoint.CHAT, sent).session == "second"
    reader = make_reader(edge=Edge(session_headers=()))
    assert read(reader, body, Endpoint.CHAT, sent).session == "body"
    for name in ("x-opencode-session", "x-dynamo-session-id"):
        assert read(make_reader(), body, Endpoint.CHAT, [(name.encode(), b"other")]).session == "other"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (Endpoint.CHAT, {"messages": [{}]}),
        (Endpoint.RESPONSES, {"input": "hi"}),
        (Endpoint.COMPLETIONS, {"prompt": "p"}),
    ],
)
def test_the_key_by_which_clients_share_caches_is_a_session(path: Endpoint, fields: dict[str, Any]) -> None:
    """It is no part of the prompt, and `session_id` counts before it."""
    body = {"model": "m", "prompt_cache_key": "key", **fields}
    request = read(make_reader(), body, path)
    assert request.session == "key" and "prompt_cache_key" not in request.prompt
    assert json.loads(request.body)["prompt_cache_key"] == "key"
    assert read(make_reader(), {**body, "session_id": "own"}, path).session == "own"


def test_an_unknown_model_is_told_from_one_without_pods() -> None:
    """404, or 503 if the model is configured."""
    reader = make_reader(configured=frozenset({"late"}))
    with pytest.raises(UnknownModel) as caught:
        read(reader, {"model": "nobody"})
    assert caught.value.param == "model"
    with pytest.raises(NoReadyPod, match="late"):
        read(reader, {"model": "late"})


@pytest.mark.parametrize("pods", [(), (replace(POD, models=(), adapters=()),)])
def test_no_model_is_unknown_until_a_pod_has_named_one(pods: tuple[Pod, ...]) -> None:
    """503 without pods, and while all of them are joining: a client that tries again is served."""
    fleet = Fleet()
    fleet.sync(pods)
    with pytest.raises(NoReadyPod, match="which models"):
        read(RequestReader(fleet, Edge(), Limits().max_messages, frozenset()), {"model": "m"})


def test_a_request_without_a_model_goes_to_the_only_one() -> None:
    """With several models it is refused."""
    assert read(make_reader(), {"x": 1}).model == "m"
    with pytest.raises(MalformedRequest) as caught:
        read(make_reader(POD, OTHER_POD), {"x": 1})
    assert caught.value.param == "model"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": CHAT["messages"]}),
        ("/v1/completions", {"prompt": "p"}),
        ("/v1/messages", {"messages": CHAT["messages"], "max_tokens": 1}),
        ("/v1/responses", {"input": "p"}),
        ("/tokenize", {"prompt": "p"}),
    ],
)
@pytest.mark.parametrize("given", [{}, {"model": None}, {"model": ""}])
def test_the_only_model_is_written_into_a_body_without_one(
    path: str, fields: dict[str, Any], given: dict[str, Any]
) -> None:
    """TensorRT-LLM and vLLM's Messages require it. A body that names its model is not copied."""
    request = read(make_reader(), {**given, **fields}, path)
    assert (request.model, json.loads(request.body)) == ("m", {**fields, "model": "m"})
    named = json.dumps({"model": "m", **fields}).encode()
    assert read(make_reader(), named, path).body is named
    with pytest.raises(MalformedRequest, match="several models") as caught:
        read(make_reader(POD, OTHER_POD), {**given, **fields}, path)
    assert caught.value.param == "model"


def test_the_salt_of_a_tenant_follows_a_model_that_was_written_into_the_body() -> None:
    """The order in which the reader changes a body."""
    tenant, body = Tenant(name="t", salt="s"), json.dumps({"messages": CHAT["messages"]}).encode()
    request = make_reader().read(Endpoint.CHAT, {}, body, "r", tenant)
    assert json.loads(request.body) == CHAT | {"cache_salt": request.salt}


def test_a_request_without_a_model_waits_for_the_first_one() -> None:
    """No pod has said what it serves: this is not a mistake of the client."""
    fleet = Fleet()
    fleet.sync([make_pod("a", models=())])
    with pytest.raises(NoReadyPod, match="which models"):
        read(RequestReader(fleet, Edge(), 9, frozenset()), {"messages": CHAT["messages"]}, "/v1/chat/completions")
