"""What does a router do beside requests?

Routers of three kinds before a hundred mock pods (alone; with a Redis; of two workers), and what is done to each: its
policies change, its metrics are read, pods come and go, engines announce blocks, the cluster's index is read. This file
measures nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import numpy as np
import zmq

from loadtest.bodies import MODEL
from loadtest.peers.processes import launched
from loadtest.rig import PLAN
from router.cli.child_processes import all_pods_trusted, free_port, router_config
from router.config.schema import ModelConfig
from router.config.shipped import shipped
from router.index.cluster import EntryKind
from router.index.holders import HolderFacts
from router.sim.mock.event_publisher import encode_batch
from router.stores.holder_writer import HolderWriter, WriteResult
from router.stores.index_reader import IndexReader
from router.stores.redis_connection import RedisConnection, parse_url
from router.stores.redis_schema import Keys, scope_of
from router.types import BlockChange, BlocksRemoved, BlocksStored, Generation, Tier
from router.wiring.agent import generation_of
from tests.redis_process import redis_process

PODS = 100
ADDED = 10
"""Pods that come and go."""
FOLLOWED = 10
"""Pods that publish KV events."""
BLOCK_TOKENS = PLAN.block_size_tokens
EVENT_BLOCKS, LONG_EVENT_BLOCKS = 64, 2048
CACHE_BLOCKS = 100_000
"""Of one pod: 1.6 million tokens."""
HOLDERS, HOLDER_BLOCKS, ENTRY_BLOCKS = 20, 50_000, 1_000
"""A million blocks in the cluster's index."""
LIFETIME_S = 600.0
POLICY = "cost_aware"


class Kind(Enum):
    """Of the router that an activity needs."""

    ALONE = "alone"
    CLUSTER = "with a Redis"
    WORKERS = "of two workers"


KINDS = tuple(Kind)

Act: TypeAlias = Callable[[], Awaitable[None]]


@dataclass(slots=True)
class Stage:
    """A running router and what is around it."""

    port: int
    looks: Path
    """Its watched processes write to files that begin so."""
    policies: Path
    ports: Sequence[int]
    client: httpx.AsyncClient
    engine: Engine
    pid: int
    redis: str = ""

    async def get(self, path: str) -> httpx.Response:
        """Its answer, whatever it is."""
        return await self.client.get(path)

    def workers(self) -> list[int]:
        """The processes that serve, where several do."""
        return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]


class Engine:
    """One publisher of KV events that several pods are said to be behind."""

    def __init__(self) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
        self._socket.set_hwm(0)
        self.endpoint = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._sequence = itertools.count()
        self._names = itertools.count(1)
        self._random = np.random.default_rng(1)

    def store(self, blocks: int) -> tuple[int, ...]:
        """A prompt of so many fresh blocks; their names."""
        tokens = tuple(self._random.integers(0, 150_000, blocks * BLOCK_TOKENS).tolist())
        names = tuple(itertools.islice(self._names, blocks))
        self._send(BlocksStored(block_hashes=names, parent_hash=None, tokens=tokens, block_size_tokens=BLOCK_TOKENS))
        return names

    def remove(self, names: tuple[int, ...]) -> None:
        """These blocks."""
        self._send(BlocksRemoved(block_hashes=names))

    def close(self) -> None:
        """What was not sent is lost."""
        self._socket.close(linger=0)

    def _send(self, event: BlocksStored | BlocksRemoved) -> None:
        number = next(self._sequence).to_bytes(8, "big")
        self._socket.send_multipart([b"", number, encode_batch([event], "map", 0.0)])


# --- routers ------------------------------------------------------------------------------------------------


@asynccontextmanager
async def staged(kind: Kind, ports: Sequence[int], folder: Path, *, holds: bool) -> AsyncIterator[Stage]:
    """A watched router of that kind that trusts all pods."""
    here = folder / kind.name.lower()
    here.mkdir()
    policies = Path(shutil.copytree(shipped("policies"), here / "policies"))
    engine, port = Engine(), free_port()
    async with AsyncExitStack() as stack:
        stack.callback(engine.close)
        redis = stack.enter_context(redis_process()).url if kind is Kind.CLUSTER else ""
        config = here / "warmroute.yaml"
        config.write_text(json.dumps(_config(kind, ports, engine.endpoint, redis)))
        watched = [Path(__file__).with_name("watched.py"), here / "looks", *(["holds"] if holds else [])]
        serve = ["serve", "--config", config, "--policies", policies, "--port", port]
        command = list(map(str, [sys.executable, *watched, *serve]))
        router = stack.enter_context(launched("router", command, here, {}))
        client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=30)
        await stack.enter_async_context(client)

        async def trusted() -> bool | None:
            return await all_pods_trusted(client, len(ports)) or None

        await router.until(trusted)
        yield Stage(port, here / "looks", policies, ports, client, engine, router.process.pid, redis)


