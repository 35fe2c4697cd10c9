"""The reader that asks Redis for every prompt: one round trip, never longer than its deadline, degraded and honest."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from router.hashing import generation_seed, hash_blocks, token_array
from router.index.cluster import EntryKind
from router.index.holders import HolderFacts
from router.stores.connection import Connection, parse_url
from router.stores.direct import FIRST_PAUSE_S, LONGEST_PAUSE_S, DirectStore
from router.stores.local import LocalStore
from router.stores.publication import Publication
from router.stores.registry import Registry
from router.stores.schema import Keys
from router.stores.store import PrefixStore
from router.types import BlockChange, BlocksStored, Generation, Pod, PodSpeed, PrefixMatch, PromptPrefix, Tier
from tests.redis_servers.server import RedisServer, binaries

pytestmark = [pytest.mark.anyio, pytest.mark.net]

GENERATION = Generation(model="m", revision="r", block_size_tokens=2)
TOKENS = tuple(range(1, 21))
KEYS = Keys("direct")
SPEED = PodSpeed(1.0, 0.02, 0.0)


def prompt(tokens: tuple[int, ...] = TOKENS) -> PromptPrefix:
    """The blocks of some tokens."""
    packed = token_array(tokens)
    return PromptPrefix(GENERATION, packed, hash_blocks(packed, 2, generation_seed(GENERATION)))


@dataclass
class World:
    """A server, a reader of it, and a way to publish."""

    server: RedisServer
    connection: Connection
    direct: DirectStore

    async def publish(self, pod: str, blocks: int, tier: Tier = Tier.GPU) -> Publication:
        """The first blocks of the prompt, on a pod that the reader knows of from then on."""
        publication = Publication(self.connection, KEYS, GENERATION, pod, lifetime_s=30)
        await publication.begin(EntryKind.EMPTY, HolderFacts(url=f"http://{pod}"), take_over=True)
        await publication.apply([BlockChange(tier, True, list(prompt().hashes[:blocks]))], complete=True)
        self.direct.add_holder(Pod(id=pod, url=f"http://{pod}", engine="vllm", speed=SPEED), GENERATION)
        await self.look()
        return publication

    async def look(self) -> None:
        """Learn again who is there, as the registry's feed does."""
        self.direct.list_holders(GENERATION, await Registry(self.connection, KEYS).rows(GENERATION), 0.0)

    async def round_trips(self) -> int:
        """Scripts that the server ran."""
        async with self.server.client() as client:
            stats = await client.info("commandstats")
        return sum(stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("evalsha_ro", "eval_ro"))


@pytest.fixture(params=sorted(binaries()))
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """On each server that exists here; with so long a deadline that only a paused server misses it."""
    async with RedisServer(str(request.param)) as server:
        connection = Connection(parse_url(server.url), timeout_s=5)
        yield World(server, connection, DirectStore(connection, KEYS, LocalStore(), deadline_s=0.3))
        await connection.close()


async def test_a_prompt_costs_one_round_trip_however_many_hold_it(world: World) -> None:
    """And each run ends at its first missing block."""
    for pod, blocks in (("a", 10), ("b", 4), ("c", 1)):
        await world.publish(pod, blocks)
    await world.direct.match(prompt(), 0.0)  # the first brings the script
    before = await world.round_trips()
    found = await world.direct.match(prompt(), 0.0)
    assert found == PrefixMatch({"a": (10, 0, 0, 0), "b": (4, 0, 0, 0), "c": (1, 0, 0, 0)})
    assert await world.round_trips() == before + 1
    assert await world.direct.match(prompt((*TOKENS[:4], 99, *TOKENS[5:])), 0.0) == PrefixMatch(
        {"a": (2, 0, 0, 0), "b": (2, 0, 0, 0), "c": (1, 0, 0, 0)}
    )


async def test_a_prompt_that_nobody_is_known_to_hold_asks_nobody(world: World) -> None:
    """An index that is empty costs nothing."""
    store: PrefixStore = world.direct
    assert await store.match(prompt(), 0.0) == PrefixMatch()
    assert await world.round_trips() == 0


async def test_an_epoch_that_ended_holds_nothing(world: World) -> None:
    """Even for a reader that still believes in it: the script compares."""
    old = await world.publish("a", 10)
    new = Publication(world.connection, KEYS, GENERATION, "a", lifetime_s=30)
    await new.begin(EntryKind.EMPTY, HolderFacts(url="http://a"), take_over=True)
    assert await world.direct.match(prompt(), 0.0) == PrefixMatch()
    assert new.epoch > old.epoch


async def test_a_redis_that_hangs_costs_one_request_its_deadline_and_the_next_nothing(world: World) -> None:
    """What this router heard itself still counts, marked as degraded."""
    await world.publish("a", 10)
    own = BlocksStored(block_hashes=(1, 2), parent_hash=None, tokens=TOKENS[:4], block_size_tokens=2, tier=Tier.GPU)
    world.direct.apply("a", [own])
    world.server.pause()
    degraded = PrefixMatch({"a": (2, 0, 0, 0)}, degraded=True)
    assert await world.direct.match(prompt(), 10.0) == degraded
    world.server.resume()
    async with world.server.client() as client:
        await client.ping()  # it has answered what came before
    before = await world.round_trips()
    assert await world.direct.match(prompt(), 10.0 + FIRST_PAUSE_S / 2) == degraded
    assert not world.direct.announces("a")
    assert await world.round_trips() == before
    assert await world.direct.match(prompt(), 10.0 + FIRST_PAUSE_S) == PrefixMatch({"a": (10, 0, 0, 0)})
    assert world.direct.announces("a")


async def test_a_redis_that_stays_away_is_asked_ever_less_often(world: World) -> None:
    """Up to a bound, after which one request in a while still tries."""
    await world.publish("a", 10)
    world.server.kill()
    now_s = 0.0
    for asked in range(10):
        assert (await world.direct.match(prompt(), now_s)).degraded
        now_s += min(FIRST_PAUSE_S * 2**asked, LONGEST_PAUSE_S)
    await world.server.start()
    assert (await world.direct.match(prompt(), now_s - 0.01)).degraded
    assert not (await world.direct.match(prompt(), now_s)).degraded
    assert await world.direct.match(prompt(), now_s) == PrefixMatch()  # it came back empty


async def test_what_another_model_holds_is_never_matched(world: World) -> None:
    """Though it is of the same tokens."""
    await world.publish("a", 10)
    other = Generation(model="n", revision="r", block_size_tokens=2)
    packed = token_array(TOKENS)
    asked = PromptPrefix(other, packed, hash_blocks(packed, 2, generation_seed(other)))
    assert await world.direct.match(asked, 0.0) == PrefixMatch()


async def test_a_pod_is_known_in_all_its_tiers(world: World) -> None:
    """Each block once, where it is nearest."""
    publication = await world.publish("a", 3)
    await publication.apply([BlockChange(Tier.CPU, True, list(prompt().hashes[:6]))], complete=True)
    await world.look()
    assert await world.direct.match(prompt(), 0.0) == PrefixMatch({"a": (3, 3, 0, 0)})
    assert await world.direct.known_blocks("a", prompt()) == 6
