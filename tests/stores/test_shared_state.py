"""Replicas share calibration and requests in flight over a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from msgspec import structs

from router.feeds.workload import WorkloadFeed
from router.fleet.ledger import Ledger
from router.policy.calibration import Calibration, PrefillObservation
from router.stores.redis_connection import RedisConnection, parse_url
from router.stores.redis_schema import Keys
from router.stores.shared_state import SharedCalibration, SharedWorkload, calibration_key
from router.types import InFlight, Pod, PodSpeed
from tests.redis_servers.server import RedisServer, binaries, until

pytestmark = [pytest.mark.anyio, pytest.mark.net]

KEYS = Keys("state")
H100, A100 = "org/model/vllm/h100", "org/model/vllm/a100"
KEY = calibration_key(KEYS, "org/model")
PRIOR = PodSpeed(10.0, 0.05, 1e-6)


POD = Pod(id="a", url="http://a:8000", engine="vllm", speed=PodSpeed(1.0, 0.02, 1e-6))
WORK = {"a": InFlight(2, 1, 300, 41.5, 900), "b": InFlight(1, 0, 0, 0.0, 10)}


@pytest.fixture(params=sorted(binaries()))
async def server(request: pytest.FixtureRequest) -> AsyncIterator[RedisServer]:
    """Each server that exists here."""
    async with RedisServer(str(request.param)) as running:
        yield running


@pytest.fixture
async def connection(server: RedisServer) -> AsyncIterator[RedisConnection]:
    """To it."""
    made = RedisConnection(parse_url(server.url), timeout_s=2)
    yield made
    await made.close()


def shared(connection: RedisConnection, lifetime_s: float = 60) -> SharedCalibration:
    return SharedCalibration(connection, KEYS, "org/model", lifetime_s=lifetime_s)


def learnt(observations: int, factor: float = 2.0, class_key: str = H100) -> Calibration:
    """From prompts of 1,000 tokens that take `factor` times what the prior says."""
    calibration = Calibration()
    learn(calibration, observations, factor, class_key)
    return calibration


def learn(calibration: Calibration, observations: int, factor: float = 2.0, class_key: str = H100) -> None:
    for _ in range(observations):
        seen = PrefillObservation(1, 1000, 1_000_000, factor * PRIOR.prefill_ms(1000))
        calibration.observe_prefill(class_key, "pod", PRIOR, seen)


def prefill_ms(calibration: Calibration, class_key: str = H100) -> float:
    return calibration.speed(class_key, "pod", PRIOR).prefill_ms(1000)


async def test_a_new_router_starts_with_what_others_know(connection: RedisConnection) -> None:
    """And not from the prior."""
    old, new = learnt(80), Calibration()
    await shared(connection).exchange(old)
    await shared(connection).exchange(new)
    assert prefill_ms(new) == prefill_ms(old) != PRIOR.prefill_ms(1000)


async def test_of_each_class_the_fit_that_has_seen_most_stays(connection: RedisConnection) -> None:
    """Whoever writes last."""
    one, other = learnt(80), learnt(5, factor=3.0)
    learn(other, 40, class_key=A100)
    await shared(connection).exchange(one)
    await shared(connection).exchange(other)
    newcomer = Calibration()
    await shared(connection).exchange(newcomer)
    assert prefill_ms(newcomer) == prefill_ms(other) == prefill_ms(one)
    assert prefill_ms(newcomer, A100) == prefill_ms(other, A100) != PRIOR.prefill_ms(1000)


async def test_a_router_without_news_repeats_nothing(connection: RedisConnection) -> None:
    """What others have learnt since stands."""
    idle, busy = learnt(200), learnt(200, factor=0.5)
    idle_shared = shared(connection)
    await idle_shared.exchange(idle)
    await shared(connection).exchange(busy)
    written = await connection.client.get(KEY)
    await idle_shared.exchange(idle)
    assert await connection.client.get(KEY) == written == busy.dump()


async def test_after_redis_lost_everything_it_is_written_again(connection: RedisConnection) -> None:
    """By whoever comes next, news or not."""
    calibration, store = learnt(10), shared(connection)
    await store.exchange(calibration)
    await connection.client.flushall()
    await store.exchange(calibration)
    assert await connection.client.get(KEY) == calibration.dump()


@pytest.mark.parametrize("garbage", [b"", b"\xc1", b"nonsense", b"\x80"])
async def test_garbage_is_passed_over_and_replaced(connection: RedisConnection, garbage: bytes) -> None:
    """Nobody fails for it."""
    calibration, store = learnt(10), shared(connection)
    before = prefill_ms(calibration)
    await store.exchange(calibration)
    await connection.client.set(KEY, garbage)
    await store.exchange(calibration)
    assert prefill_ms(calibration) == before
    assert await connection.client.get(KEY) == calibration.dump()


async def test_it_expires_when_nobody_learns_any_more(connection: RedisConnection) -> None:
    """A model that is not served leaves nothing behind."""
    await shared(connection, lifetime_s=0.05).exchange(learnt(10))

    async def is_gone() -> bool:
        return not await connection.client.exists(KEY)

    await until(is_gone)


def test_models_and_versions_do_not_meet() -> None:
    """The key tells them apart."""
    assert KEY == "state:1:calibration:2:org/model"


def rows(connection: RedisConnection, *routers: str, lifetime_s: float = 60) -> list[SharedWorkload]:
    """One for each router."""
    return [SharedWorkload(connection, KEYS, router, lifetime_s=lifetime_s) for router in routers]


def told(ledger: Ledger) -> dict[str, InFlight]:
    """Its own sums as other routers read them: how far the first prompt in line is stays here."""
    return {pod: structs.replace(work, head_ms=0.0, head_since_s=0.0) for pod, work in ledger.own().items()}


async def test_each_sees_the_others_and_not_itself(connection: RedisConnection) -> None:
    """In one round trip both ways."""
    one, two, three = rows(connection, "1", "2", "3")
    assert await one.exchange(WORK) == {}
    assert await two.exchange({}) == {"1": WORK}
    assert await three.exchange({"c": InFlight(1, 1, 1, 1.0, 1)}) == {"1": WORK, "2": {}}
    assert await one.exchange({}) == {"2": {}, "3": {"c": InFlight(1, 1, 1, 1.0, 1)}}


async def test_what_is_by_our_own_clock_stays_here(connection: RedisConnection) -> None:
    """Transfers count everywhere; since when a prompt is first in line means nothing to another machine."""
    one, two = rows(connection, "1", "2")
    await one.exchange({"a": InFlight(1, 1, 300, 41.5, 900, pulls=2, head_ms=41.5, head_since_s=77.0)})
    assert await two.exchange({}) == {"1": {"a": InFlight(1, 1, 300, 41.5, 900, pulls=2)}}


async def test_other_workers_of_the_same_router_are_left_out(connection: RedisConnection) -> None:
    """They are known already; routers elsewhere see each of them."""
    one, two, elsewhere = (
        SharedWorkload(connection, KEYS, name, lifetime_s=60, siblings=siblings)
        for name, siblings in (("x:1", "x:"), ("x:2", "x:"), ("y:1", "y:"))
    )
    await one.exchange(WORK)
    assert await two.exchange(WORK) == {}
    assert await elsewhere.exchange({}) == {"x:1": WORK, "x:2": WORK}
    assert await one.exchange(WORK) == {"y:1": {}}


async def test_who_leaves_takes_its_row_along(connection: RedisConnection) -> None:
    """At once, not after the row's lifetime."""
    one, two = rows(connection, "1", "2")
    await one.exchange(WORK)
    await one.leave()
    assert await two.exchange({}) == {}


