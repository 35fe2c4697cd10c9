"""Routers and the work that `stalls.py` gives them besides requests.

Two setups in front of 100 mock pods: one router, one with Redis. The work: policy reloads,
metrics scrapes, pods that join and leave, KV events, reads of the cluster index.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import numpy as np
import zmq

from loadtest.bench.bodies import MODEL
from loadtest.bench.rig import PLAN
from loadtest.commands.child_processes import JSON_CALL, all_pods_trusted, free_port, router_config
from loadtest.faults.hostile_bodies import CONTENT_TYPES, HOSTILE_BODIES
from loadtest.mock_engine.event_publisher import encode_batch
from loadtest.peers.processes import launch
from router.config.load import shipped
from router.config.schema import ModelConfig
from router.index.cluster import EntryKind
from router.index.holders import HolderFacts
from router.stores.holder_writer import HolderWriter, WriteResult
from router.stores.index_reader import IndexReader
from router.stores.redis_connection import RedisConnection
from router.stores.redis_schema import Keys, scope_of
from router.types import BlockChange, BlocksRemoved, BlocksStored, Generation, Tier
from router.wiring.publisher_process import generation_of
from tests.redis_process import address_of, redis_process

PODS = 100
ADDED = 10
"""Pods that join and leave."""
FOLLOWED = 10
"""Pods with KV events."""
BLOCK_TOKENS = PLAN.block_size_tokens
EVENT_BLOCKS, LONG_EVENT_BLOCKS = 64, 2048
CACHE_BLOCKS = 100_000
"""Per pod: 1.6 million tokens."""
HOLDERS, HOLDER_BLOCKS, ENTRY_BLOCKS = 20, 50_000, 1_000
"""One million blocks in the cluster index."""
HOLDER_TTL_S = 600.0
POLICY = "cost_aware"


class RouterSetup(Enum):
    """Router setup that an activity needs."""

    SINGLE = "alone"
    CLUSTER = "with Redis"


SETUPS = tuple(RouterSetup)

Action: TypeAlias = Callable[[], Awaitable[None]]


@dataclass(slots=True)
class Target:
    """A running router and its environment."""

    port: int
    looks: Path
    """Path prefix of the files that its watched processes write."""
    policies: Path
    ports: Sequence[int]
    client: httpx.AsyncClient
    """A client of the admin listener."""
    engine: EventPublisher
    redis: str = ""

    async def get(self, path: str) -> httpx.Response:
        """The response, with any status."""
        return await self.client.get(path)


class EventPublisher:
    """One publisher of KV events, shared by several pods."""

    def __init__(self) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
        self._socket.set_hwm(0)
        self.endpoint = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._sequence = itertools.count()
        self._names = itertools.count(1)
        self._random = np.random.default_rng(1)

    def store(self, blocks: int) -> tuple[int, ...]:
        """Publish a prompt of new blocks; returns their hashes."""
        tokens = tuple(self._random.integers(0, 150_000, blocks * BLOCK_TOKENS).tolist())
        names = tuple(itertools.islice(self._names, blocks))
        self._send(BlocksStored(block_hashes=names, parent_hash=None, tokens=tokens, block_size_tokens=BLOCK_TOKENS))
        return names

    def remove(self, names: tuple[int, ...]) -> None:
        """Publish the removal of these blocks."""
        self._send(BlocksRemoved(block_hashes=names))

    def close(self) -> None:
        """Close the socket without waiting."""
        self._socket.close(linger=0)

    def _send(self, event: BlocksStored | BlocksRemoved) -> None:
        number = next(self._sequence).to_bytes(8, "big")
        self._socket.send_multipart([b"", number, encode_batch([event], "map", 0.0)])


# --- routers ---


@asynccontextmanager
async def running_target(
    setup: RouterSetup, ports: Sequence[int], folder: Path, *, callbacks: bool
) -> AsyncIterator[Target]:
    """Start a watched router and wait until it trusts all pods."""
    here = folder / setup.name.lower()
    here.mkdir()
    policies = Path(shutil.copytree(shipped("policies"), here / "policies"))
    engine, port, admin_port = EventPublisher(), free_port(), free_port()
    async with AsyncExitStack() as stack:
        stack.callback(engine.close)
        redis = stack.enter_context(redis_process()).url if setup is RouterSetup.CLUSTER else ""
        config = here / "warmroute.yaml"
        config.write_text(json.dumps(_config(ports, engine.endpoint, redis)))
        watched = [Path(__file__).with_name("loop_watch.py"), here / "looks", *(["callbacks"] if callbacks else [])]
        serve = ["serve", "--config", config, "--policies", policies, "--port", port, "--admin-port", admin_port]
        command = list(map(str, [sys.executable, *watched, *serve]))
        router = stack.enter_context(launch("router", command, here, {}))
        client = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{admin_port}", headers=JSON_CALL, trust_env=False, timeout=30
        )
        await stack.enter_async_context(client)

        async def trusted() -> bool | None:
            return await all_pods_trusted(client, len(ports)) or None

        await router.until(trusted)
        yield Target(port, here / "looks", policies, ports, client, engine, redis)


def _config(ports: Sequence[int], endpoint: str, redis: str) -> dict[str, Any]:
    config = router_config([f"http://127.0.0.1:{port}" for port in ports], PLAN)
    config |= {"policy": POLICY, "probes": {"self_test": False, "load_interval_s": 0.25}}
    for pod in config["pods"][:FOLLOWED]:
        pod["kv_events"] = {"endpoint": endpoint}
    if redis:
        config["index"] = {"redis": {"url": redis, "holder_ttl_s": HOLDER_TTL_S}}
    return config


# --- actions ---


@asynccontextmanager
async def nothing(_stage: Target) -> AsyncIterator[Action]:
    """Only the periodic scrapes and probes."""

    async def action() -> None:
        await asyncio.sleep(0.1)

    yield action


@asynccontextmanager
async def reload(target: Target) -> AsyncIterator[Action]:
    """Change a number in a policy file and reload."""
    path, numbers = target.policies / f"{POLICY}.yaml", itertools.count(1)
    before = path.read_text()

    async def action() -> None:
        path.write_text(before.replace("reuse: 1.5", f"reuse: 1.5{next(numbers)}"))
        (await target.client.post("/admin/policies/reload")).raise_for_status()

    yield action


@asynccontextmanager
async def broken_reload(target: Target) -> AsyncIterator[Action]:
    """Add an error to a policy file, or remove it, and reload."""
    path, breaks = target.policies / f"{POLICY}.yaml", itertools.cycle((True, False))
    before = path.read_text()

    async def action() -> None:
        broken = next(breaks)
        path.write_text(before + "\nno_such_key: 1\n" if broken else before)
        assert ((await target.client.post("/admin/policies/reload")).status_code == 400) is broken

    yield action
    path.write_text(before)


@asynccontextmanager
async def metrics(target: Target) -> AsyncIterator[Action]:
    """Scrape the metrics."""

    async def action() -> None:
        assert len((await target.get("/metrics")).content) > 10_000

    yield action


@asynccontextmanager
async def admin(target: Target) -> AsyncIterator[Action]:
    """Read the admin pages and preview a request."""
    preview = {"model": MODEL, "messages": [{"role": "user", "content": "Where would this go?"}]}

    async def action() -> None:
        models = f"http://127.0.0.1:{target.port}/v1/models"
        for path in ("/readyz", "/admin/pods", models, "/admin/policies"):
            (await target.get(path)).raise_for_status()
        (await target.client.post("/admin/preview", json=preview)).raise_for_status()

    yield action


@asynccontextmanager
async def hostile_body(name: str, target: Target) -> AsyncIterator[Action]:
    """Send a body that costs as much as possible."""
    path, make = HOSTILE_BODIES[name]
    body, headers = make(), {"content-type": CONTENT_TYPES.get(path, b"application/json").decode()}

    async def action() -> None:
        response = await target.client.post(f"http://127.0.0.1:{target.port}{path}", content=body, headers=headers)
        assert response.status_code < 500, response.text

    yield action


@asynccontextmanager
async def discovery(target: Target) -> AsyncIterator[Action]:
    """Add ten pods, or remove them. They are mock pods under another name."""
    comes = itertools.cycle((True, False))

    async def action() -> None:
        come, some = next(comes), target.ports[-ADDED:]
        if come:
            added = [{"url": f"http://localhost:{port}", "id": f"added-{port}"} for port in some]
            answers = [await target.client.post("/admin/pods", json=pod) for pod in added]
        else:
            answers = [await target.client.delete(f"/admin/pods/added-{port}") for port in some]
        assert all(answer.is_success for answer in answers)

    yield action


@asynccontextmanager
async def kv_events(target: Target) -> AsyncIterator[Action]:
    """Publish prompts of 64 blocks for ten pods, 100 blocks a second in total, and remove them."""

    async def action() -> None:
        target.engine.remove(target.engine.store(EVENT_BLOCKS))

    yield action


@asynccontextmanager
async def long_kv_events(target: Target) -> AsyncIterator[Action]:
    """Publish a prompt of 32,768 tokens in one event for ten pods."""

    async def action() -> None:
        target.engine.remove(target.engine.store(LONG_EVENT_BLOCKS))

    yield action


@asynccontextmanager
async def full_cache(target: Target) -> AsyncIterator[Action]:
    """Publish one million blocks for ten pods at full speed."""
    sent = 0

    async def action() -> None:
        nonlocal sent
        if sent < CACHE_BLOCKS:
            sent += len(target.engine.store(EVENT_BLOCKS * 4))

    yield action


@asynccontextmanager
async def pods_with_full_caches_go(target: Target) -> AsyncIterator[Action]:
    """Remove a pod with a full cache and add it again, one after the other."""
    numbers = itertools.cycle(range(FOLLOWED))

    async def action() -> None:
        number = next(numbers)
        pod = {"url": f"http://127.0.0.1:{target.ports[number]}", "id": f"pod-{number}"}
        (await target.client.delete(f"/admin/pods/pod-{number}")).raise_for_status()
        (await target.client.post("/admin/pods", json=pod)).raise_for_status()

    yield action


def _generation() -> Generation:
    """The generation of the mocks' model."""
    return generation_of(ModelConfig.model_validate(router_config([], PLAN)["models"][0]))


