"""Replicas share calibration and requests in flight over a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TypeAlias

import pytest
from msgspec import structs

from loadtest.simulator.router_view import Unrecorded
from router.feeds.cluster_feeds import FactFeed
from router.fleet.breaker import Breaker, Probes
from router.fleet.fleet import Fleet
from router.fleet.ledger import Ledger
from router.policy.calibration import Calibration
from router.policy.calibrator import Calibrator
from router.policy.prefill_clock import PrefillObservation
from router.request.fleet_state import FleetState
from router.stores.prefix_store import LocalStore
from router.stores.redis_connection import RedisConnection
from router.stores.redis_schema import Keys
from router.stores.shared_state import SharedCalibration, SharedFact, SharedRows, calibration_key
from router.types import InFlight, Links, PodSpeed
from router.wiring.shared_facts import shared_facts
from tests.policy.scenes import make_pod
from tests.redis_process import address_of
from tests.redis_servers.server import RedisServer, binaries, until

pytestmark = [pytest.mark.anyio, pytest.mark.net]

KEYS = Keys("state")
H100, A100 = "org/model/vllm/h100", "org/model/vllm/a100"
KEY = calibration_key(KEYS, "org/model")
PRIOR = PodSpeed(10.0, 0.05, 1e-6)


Work: TypeAlias = dict[str, InFlight]
POD = make_pod()
WORK = {"a": InFlight(2, 1, 300, 41.5, 900), "b": InFlight(1, 0, 0, 0.0, 10)}


@pytest.fixture(params=sorted(binaries()))
async def server(request: pytest.FixtureRequest) -> AsyncIterator[RedisServer]:
    """Each installed server."""
    async with RedisServer(str(request.param)) as running:
        yield running


@pytest.fixture
async def connection(server: RedisServer) -> AsyncIterator[RedisConnection]:
    """A connection to it."""
    made = RedisConnection(address_of(server.url, timeout_s=20))
    yield made
    await made.close()


def shared(connection: RedisConnection, ttl_s: float = 60) -> SharedCalibration:
    return SharedCalibration(connection, KEYS, "org/model", ttl_s=ttl_s)


def fitted(observations: int, factor: float = 2.0, class_key: str = H100) -> Calibration:
    """A calibration from prompts of 1,000 tokens that take `factor` times the prior."""
    calibration = Calibration()
    observe_prompts(calibration, observations, factor, class_key)
    return calibration


def observe_prompts(calibration: Calibration, observations: int, factor: float = 2.0, class_key: str = H100) -> None:
    for _ in range(observations):
        seen = PrefillObservation(1, 1000, 1_000_000, factor * PRIOR.prefill_ms(1000))
        calibration.observe_prefill(class_key, "pod", PRIOR, seen)


def prefill_ms(calibration: Calibration, class_key: str = H100) -> float:
    return calibration.speed(class_key, "pod", PRIOR).prefill_ms(1000)


async def test_a_new_router_starts_with_the_shared_fits(connection: RedisConnection) -> None:
    old, new = fitted(80), Calibration()
    await shared(connection).exchange(old)
    await shared(connection).exchange(new)
    assert prefill_ms(new) == prefill_ms(old) != PRIOR.prefill_ms(1000)


async def test_the_fit_with_the_most_observations_stays(connection: RedisConnection) -> None:
    """For each class, in any order of writes."""
    one, other = fitted(80), fitted(5, factor=3.0)
    observe_prompts(other, 40, class_key=A100)
    await shared(connection).exchange(one)
    await shared(connection).exchange(other)
    newcomer = Calibration()
    await shared(connection).exchange(newcomer)
    assert prefill_ms(newcomer) == prefill_ms(other) == prefill_ms(one)
    assert prefill_ms(newcomer, A100) == prefill_ms(other, A100) != PRIOR.prefill_ms(1000)


async def test_an_unchanged_calibration_is_not_written_again(connection: RedisConnection) -> None:
    """Others may have written newer fits."""
    idle, busy = fitted(200), fitted(200, factor=0.5)
    idle_shared = shared(connection)
    await idle_shared.exchange(idle)
    await shared(connection).exchange(busy)
    written = await connection.client.get(KEY)
    await idle_shared.exchange(idle)
    assert await connection.client.get(KEY) == written == busy.dump()


async def test_after_redis_lost_everything_it_is_written_again(connection: RedisConnection) -> None:
    calibration, store = fitted(10), shared(connection)
    await store.exchange(calibration)
    await connection.client.flushall()
    await store.exchange(calibration)
    assert await connection.client.get(KEY) == calibration.dump()


@pytest.mark.parametrize("garbage", [b"", b"\xc1", b"nonsense", b"\x80"])
async def test_an_unreadable_value_is_replaced(connection: RedisConnection, garbage: bytes) -> None:
    calibration, store = fitted(10), shared(connection)
    before = prefill_ms(calibration)
    await store.exchange(calibration)
    await connection.client.set(KEY, garbage)
    await store.exchange(calibration)
    assert prefill_ms(calibration) == before
    assert await connection.client.get(KEY) == calibration.dump()


async def test_calibration_expires_without_new_observations(connection: RedisConnection) -> None:
    await shared(connection, ttl_s=0.05).exchange(fitted(10))

    async def is_gone() -> bool:
        return not await connection.client.exists(KEY)

    await until(is_gone)


def test_the_key_contains_model_and_version() -> None:
    assert KEY == "state:1:calibration:2:org/model"


def work_of(ledger: Ledger | None = None, ttl_s: float = 60) -> SharedFact[Work]:
    """Requests in flight of a router with this ledger."""
    found = ledger or Ledger()
    state = FleetState(
        fleet=Fleet(),
        ledger=found,
        breaker=Breaker(Fleet(), Probes()),
        store=LocalStore(),
        calibrator=Calibrator(Calibration(), Unrecorded(), Links()),
    )
    return replace(shared_facts(state)[0], ttl_s=ttl_s)


def rows(connection: RedisConnection, *routers: str, ttl_s: float = 60) -> list[SharedRows[Work]]:
    """One for each router."""
    return [SharedRows(connection, KEYS, router, work_of(ttl_s=ttl_s)) for router in routers]


def shared_fields(ledger: Ledger) -> dict[str, InFlight]:
    """Requests in flight as other routers read them."""
    return work_of(ledger).own()


async def test_a_router_sees_the_others_and_not_itself(connection: RedisConnection) -> None:
    """In one round trip."""
    one, two, three = rows(connection, "1", "2", "3")
    assert await one.exchange(WORK) == {}
    assert await two.exchange({}) == {"1": WORK}
    assert await three.exchange({"c": InFlight(1, 1, 1, 1.0, 1)}) == {"1": WORK, "2": {}}
    assert await one.exchange({}) == {"2": {}, "3": {"c": InFlight(1, 1, 1, 1.0, 1)}}


async def test_fields_by_the_routers_own_clock_are_not_shared(connection: RedisConnection) -> None:
    """The time since a prompt is first in line."""
    ledger = Ledger()
    ledger.book(POD, 1000, 600, 77.0)
    one, two = rows(connection, "1", "2")
    await one.exchange(work_of(ledger).own())
    (found,) = (await two.exchange({})).values()
    assert ledger.own()["a"].head_ms > 0.0
    assert found == {"a": structs.replace(ledger.own()["a"], head_ms=0.0, head_since_s=0.0)}


async def test_leaving_removes_the_row(connection: RedisConnection) -> None:
    """At once."""
    one, two = rows(connection, "1", "2")
    await one.exchange(WORK)
    await one.leave()
    assert await two.exchange({}) == {}


async def test_a_dead_replicas_row_expires(connection: RedisConnection) -> None:
    """And is deleted later."""
    (dead,), (patient,), (alive,) = rows(connection, "1"), rows(connection, "2"), rows(connection, "2", ttl_s=0.05)
    await dead.exchange(WORK)
    assert set(await patient.exchange({})) == {"1"}

    async def is_passed_over() -> bool:
        return await alive.exchange({}) == {}

    async def is_gone() -> bool:
        await alive.exchange({})
        return bool(await connection.client.hkeys(KEYS.routers) == [b"2"])

    await until(is_passed_over)
    await until(is_gone)


@pytest.mark.parametrize(
    "row", [b"", b"no time", b"\xff\xff", b"12345", b"99999999999999 \xc1", b"99999999999999 \x01"]
)
async def test_an_unreadable_row_is_skipped(connection: RedisConnection, row: bytes) -> None:
    one, two = rows(connection, "1", "2")
    await one.exchange(WORK)
    await connection.client.hset(KEYS.routers, "strange", row)
    assert await two.exchange({}) == {"1": WORK}


async def test_two_routers_share_their_load_and_keep_their_own_without_redis(server: RedisServer) -> None:
    """A dispatch of one counts for the other until it finishes or Redis fails."""
    connections = [RedisConnection(address_of(server.url, timeout_s=20)) for _ in range(2)]
    ledgers = [Ledger(), Ledger()]
    feeds = [
        FactFeed(SharedRows(connection, KEYS, name, work_of(ledger)), work_of(ledger))
        for connection, name, ledger in zip(connections, "12", ledgers, strict=True)
    ]
    tasks = [asyncio.create_task(feed.run()) for feed in feeds]
    try:
        lease = ledgers[0].book(POD, 1000, 600, 0.0)

        async def is_shared() -> bool:
            return ledgers[1].inflight() == shared_fields(ledgers[0]) and feeds[0].replicas == feeds[1].replicas == 1

        async def is_alone() -> bool:
            return not ledgers[1].inflight() and feeds[1].replicas == 0

        await until(is_shared)
        server.kill()
        await until(is_alone)
        assert feeds[1].known == 1, "the other one still sends to the same pods"
        assert ledgers[0].inflight() == ledgers[0].own() != {}
        await server.start()
        await until(is_shared)
        ledgers[0].release(lease, 0.0)

        async def is_idle() -> bool:
            return not ledgers[1].inflight()

        await until(is_idle)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for each in connections:
            await each.close()
