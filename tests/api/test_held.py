"""Requests for a model without pods wait at the edge, are kept open, and are read when the first pod serves it."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from hashlib import sha256
from math import inf
from typing import Any, cast

import pytest

from router.admission.gate import AdmissionGate
from router.admission.names import ModelName, Names, NamesInUse
from router.admission.tenant import KeyGrant, Tenant, Tenants
from router.config.schema import Edge, Limits
from router.fleet.fleet import PodEvent
from router.frontends.held_requests import HeldRequests
from router.frontends.http.exchange import Exchange
from router.request.context import RequestContext
from router.request.reading import RequestReader
from tests.api.edges import edge_of
from tests.api.test_openai_edge import Forwarder
from tests.api.test_protocol import connected
from tests.kit.cores import CoreOfPods
from tests.kit.scenes import make_pod

pytestmark = [pytest.mark.anyio, pytest.mark.net]
COMMENT = b": keep-alive\n\n"
NAMES = Names({"chat": ModelName("chat", {"n": 1.0})}, (), frozenset({"n"}))


class Zero:
    """An edge in front of a fleet without pods; `m` is configured, `chat` is a name of `n`."""

    def __init__(self, hold_s: float | None = 5.0, gate: AdmissionGate | None = None) -> None:
        self.core, self.forwarded, self.waiting = CoreOfPods([]), list[RequestContext](), asyncio.Event()
        settings = Edge(keep_alive_s=0.01)
        reader = RequestReader(self.core.fleet, settings, 100, frozenset({"m"}), NamesInUse(NAMES))
        held = HeldRequests(self.core.fleet, hold_s, 10, lambda *_: self.waiting.set()) if hold_s else None
        forwarder = Forwarder(self._forward)
        parts: dict[str, Any] = {"edge": settings, "limits": Limits(), "reader": reader, "held": held, "gate": gate}
        self.edge = cast(Any, edge_of(self.core, forwarder, **parts))
        self.edge.connections = set()

    async def _forward(self, context: RequestContext, client: Exchange) -> None:
        self.forwarded.append(context)
        client.start(200, [(b"content-type", b"text/event-stream")])
        client.put(b"data: 1\n\n")
        client.finish()

    def start_pod(self, model: str) -> None:
        self.core.fleet.sync([make_pod("p", models=(model,))])
        self.core.fleet.event("p", PodEvent.PROBE_OK)

    @asynccontextmanager
    async def asked(self, model: str, *, stream: bool) -> AsyncIterator[asyncio.StreamReader]:
        body = json.dumps({"model": model, "stream": stream, "messages": [{"role": "user", "content": "hi"}]}).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\nx-api-key: k\r\n"
        head += "content-length: "
        async with asyncio.timeout(10), connected(self.edge) as (reader, writer):
            writer.write(f"{head}{len(body)}\r\n\r\n".encode() + body)
            yield reader


@pytest.mark.parametrize(("model", "pods"), [("m", "m"), ("chat", "n")])
async def test_a_stream_waits_for_the_first_pod_and_is_kept_open(model: str, pods: str) -> None:
    """Its prompt is read when the pod is there, for the model that it serves."""
    zero = Zero()
    async with zero.asked(model, stream=True) as reader:
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        await reader.readuntil(COMMENT)
        assert not zero.forwarded
        zero.start_pod(pods)
        await reader.readuntil(b"data: 1\n\n")
    (context,) = zero.forwarded
    assert (context.request.model, json.loads(context.request.body)["model"]) == (pods, pods)


@pytest.mark.parametrize("event", [PodEvent.DRAIN, PodEvent.EJECT])
async def test_a_request_waits_while_the_last_pod_leaves(event: PodEvent) -> None:
    """The fleet still knows its model."""
    zero = Zero()
    zero.start_pod("m")
    zero.core.fleet.event("p", event)
    async with zero.asked("m", stream=False) as reader:
        await zero.waiting.wait()
        assert not zero.forwarded
        zero.core.fleet.sync([])
        zero.start_pod("m")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("change", [{"is_suspended": True}, {"data_stays": True}, {"name": "another"}])
async def test_a_tenant_is_what_its_file_says_after_the_wait(change: dict[str, Any]) -> None:
    """It may have been suspended meanwhile, or may have to stay here."""
    acme = Tenant(name="acme")
    found = Tenants({"acme": acme}, {sha256(b"k").digest(): KeyGrant(acme, inf)})
    zero = Zero(gate=AdmissionGate(lambda: found))
    async with zero.asked("m", stream=False) as reader:
        await zero.waiting.wait()
        changed = replace(acme, **change)
        found = Tenants({changed.name: changed}, {})
        zero.start_pod("m")
        head = await reader.readuntil(b"\r\n\r\n")
    assert [one.tenant for one in zero.forwarded] == ([changed] if changed.data_stays else [])
    assert head.startswith(b"HTTP/1.1 200 " if changed.data_stays else b"HTTP/1.1 403 ")


async def test_other_requests_wait_in_silence() -> None:
    zero = Zero()
    async with zero.asked("m", stream=False) as reader:
        await zero.waiting.wait()
        zero.start_pod("m")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("hold_s", "model", "status"), [(0.05, "m", b"503"), (None, "m", b"503"), (5.0, "unknown", b"503")]
)
async def test_who_cannot_wait_is_refused(hold_s: float | None, model: str, status: bytes) -> None:
    """After the time, without it, and for a model that no file names."""
    async with Zero(hold_s).asked(model, stream=False) as reader:
        head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 " + status) and b"\r\nretry-after: 1\r\n" in head


async def test_a_client_that_leaves_meanwhile_is_counted() -> None:
    zero = Zero()
    async with zero.asked("m", stream=False):
        await zero.waiting.wait()
    async with asyncio.timeout(10):
        while not zero.core.ended:
            await asyncio.sleep(0)
    assert [one.result for one in zero.core.ended] == ["client_gone"]


async def test_a_request_that_was_refused_is_not_kept_in_memory() -> None:
    """Its error refers to frames that have its body, and the garbage collector comes late."""

    def contexts() -> int:
        return sum(isinstance(one, RequestContext) for one in gc.get_objects())

    zero = Zero(0.05)
    zero.start_pod("m")
    zero.core.fleet.event("p", PodEvent.DRAIN)
    gc.collect()
    gc.disable()
    try:
        before = contexts()
        async with zero.asked("m", stream=False) as reader:
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 503 ")
        assert contexts() == before
    finally:
        gc.enable()
