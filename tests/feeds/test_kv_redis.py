"""Is a router's copy what publishers wrote, whatever is lost on the way, and does it say so when it may not be?"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import redis

from router.feeds.kv_redis import IndexFeed
from router.index.cluster import ClusterIndex, EntryKind
from router.index.holders import HolderFacts, KnownHolder, holder_name
from router.stores.connection import Connection, parse_url
from router.stores.local import LocalStore
from router.stores.publication import Answer, Publication
from router.stores.registry import Registry
from router.stores.replica import FRESH_S, ReplicaStore
from router.stores.schema import Keys, encode_generation, scope_of
from router.types import BlockChange, BlockHash, Generation, Pod, PodSpeed, PromptPrefix, Tier
from tests.redis_process import RedisProcess, redis_process

pytestmark = [pytest.mark.anyio, pytest.mark.net]

KEYS = Keys("test")
GENERATION = Generation(model="demo", tokenizer="t")
LOG = KEYS.log(scope_of(GENERATION))
LIFETIME_S = 3.0

Running = Callable[[Coroutine[Any, Any, None]], AbstractAsyncContextManager[None]]
Until = Callable[[Callable[[], object]], Awaitable[None]]


def prompt(blocks: Iterable[BlockHash], generation: Generation = GENERATION) -> PromptPrefix:
    """A prompt of just these blocks."""
    return PromptPrefix(generation, (), list(blocks))


@dataclass(slots=True)
class Publisher:
    """Writes one holder, each call one entry of the log."""

    publication: Publication
    pod: str

    async def begin(self, kind: EntryKind = EntryKind.EMPTY) -> None:
        facts = HolderFacts(url=f"http://{self.pod}")
        assert await self.publication.begin(kind, facts, take_over=True) is Answer.OK

    async def store(self, blocks: Sequence[BlockHash], *, seal: bool = False) -> None:
        kind = EntryKind.SEAL if seal else EntryKind.CHANGE
        changes = [BlockChange(Tier.GPU, True, blocks)] if blocks else []
        assert await self.publication.apply(changes, complete=True, kind=kind) is Answer.OK

    async def remove(self, blocks: Sequence[BlockHash]) -> None:
        assert await self.publication.apply([BlockChange(Tier.GPU, False, blocks)], complete=True) is Answer.OK

    async def beat(self, *, complete: bool = True) -> None:
        assert await self.publication.beat(complete=complete) is Answer.OK


class Scene:
    """A server, one router's copy of what is in it, and publishers."""

    def __init__(self, server: RedisProcess, client: Any, lifetime_s: float = LIFETIME_S, timeout_s: float = 2.0) -> None:
        self.server = server
        self.redis = client
        self.index = ClusterIndex(lifetime_s=lifetime_s)
        self.store = ReplicaStore(self.index, LocalStore(), max_age_s=60.0)
        self.connections = [Connection(parse_url(server.url), timeout_s=each) for each in (timeout_s, 2.0)]
        self.feed = IndexFeed(Registry(self.connections[0], KEYS), self.store, lambda made: made.model == "demo")

    def publisher(self, pod: str, generation: Generation = GENERATION) -> Publisher:
        """One that has not begun. The router knows the pod."""
        self.store.add_holder(Pod(id=pod, url=f"http://{pod}", engine="vllm", speed=PodSpeed(0, 0, 0)), generation)
        return Publisher(Publication(self.connections[1], KEYS, generation, pod, LIFETIME_S), pod)

    async def publishing(self, pod: str, blocks: Sequence[BlockHash]) -> Publisher:
        """One that has written so much."""
        publisher = self.publisher(pod)
        await publisher.begin()
        await publisher.store(blocks)
        return publisher

    def known(self, pod: str) -> KnownHolder | None:
        return self.index.holders.get(holder_name(GENERATION, pod))

    def has(self, pod: str, blocks: Sequence[BlockHash]) -> bool:
        """Does the copy have exactly these blocks of a pod?"""
        known = self.known(pod)
        found = self.index.match(prompt(blocks)).get(pod, (0, 0, 0, 0))
        return known is not None and self.index.held(known) == len(blocks) == found[Tier.GPU]

    async def close(self) -> None:
        for connection in self.connections:
            await connection.close()


@pytest.fixture
async def scene(request: pytest.FixtureRequest) -> AsyncIterator[Scene]:
    """Nothing is published, nothing read. Indirect parameters are the scene's."""
    with redis_process() as server, redis.Redis.from_url(server.url) as client:
        scene = Scene(server, client, **getattr(request, "param", {}))
        yield scene
        await scene.close()


class _Unheard(Connection):
    """What is written through it, no reader of the log hears of: entries are gone in the transaction they come in."""

    async def script(self, lua: str, keys: Sequence[str], args: Sequence[object]) -> Any:
        async with self.client.pipeline(transaction=True) as both:
            both.eval(lua, len(keys), *keys, *args)
            both.xtrim(LOG, maxlen=0, approximate=False)
            return (await both.execute())[0]


# --- reading ---


async def test_a_copy_is_what_was_there_and_every_change_after_it(scene: Scene, running: Running, until: Until) -> None:
    """Blocks that were written before the router came, and those that came and went since."""
    pod = await scene.publishing("a", [1, 2, 3])
    async with running(scene.feed.run()):
        await scene.feed.loaded.wait()
        assert scene.has("a", [1, 2, 3])
        await pod.store([4])
        await pod.remove([1, 2])
        await until(lambda: scene.has("a", [3, 4]))
        other = await scene.publishing("b", [5])
        await until(lambda: scene.has("b", [5]))
        await other.publication.retire()
        await until(lambda: scene.known("b") is None)

    assert scene.has("a", [3, 4])
    found = await scene.store.match(prompt([3, 4]), time.monotonic())
    assert (found.blocks, found.degraded) == ({"a": (2, 0, 0, 0)}, False)


async def test_a_holder_of_which_entries_are_lost_is_read_anew_and_no_other(
    scene: Scene, running: Running, until: Until
) -> None:
    """A heartbeat or change that does not follow on what was heard costs one reading, of that holder."""
    one, _ = await scene.publishing("a", [1, 2]), await scene.publishing("b", [1])
    unheard = _Unheard(parse_url(scene.server.url), timeout_s=2.0)
    async with running(scene.feed.run()):
        await scene.feed.loaded.wait()
        one.publication._connection = unheard
        await one.store([3])
        await one.remove([1])
        one.publication._connection = scene.connections[1]
        assert scene.feed.holders_read == 2
        await one.beat()
        await until(lambda: scene.has("a", [2, 3]))

    assert scene.feed.holders_read == 0
