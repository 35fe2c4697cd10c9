"""The gate is called exactly once for every request to /v1; it returns the tenant, or the answer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256

import pytest

from router.admission.gate import AdmissionGate
from router.admission.tenant import OPEN_TENANT, KeyGrant, Tenant, Tenants
from router.errors import AccessDenied, InvalidKey, MalformedRequest, RouterError, Saturated
from tests.api.test_protocol import Edge, connected, echo, post, read_answer

pytestmark = pytest.mark.anyio
LIST_MODELS = b"GET /v1/models HTTP/1.1\r\nhost: h\r\nx-api-key: secret\r\n\r\n"
ACME = Tenant(name="acme")
KEY = b"sk-wr-acme"
BEARER = {b"authorization": b"Bearer " + KEY}
RELOAD = "/v1/load_lora_adapter"


def gate_of(tenant: Tenant = ACME, until_s: float = math.inf) -> AdmissionGate:
    """One tenant with one key."""
    found = Tenants({tenant.name: tenant}, {sha256(KEY).digest(): KeyGrant(tenant, until_s)})
    return AdmissionGate(lambda: found, [RELOAD])


class RecordingGate(AdmissionGate):
    """Records its calls, and answers all with `answer`."""

    def __init__(self, answer: Tenant | RouterError = ACME) -> None:
        self.answer = answer
        self.calls: list[tuple[str, bytes]] = []

    def admit(self, path: str, headers: Mapping[bytes, bytes], now_s: float) -> Tenant | RouterError:
        assert now_s > 1e9
        self.calls.append((path, headers.get(b"x-api-key", b"")))
        return self.answer


def test_without_tenants_every_request_is_admitted() -> None:
    """As the same tenant, with a key or without one."""
    gate = AdmissionGate(control_paths=[RELOAD])
    for headers in ({}, BEARER):
        assert gate.admit("/v1/models", headers, 0.0) is gate.admit(RELOAD, headers, 0.0) is OPEN_TENANT
    assert gate.named("any") is OPEN_TENANT


@pytest.mark.parametrize(
    "headers",
    [
        BEARER,
        {b"authorization": b"bearer  " + KEY},
        {b"x-api-key": KEY},
        {b"authorization": b"Basic abc", b"x-api-key": KEY},
        {**BEARER, b"x-api-key": b"another"},
    ],
)
def test_a_key_is_found_where_the_clients_of_both_apis_send_it(headers: dict[bytes, bytes]) -> None:
    """A bearer token counts before the header of Anthropic's clients."""
    assert gate_of().admit("/v1/messages", headers, 0.0) is ACME


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {b"authorization": b"Bearer"},
        {b"authorization": b"Bearer "},
        {b"authorization": b"Basic " + KEY},
        {b"authorization": b"Bearer " + KEY + b"x", b"x-api-key": KEY},
        {b"x-api-key": KEY[:-1]},
        {b"x-api-key": KEY * 100},
        {b"x-tenant-id": b"acme"},
    ],
)
def test_a_missing_or_unknown_key_is_refused_without_being_repeated(headers: dict[bytes, bytes]) -> None:
    """With 401."""
    refusal = gate_of().admit("/v1/models", headers, 0.0)
    assert isinstance(refusal, InvalidKey)
    assert KEY.decode()[:6] not in str(refusal)


def test_a_key_is_valid_until_its_time() -> None:
    """It is refused from that second on."""
    gate = gate_of(until_s=100.0)
    assert gate.admit("/v1/models", BEARER, 99.9) is ACME
    assert isinstance(gate.admit("/v1/models", BEARER, 100.0), InvalidKey)


def test_a_suspended_tenant_is_refused() -> None:
    """With 403: its key is valid."""
    assert isinstance(gate_of(replace(ACME, is_suspended=True)).admit("/v1/models", BEARER, 0.0), AccessDenied)


def test_only_named_tenants_may_change_engines() -> None:
    """Such a path would change them for the others, too."""
    assert isinstance(gate_of().admit(RELOAD, BEARER, 0.0), AccessDenied)
    allowed = replace(ACME, controls_engines=True)
    assert gate_of(allowed).admit(RELOAD, BEARER, 0.0) is allowed


def test_operators_name_a_tenant() -> None:
    """An unknown one is refused."""
    assert gate_of().named("acme") is ACME
    with pytest.raises(MalformedRequest, match="tenant"):
        gate_of().named("")


@pytest.mark.net
async def test_the_gate_is_called_once_for_each_v1_request() -> None:
    """Forwarded requests, the router's own /v1 endpoints, and requests in a pipeline; no other path."""
    gate = RecordingGate()
    edge = Edge(echo, gate=gate)
    async with connected(edge) as (reader, writer):
        for request in (post(b"a", b"x-api-key: k"), LIST_MODELS, post(b"", path=b"/own")):
            writer.write(request)
            await read_answer(reader)
        writer.write(post(b"b") + LIST_MODELS)
        for _ in range(2):
            await read_answer(reader)
    assert gate.calls == [
        ("/v1/x", b"k"),
        ("/v1/models", b"secret"),
        ("/v1/x", b""),
        ("/v1/models", b"secret"),
    ]
    assert {client.admitted.tenant for client in edge.seen} == {ACME}


@pytest.mark.net
@pytest.mark.parametrize("request_bytes", [post(b"a"), LIST_MODELS], ids=["forwarded", "own"])
async def test_a_refused_request_is_answered_with_the_refusal(request_bytes: bytes) -> None:
    """Both for forwarded requests and for the router's own endpoints. The connection stays open."""
    refusal = Saturated("quota used up")
    edge = Edge(echo, gate=RecordingGate(refusal))
    async with connected(edge) as (reader, writer):
        for _ in range(2):
            writer.write(request_bytes)
            assert (await read_answer(reader))[1] == b"refused"
    assert [client.refusal for client in edge.seen] == [refusal] * 2