def _config(kind: Kind, ports: Sequence[int], endpoint: str, redis: str) -> dict[str, Any]:
    config = router_config([f"http://127.0.0.1:{port}" for port in ports], PLAN)
    config |= {"policy": POLICY, "probes": {"self_test": False, "load_interval_s": 0.25}}
    for pod in config["pods"][:FOLLOWED]:
        pod["kv_events"] = {"endpoint": endpoint}
    if redis:
        config["index"] = {"redis": {"url": redis, "holder_ttl_s": LIFETIME_S}}
    if kind is Kind.WORKERS:
        config["listen"] = {"workers": 2}
    return config


# --- what is done -------------------------------------------------------------------------------------------


@asynccontextmanager
async def nothing(_stage: Stage) -> AsyncIterator[Act]:
    """Pods are scraped and probed all the while."""

    async def act() -> None:
        await asyncio.sleep(0.1)

    yield act


@asynccontextmanager
async def reload(stage: Stage) -> AsyncIterator[Act]:
    """A number in a policy's file changes."""
    path, numbers = stage.policies / f"{POLICY}.yaml", itertools.count(1)
    before = path.read_text()

    async def act() -> None:
        path.write_text(before.replace("reuse: 1.5", f"reuse: 1.5{next(numbers)}"))
        (await stage.client.post("/admin/policies/reload")).raise_for_status()

    yield act


@asynccontextmanager
async def broken_reload(stage: Stage) -> AsyncIterator[Act]:
    """A policy's file has a mistake, and has it no more."""
    path, breaks = stage.policies / f"{POLICY}.yaml", itertools.cycle((True, False))
    before = path.read_text()

    async def act() -> None:
        broken = next(breaks)
        path.write_text(before + "\nno_such_key: 1\n" if broken else before)
        assert ((await stage.client.post("/admin/policies/reload")).status_code == 400) is broken

    yield act
    path.write_text(before)


@asynccontextmanager
async def metrics(stage: Stage) -> AsyncIterator[Act]:
    """They are scraped."""

    async def act() -> None:
        assert len((await stage.get("/metrics")).content) > 10_000

    yield act


@asynccontextmanager
async def admin(stage: Stage) -> AsyncIterator[Act]:
    """People look at it, and ask why."""
    preview = {"model": MODEL, "messages": [{"role": "user", "content": "Where would this go?"}]}

    async def act() -> None:
        for path in ("/readyz", "/admin/pods", "/v1/models", "/admin/policies"):
            (await stage.get(path)).raise_for_status()
        (await stage.client.post("/admin/preview", json=preview)).raise_for_status()

    yield act


@asynccontextmanager
async def discovery(stage: Stage) -> AsyncIterator[Act]:
    """Pods come, ten at once, and go: each a second life of a mock, by another name."""
    comes = itertools.cycle((True, False))

    async def act() -> None:
        come, some = next(comes), stage.ports[-ADDED:]
        if come:
            added = [{"url": f"http://localhost:{port}", "id": f"added-{port}"} for port in some]
            answers = [await stage.client.post("/admin/pods", json=pod) for pod in added]
        else:
            answers = [await stage.client.delete(f"/admin/pods/added-{port}") for port in some]
        assert all(answer.is_success for answer in answers)

    yield act


@asynccontextmanager
async def kv_events(stage: Stage) -> AsyncIterator[Act]:
    """Ten pods announce prompts of 64 blocks, a hundred a second in all, and drop as many."""

    async def act() -> None:
        stage.engine.remove(stage.engine.store(EVENT_BLOCKS))

    yield act


@asynccontextmanager
async def long_kv_events(stage: Stage) -> AsyncIterator[Act]:
    """Ten pods announce a prompt of 32,768 tokens in one event."""

    async def act() -> None:
        stage.engine.remove(stage.engine.store(LONG_EVENT_BLOCKS))

    yield act


@asynccontextmanager
async def full_cache(stage: Stage) -> AsyncIterator[Act]:
    """The blocks of ten large caches come, a million in all, as fast as a core makes them."""
    sent = 0

    async def act() -> None:
        nonlocal sent
        if sent < CACHE_BLOCKS:
            sent += len(stage.engine.store(EVENT_BLOCKS * 4))

    yield act