@asynccontextmanager
async def index_log(target: Target) -> AsyncIterator[Action]:
    """Write one million blocks to the cluster index."""
    connection = RedisConnection(address_of(target.redis, timeout_s=10))
    generation, random = _generation(), np.random.default_rng(2)
    holders = [HolderWriter(connection, Keys(), generation, f"pod-{n}", HOLDER_TTL_S) for n in range(HOLDERS)]
    for number, holder in enumerate(holders):
        await holder.begin(EntryKind.EMPTY, HolderFacts(url=f"http://pod-{number}"), take_over=True)
    written = itertools.count()

    async def action() -> None:
        if next(written) * ENTRY_BLOCKS < HOLDER_BLOCKS:
            for holder in holders:
                blocks = random.integers(1, 2**63, ENTRY_BLOCKS, dtype=np.uint64)
                answer = await holder.apply([BlockChange(Tier.GPU, True, blocks.tolist())], complete=True)
                assert answer is WriteResult.OK

    yield action
    await connection.close()


@asynccontextmanager
async def index_snapshot(target: Target) -> AsyncIterator[Action]:
    """Make the router read all holders again: one log entry per holder has a gap in its sequence."""
    connection = RedisConnection(address_of(target.redis, timeout_s=10))
    generation = _generation()
    rows, lost = await IndexReader(connection, Keys()).rows(generation), iter([True])

    async def action() -> None:
        if next(lost, False):
            for holder, row in rows.items():
                entry = {"k": EntryKind.CHANGE, "h": holder, "e": row.epoch, "s": row.seq + 9}
                await connection.client.xadd(Keys().log(scope_of(generation)), entry)

    yield action
    read = re.search(r"^warmroute_index_holders_read_total (\S+)", (await target.get("/metrics")).text, re.MULTILINE)
    assert read and float(read[1]) >= len(rows)
    await connection.close()


@dataclass(frozen=True, slots=True)
class Activity:
    """`prepared` yields the action that runs every `every_s`; without `load` no requests are sent."""

    prepared: Callable[[Target], AbstractAsyncContextManager[Action]]
    setup: RouterSetup = RouterSetup.SINGLE
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
    **{f"body-{name}": Activity(partial(hostile_body, name), every_s=0.5) for name in HOSTILE_BODIES},
    "redis": Activity(nothing, RouterSetup.CLUSTER),
    "index-log": Activity(index_log, RouterSetup.CLUSTER, every_s=0.1),
    "index-snapshot": Activity(index_snapshot, RouterSetup.CLUSTER),
    "cluster-metrics": Activity(metrics, RouterSetup.CLUSTER),
}
