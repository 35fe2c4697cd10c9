"""Engines start, die and restart, and publish KV events."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any

import httpx
import msgspec
import pytest
import zmq
import zmq.asyncio

from loadtest.mock_engine.faults import Fault, FaultKind
from loadtest.mock_engine.mock_config import KvEventConfig, MockEngineConfig
from loadtest.mock_engine.mock_engine import MockEngine, running_engines, serve
from router.types import PodLoad

pytestmark = [pytest.mark.net, pytest.mark.anyio]
MakeConfig = Callable[..., MockEngineConfig]
Running = Callable[..., AbstractAsyncContextManager[tuple[MockEngine, httpx.AsyncClient]]]
Batch = tuple[int, list[dict[str, Any]]]
DEADLINE_S = 30.0
CHAT = "/v1/chat/completions"


def ask(topic: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": " ".join(f"{topic}{i}" for i in range(60))}], "max_tokens": 20}


async def replayed(engine: MockEngine) -> list[Batch]:
    """All events of the replay buffer."""
    batches: list[Batch] = []
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger = 0
        client.connect(engine.kv_replay_endpoint)
        await client.send_multipart([b"", bytes(8)])
        while True:
            *_, sequence, payload = await client.recv_multipart()
            if not payload:
                return batches
            batches.append((int.from_bytes(sequence, "big"), msgspec.msgpack.decode(payload)[1]))


def counted(batches: list[Batch]) -> Counter[int]:
    """Copies of each block, as a subscriber counts them."""
    copies = Counter[int]()
    for _, events in batches:
        for event in events:
            if event["type"] == "BlockStored":
                copies.update(event["block_hashes"])
            elif event["type"] == "BlockRemoved":
                copies.subtract(event["block_hashes"])
            else:
                copies.clear()
    return +copies


async def test_events_replayed_over_the_wire_are_the_cache(running: Running) -> None:
    """Prompts and outputs, stored twice, evicted, cleared: the counts follow."""
    async with running(num_blocks=16, max_model_len=256) as (engine, client):
        for topic in ("a", "a", "b", "c", "d"):
            assert (await client.post(CHAT, json=ask(topic))).status_code == 200
        batches = await replayed(engine)
        assert [sequence for sequence, _ in batches] == list(range(len(batches)))
        copies = counted(batches)
        assert 0 < copies.total() <= 16
        assert any(event["type"] == "BlockRemoved" for _, events in batches for event in events)
        await client.post("/reset_prefix_cache")
        assert counted(await replayed(engine)) == copies
        await client.post(CHAT, json=ask("e"))
        assert counted(await replayed(engine)).total() == 5


async def test_a_restart_is_a_new_epoch(running: Running) -> None:
    """Requests break, the cache is empty, the sequence starts at 0, the addresses stay."""
    async with running() as (engine, client):
        for topic in ("a", "b"):
            await client.post(CHAT, json=ask(topic))
        before = (engine.url, engine.kv_endpoint, engine.kv_replay_endpoint)
        assert (await client.post("/_fault", json={"kind": "restart"})).status_code == 200
        assert (engine.url, engine.kv_endpoint, engine.kv_replay_endpoint) == before
        assert await replayed(engine) == []
        answer = (await client.post(CHAT, json=ask("a"))).json()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert (await replayed(engine))[0][0] == 0


async def test_a_restart_breaks_running_requests(running: Running) -> None:
    """Streams end without an end marker, hanging requests end, and nothing stays in the pod."""
    async with running(time_scale=1000.0) as (engine, client):
        engine.inject(Fault(kind=FaultKind.HANG))
        hanging = asyncio.ensure_future(client.post(CHAT, json=ask("a")))
        while engine.faults.armed:  # there is no event to wait for
            await asyncio.sleep(0)
        with pytest.raises(httpx.RemoteProtocolError):
            async with client.stream("POST", CHAT, json=ask("a") | {"stream": True}) as answer:
                assert engine.load.running == 1
                engine.inject(Fault(kind=FaultKind.RESTART))
                await answer.aread()
        with pytest.raises(httpx.RemoteProtocolError):
            await hanging
        assert engine.load == PodLoad()
        assert (await client.get("/health")).status_code == 200


async def test_a_refusing_engine_accepts_again_after_heal(running: Running) -> None:
    """Pooled connections are closed; `heal` listens on the same port again."""
    async with running() as (engine, client):
        assert (await client.post("/_fault", json={"kind": "refuse"})).status_code == 200
        with pytest.raises(httpx.ConnectError):
            await client.get("/health")
        engine.inject(Fault(kind=FaultKind.UNHEALTHY))
        await engine.heal()
        assert (await client.get("/health")).status_code == 200


async def test_a_refusal_can_end_by_itself(running: Running) -> None:
    """After `for_s` the engine listens again, with its cache."""
    async with running() as (_, client):
        await client.post(CHAT, json=ask("a"))
        await client.post("/_fault", json={"kind": "refuse", "for_s": 0.05})
        answer = None
        while answer is None:
            try:
                answer = await client.post(CHAT, json=ask("a"))
            except httpx.ConnectError:
                await asyncio.sleep(0.01)
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_lost_events_leave_a_gap(running: Running) -> None:
    """The fault reaches the publisher."""
    async with running() as (engine, client):
        await client.post("/_fault", json={"kind": "lose_events", "replayable": False})
        await client.post(CHAT, json=ask("a"))
        assert (await replayed(engine))[0][0] == 1


async def test_engines_of_a_fleet_share_only_the_process(make_config: MakeConfig) -> None:
    """Each engine has its own ports and cache."""
    async with asyncio.timeout(DEADLINE_S), running_engines([make_config() for _ in range(3)]) as engines:
        assert len({(engine.url, engine.kv_endpoint) for engine in engines}) == 3
        cached = []
        for engine in engines:
            async with httpx.AsyncClient(base_url=engine.url) as client:
                usage = (await client.post(CHAT, json=ask("a"))).json()["usage"]
                cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        assert cached == [0, 0, 0]


async def test_an_engine_that_cannot_listen_leaves_nothing_behind(running: Running, make_config: MakeConfig) -> None:
    """Its event port is free again as well."""
    async with running() as (engine, _):
        port = int(engine.url.rpartition(":")[2])
        second = MockEngine(make_config(port=port))
        with pytest.raises(OSError, match="in use"):
            await second.start()
        events = KvEventConfig(port=int(second.kv_endpoint.rpartition(":")[2]))
        async with MockEngine(make_config(kv_events=events)) as third:
            assert third.kv_endpoint == second.kv_endpoint


async def test_a_fleet_that_cannot_start_leaves_nothing_behind(make_config: MakeConfig) -> None:
    """The port of the first engine is free again after the second one failed."""
    async with asyncio.timeout(DEADLINE_S):
        async with MockEngine(make_config()) as engine:
            port = int(engine.url.rpartition(":")[2])
        configs = [make_config(port=port), make_config(port=port)]
        with pytest.raises(OSError, match="in use"):
            await running_engines(configs).__aenter__()
        async with MockEngine(make_config(port=port)):
            pass


def test_serve_runs_until_a_signal(make_config: MakeConfig) -> None:
    """`ready` gets the running fleet; SIGTERM stops it."""
    urls: list[str] = []

    def ready(engines: Sequence[MockEngine]) -> None:
        urls.extend(engine.url for engine in engines)
        os.kill(os.getpid(), signal.SIGTERM)

    asyncio.run(serve([make_config(), make_config()], ready, 0.0))
    assert len(set(urls)) == 2
    with pytest.raises(httpx.ConnectError):
        httpx.get(urls[0])


async def test_a_drained_engine_refuses_connections_and_completes_its_streams(running: Running) -> None:
    """Idle connections are closed."""
    async with running(time_scale=1.0) as (engine, client):
        await client.get("/health")
        async with client.stream("POST", CHAT, json=ask("a") | {"stream": True}) as answer:
            draining = asyncio.ensure_future(engine.drain(DEADLINE_S))
            await asyncio.sleep(0)
            with pytest.raises(httpx.ConnectError):
                await client.get("/health")
            assert not draining.done()
            assert (await answer.aread()).rstrip().endswith(b"[DONE]")
        await draining


async def test_a_drain_ends_when_time_is_up(running: Running) -> None:
    async with (
        running(time_scale=1000.0) as (engine, client),
        client.stream("POST", CHAT, json=ask("a") | {"stream": True}) as answer,
    ):
        await engine.drain(0.01)
        await engine.stop()
        with pytest.raises(httpx.RemoteProtocolError):
            await answer.aread()


@pytest.mark.parametrize("turns", range(6))
async def test_a_stopped_engine_has_closed_the_connections_that_it_was_accepting(running: Running, turns: int) -> None:
    async with running() as (engine, _):
        with socket.create_connection((engine.config.host, engine.port)) as client:
            for _ in range(turns):
                await asyncio.sleep(0)
            await engine.stop()
            client.setblocking(False)
            async with asyncio.timeout(DEADLINE_S):
                with suppress(ConnectionResetError):
                    assert await asyncio.get_running_loop().sock_recv(client, 1) == b""


async def test_a_dead_engine_is_empty_after_heal(running: Running) -> None:
    """DIE is REFUSE and RESTART."""
    async with running() as (engine, client):
        await client.post(CHAT, json=ask("a"))
        assert (await client.post("/_fault", json={"kind": "die"})).status_code == 200
        with pytest.raises(httpx.ConnectError):
            await client.get("/health")
        await engine.heal()
        answer = (await client.post(CHAT, json=ask("a"))).json()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
