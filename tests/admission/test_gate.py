"""The gate is called exactly once for every request to /v1, and its refusal is the answer."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from router.admission.gate import AdmissionGate
from router.errors import RouterError, Saturated
from tests.api.test_protocol import Edge, connected, echo, post, read_answer

pytestmark = [pytest.mark.anyio, pytest.mark.net]
LIST_MODELS = b"GET /v1/models HTTP/1.1\r\nhost: h\r\nx-api-key: secret\r\n\r\n"


class RecordingGate(AdmissionGate):
    """Records its calls, and refuses all with `refusal`."""

    def __init__(self, refusal: RouterError | None = None) -> None:
        self.error = refusal
        self.calls: list[tuple[str, bytes]] = []

    def refusal(self, path: str, headers: Mapping[bytes, bytes], peer: str) -> RouterError | None:
        assert peer == "127.0.0.1"
        self.calls.append((path, headers.get(b"x-api-key", b"")))
        return self.error


def test_the_default_gate_admits_every_request() -> None:
    """Until tenants can be configured."""
    assert AdmissionGate().refusal("/v1/models", {}, "127.0.0.1") is None


async def test_the_gate_is_called_once_for_each_v1_request() -> None:
    """Forwarded requests, the router's own /v1 endpoints, and requests in a pipeline; no other path."""
    gate = RecordingGate()
    async with connected(Edge(echo), gate=gate) as (reader, writer):
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


@pytest.mark.parametrize("request_bytes", [post(b"a"), LIST_MODELS], ids=["forwarded", "own"])
async def test_a_refused_request_is_answered_with_the_refusal(request_bytes: bytes) -> None:
    """Both for forwarded requests and for the router's own endpoints. The connection stays open."""
    gate, edge = RecordingGate(Saturated("quota used up")), Edge(echo)
    async with connected(edge, gate=gate) as (reader, writer):
        for _ in range(2):
            writer.write(request_bytes)
            assert (await read_answer(reader))[1] == b"refused"
    assert [received.refusal for received in edge.seen] == [gate.error] * 2
