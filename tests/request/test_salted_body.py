"""The salt of a tenant in the bodies of its requests."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.admission.tenant import OPEN_TENANT, Tenant
from router.errors import MalformedRequest
from router.request.reading import RequestReader, appended, with_field
from router.types import Endpoint, InferenceRequest
from tests.request.test_reading import CHAT, POD, make_reader

ACME, OTHER = Tenant(name="acme", salt="a" * 32), Tenant(name="other", salt="b" * 32)
BODIES: dict[Endpoint, dict[str, Any]] = {
    Endpoint.CHAT: CHAT,
    Endpoint.COMPLETIONS: {"model": "m", "prompt": "hi"},
    Endpoint.EMBEDDINGS: {"model": "m", "input": "hi"},
    Endpoint.MESSAGES: CHAT,
    Endpoint.RESPONSES: {"model": "m", "input": "hi"},
    Endpoint.OTHER: {"model": "m", "query": "hi"},
}
VALUES = st.recursive(
    st.none() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@given(fields=st.dictionaries(st.text(), VALUES, min_size=1), blanks=st.sampled_from(["", " ", "\n\t "]))
def test_only_the_salt_changes(fields: dict[str, Any], blanks: str) -> None:
    """For any other values and blanks, and where a client has put a salt."""
    body = f"{blanks}{json.dumps(fields)}{blanks}".encode()
    expected = {**fields, "cache_salt": "s"}
    assert json.loads(appended(body, b'"cache_salt":"s"')) == expected
    assert json.loads(with_field(body, "cache_salt", "s")) == expected


def sent(
    body: bytes, endpoint: Endpoint = Endpoint.CHAT, tenant: Tenant = ACME, reader: RequestReader | None = None
) -> InferenceRequest:
    return (reader or make_reader()).read(endpoint, {}, body, "r", tenant)


@pytest.mark.parametrize("endpoint", BODIES)
def test_every_request_for_an_engine_has_the_salt_of_its_tenant(endpoint: Endpoint) -> None:
    """In its body and in the router's hashes; other fields stay as they are."""
    fields = BODIES[endpoint]
    request = sent(json.dumps(fields).encode(), endpoint)
    assert json.loads(request.body) == {**fields, "cache_salt": ACME.salt}
    assert request.salt == ACME.salt
    without = sent(json.dumps(fields).encode(), endpoint, OPEN_TENANT)
    assert json.loads(without.body) == fields and without.salt == ""


@pytest.mark.parametrize("endpoint", BODIES)
@pytest.mark.parametrize("key", ["cache_salt", "cache_s\\u0061lt"])
def test_a_salt_of_the_client_is_combined_with_that_of_its_tenant(endpoint: Endpoint, key: str) -> None:
    """It separates a tenant's own users, and reaches no other tenant's prefixes, even with their salt."""
    seen = set()
    for tenant in (ACME, OTHER):
        for own in ("x", "y", OTHER.salt, ACME.salt):
            body = json.dumps(BODIES[endpoint])[:-1] + f', "{key}": "{own}"}}'
            request = sent(body.encode(), endpoint, tenant)
            assert json.loads(request.body)["cache_salt"] == request.salt
            seen.add(request.salt)
    assert len(seen | {ACME.salt, OTHER.salt}) == 10
    assert all(len(salt) == 32 for salt in seen)


@pytest.mark.parametrize(
    "text",
    [
        '{"cache_salt": null, "model": "m", "messages": [{}]}',
        '{"cache_salt": "x", "model": "m", "messages": [{}], "cache_salt": null}',
        '{"model": "m", "messages": [{"role": "user", "content": "}"}]}\n  ',
    ],
)
def test_the_last_salt_is_that_of_the_tenant(text: str) -> None:
    """Engines take the last of duplicate keys."""
    assert json.loads(sent(text.encode()).body)["cache_salt"] == ACME.salt


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"{}", {"cache_salt": ACME.salt}),
        (b'{"input": "hi"}', {"input": "hi", "cache_salt": ACME.salt}),
        (b'{"input": "hi", "cache_salt": 5}', {"input": "hi", "cache_salt": ACME.salt}),
        (b'{"model": "m", "cache_salt": ["x"]}', {"model": "m", "cache_salt": ACME.salt}),
    ],
)
def test_a_body_that_is_forwarded_unread_has_the_salt_as_well(body: bytes, expected: dict[str, Any]) -> None:
    """Also without a model or with a salt of another type."""
    assert json.loads(sent(body, Endpoint.OTHER).body) == expected


def test_a_body_that_only_an_engine_might_decode_is_refused() -> None:
    """Without a salt it would share prefixes."""
    with pytest.raises(MalformedRequest, match="not valid JSON"):
        sent('{"input": "hi"}'.encode("utf-16"), Endpoint.OTHER)


@pytest.mark.parametrize("body", [b"", b"--boundary\r\n", b"[1]"])
def test_a_body_without_an_object_is_unchanged(body: bytes) -> None:
    """Such as a form."""
    assert sent(body, Endpoint.OTHER).body == body


def test_an_engine_that_refuses_the_field_does_not_get_it() -> None:
    """TensorRT-LLM knows it in chats only. Hashes have it in any case."""
    reader = make_reader(replace(POD, engine="trtllm"))
    completion = sent(json.dumps(BODIES[Endpoint.COMPLETIONS]).encode(), Endpoint.COMPLETIONS, reader=reader)
    assert json.loads(completion.body) == BODIES[Endpoint.COMPLETIONS]
    assert completion.salt == ACME.salt
    assert "cache_salt" in json.loads(sent(json.dumps(CHAT).encode(), reader=reader).body)


def test_sessions_of_two_tenants_are_not_the_same() -> None:
    """Without tenants they are as the client names them."""
    named = {b"x-session-id": b"s"}
    body = json.dumps(CHAT).encode()
    sessions = [make_reader().read(Endpoint.CHAT, named, body, "r", one).session for one in (ACME, OTHER, OPEN_TENANT)]
    assert len(set(sessions)) == 3 and sessions[2] == "s"