@asynccontextmanager
async def pods_with_full_caches_go(stage: Stage) -> AsyncIterator[Act]:
    """One after the other, each with what it had; and come again."""
    numbers = itertools.cycle(range(FOLLOWED))

    async def act() -> None:
        number = next(numbers)
        pod = {"url": f"http://127.0.0.1:{stage.ports[number]}", "id": f"pod-{number}"}
        (await stage.client.delete(f"/admin/pods/pod-{number}")).raise_for_status()
        (await stage.client.post("/admin/pods", json=pod)).raise_for_status()

    yield act


def _generation() -> Generation:
    """Of the mocks' model, as the router knows it."""
    return generation_of(ModelConfig.model_validate(router_config([], PLAN)["models"][0]))


@asynccontextmanager
async def index_log(stage: Stage) -> AsyncIterator[Act]:
    """Publishers write a million blocks into the cluster's index."""
    connection = RedisConnection(parse_url(stage.redis), timeout_s=10)
    generation, random = _generation(), np.random.default_rng(2)
    holders = [HolderWriter(connection, Keys(), generation, f"pod-{n}", LIFETIME_S) for n in range(HOLDERS)]
    for number, holder in enumerate(holders):
        await holder.begin(EntryKind.EMPTY, HolderFacts(url=f"http://pod-{number}"), take_over=True)
    written = itertools.count()

    async def act() -> None:
        if next(written) * ENTRY_BLOCKS < HOLDER_BLOCKS:
            for holder in holders:
                blocks = random.integers(1, 2**63, ENTRY_BLOCKS, dtype=np.uint64)
                answer = await holder.apply([BlockChange(Tier.GPU, True, blocks.tolist())], complete=True)
                assert answer is WriteResult.OK

    yield act
    await connection.close()


@asynccontextmanager
async def index_snapshot(stage: Stage) -> AsyncIterator[Act]:
    """All of them are read anew, because an entry of each does not follow on the one before."""
    connection = RedisConnection(parse_url(stage.redis), timeout_s=10)
    generation = _generation()
    rows, lost = await IndexReader(connection, Keys()).rows(generation), iter([True])

    async def act() -> None:
        if next(lost, False):
            for holder, row in rows.items():
                entry = {"k": EntryKind.CHANGE, "h": holder, "e": row.epoch, "s": row.seq + 9}
                await connection.client.xadd(Keys().log(scope_of(generation)), entry)

    yield act
    read = re.search(r"^warmroute_index_holders_read (\S+)", (await stage.get("/metrics")).text, re.MULTILINE)
    assert read and float(read[1]) >= len(rows)
    await connection.close()


@asynccontextmanager
async def a_worker_joins(stage: Stage) -> AsyncIterator[Act]:
    """One of two is told to end, and another takes its place: its own first seconds count as well."""
    workers = stage.workers()
    dies = iter([True])

    async def act() -> None:
        if next(dies, False):
            os.kill(workers[0], signal.SIGTERM)

    yield act


@dataclass(frozen=True, slots=True)
class Activity:
    """`prepared` gives what is done every `every_s`; without `load` nobody asks anything meanwhile."""

    prepared: Callable[[Stage], AbstractAsyncContextManager[Act]]
    kind: Kind = Kind.ALONE
    every_s: float = 1.0
    load: bool = True


ACTIVITIES: Mapping[str, Activity] = {
    "nothing": Activity(nothing, load=False),
    "requests": Activity(nothing),
    "reload": Activity(reload),
    "broken-reload": Activity(broken_reload),
    "metrics": Activity(metrics),
    "admin": Activity(admin),
    "discovery": Activity(discovery),
    "kv-events": Activity(kv_events, every_s=0.1),
    "long-kv-events": Activity(long_kv_events),
    "full-caches": Activity(full_cache, every_s=0.0),
    "metrics-full": Activity(metrics),
    "full-caches-go": Activity(pods_with_full_caches_go),
    "redis": Activity(nothing, Kind.CLUSTER),
    "index-log": Activity(index_log, Kind.CLUSTER, every_s=0.1),
    "index-snapshot": Activity(index_snapshot, Kind.CLUSTER),
    "cluster-metrics": Activity(metrics, Kind.CLUSTER),
    "workers": Activity(nothing, Kind.WORKERS),
    "workers-metrics": Activity(metrics, Kind.WORKERS),
    "worker-joins": Activity(a_worker_joins, Kind.WORKERS),
}