async def test_a_dead_replicas_row_expires(connection: RedisConnection) -> None:
    """Though others keep the hash itself alive; and is thrown away in the end."""
    (dead,), (alive,) = rows(connection, "1"), rows(connection, "2", lifetime_s=0.05)
    await dead.exchange(WORK)
    assert set(await alive.exchange({})) == {"1"}

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
async def test_a_row_that_nobody_of_us_wrote_is_passed_over(connection: RedisConnection, row: bytes) -> None:
    """And hides nobody else's."""
    one, two = rows(connection, "1", "2")
    await one.exchange(WORK)
    await connection.client.hset(KEYS.routers, "strange", row)
    assert await two.exchange({}) == {"1": WORK}


async def test_two_routers_share_their_load_and_keep_their_own_without_redis(server: RedisServer) -> None:
    """What one dispatches the other counts, until Redis is gone or it finishes."""
    connections = [RedisConnection(parse_url(server.url), timeout_s=1) for _ in range(2)]
    ledgers = [Ledger(), Ledger()]
    feeds = [
        WorkloadFeed(SharedWorkload(connection, KEYS, name, lifetime_s=60), ledger)
        for connection, name, ledger in zip(connections, "12", ledgers, strict=True)
    ]
    tasks = [asyncio.create_task(feed.run()) for feed in feeds]
    try:
        lease = ledgers[0].book(POD, 1000, 600, 0.0)

        async def is_shared() -> bool:
            return ledgers[1].inflight() == told(ledgers[0]) and feeds[0].replicas == feeds[1].replicas == 1

        async def is_alone() -> bool:
            return not ledgers[1].inflight() and feeds[1].replicas == 0

        await until(is_shared)
        server.kill()
        await until(is_alone)
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
