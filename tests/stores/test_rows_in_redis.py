"""Replicas share calibration and requests in flight over a real Redis, also with a router of an earlier version."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from msgspec import structs

from router.admission.sharing import CeilingReport, Grant, Grants, MeterSharing
from router.feeds.shared_rows import SharedCalibration, SharedDrains, SharedQuotas, SharedResponses, SharedWork
from router.fleet.drains import Drain, Drains
from router.fleet.ledger import Ledger
from router.index.stored_responses import StoredResponse
from router.policy.calibration import Calibration
from router.policy.prefill_clock import PrefillObservation
from router.stores.redis_connection import RedisConnection
from router.stores.redis_schema import Keys
from router.types import InFlight, PodSpeed
from tests.kit.scenes import make_pod
from tests.redis_process import RedisProcess, address_of, redis_process
from tests.redis_servers.server import until

pytestmark = [pytest.mark.anyio, pytest.mark.net]

KEYS = Keys("state")
H100, A100 = "org/model/vllm/h100", "org/model/vllm/a100"
KEY = KEYS.calibration("org/model")
PRIOR = PodSpeed(10.0, 0.05, 1e-6)


POD = make_pod()
WORK = {"a": InFlight(2, 1, 300, 41.5, 900), "b": InFlight(1, 0, 0, 0.0, 10)}


def shared(connection: RedisConnection, calibration: Calibration, ttl_s: float = 60) -> SharedCalibration:
    return SharedCalibration(connection, KEYS, calibration, lambda: ["org/model"], ttl_s)


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
    await shared(connection, old).exchange()
    await shared(connection, new).exchange()
    assert prefill_ms(new) == prefill_ms(old) != PRIOR.prefill_ms(1000)


async def test_the_fit_with_the_most_observations_stays(connection: RedisConnection) -> None:
    """For each class, in any order of writes."""
    one, other = fitted(80), fitted(5, factor=3.0)
    observe_prompts(other, 40, class_key=A100)
    await shared(connection, one).exchange()
    await shared(connection, other).exchange()
    newcomer = Calibration()
    await shared(connection, newcomer).exchange()
    assert prefill_ms(newcomer) == prefill_ms(other) == prefill_ms(one)
    assert prefill_ms(newcomer, A100) == prefill_ms(other, A100) != PRIOR.prefill_ms(1000)


async def test_an_unchanged_calibration_is_not_written_again(connection: RedisConnection) -> None:
    """Others may have written newer fits."""
    idle, busy = fitted(200), fitted(200, factor=0.5)
    idle_shared = shared(connection, idle)
    await idle_shared.exchange()
    await shared(connection, busy).exchange()
    written = await connection.client.get(KEY)
    await idle_shared.exchange()
    assert await connection.client.get(KEY) == written == busy.dump()


async def test_after_redis_lost_everything_it_is_written_again(connection: RedisConnection) -> None:
    calibration = fitted(10)
    store = shared(connection, calibration)
    await store.exchange()
    await connection.client.flushall()
    await store.exchange()
    assert await connection.client.get(KEY) == calibration.dump()


@pytest.mark.parametrize("garbage", [b"", b"\xc1", b"nonsense", b"\x80"])
async def test_an_unreadable_value_is_replaced(connection: RedisConnection, garbage: bytes) -> None:
    calibration = fitted(10)
    store = shared(connection, calibration)
    before = prefill_ms(calibration)
    await store.exchange()
    await connection.client.set(KEY, garbage)
    await store.exchange()
    assert prefill_ms(calibration) == before
    assert await connection.client.get(KEY) == calibration.dump()


async def test_each_served_model_is_shared_under_its_own_name(connection: RedisConnection) -> None:
    await SharedCalibration(connection, KEYS, fitted(10), lambda: {"m", "n"}).exchange()
    assert set(await connection.client.keys()) == {KEYS.calibration(model).encode() for model in "mn"}


async def test_calibration_expires_without_new_observations(connection: RedisConnection) -> None:
    await shared(connection, fitted(10), ttl_s=0.005).exchange()

    async def is_gone() -> bool:
        return not await connection.client.exists(KEY)

    await until(is_gone)


def test_the_key_contains_model_and_version() -> None:
    assert KEY == "state:1:calibration:2:org/model"


def rows(connection: RedisConnection, *routers: str, ttl_s: float = 60) -> list[SharedWork]:
    """One for each router."""
    return [SharedWork(connection, KEYS, router, Ledger(), ttl_s) for router in routers]


def shared_fields(ledger: Ledger) -> dict[str, InFlight]:
    """Requests in flight as other routers read them."""
    return {pod: work.without_head() for pod, work in ledger.own().items()}


async def test_a_router_sees_the_others_and_not_itself(connection: RedisConnection) -> None:
    """In one round trip."""
    one, two, three = rows(connection, "1", "2", "3")
    assert await one.rows(WORK) == {}
    assert await two.rows({}) == {"1": WORK}
    assert await three.rows({"c": InFlight(1, 1, 1, 1.0, 1)}) == {"1": WORK, "2": {}}
    assert await one.rows({}) == {"2": {}, "3": {"c": InFlight(1, 1, 1, 1.0, 1)}}


async def test_fields_by_the_routers_own_clock_are_not_shared(connection: RedisConnection) -> None:
    """The time since a prompt is first in line."""
    ledger = Ledger()
    ledger.book(POD, 1000, 600, 77.0)
    one, (two,) = SharedWork(connection, KEYS, "1", ledger), rows(connection, "2")
    await one.exchange()
    (found,) = (await two.rows({})).values()
    assert ledger.own()["a"].head_ms > 0.0
    assert found == {"a": structs.replace(ledger.own()["a"], head_ms=0.0, head_since_s=0.0)}


async def test_leaving_removes_the_row(connection: RedisConnection) -> None:
    """At once."""
    one, two = rows(connection, "1", "2")
    await one.rows(WORK)
    await one.leave()
    assert await two.rows({}) == {}


async def test_a_dead_replicas_row_expires(connection: RedisConnection) -> None:
    """And is deleted later."""
    (dead,), (patient,), (alive,) = rows(connection, "1"), rows(connection, "2"), rows(connection, "2", ttl_s=0.05)
    await dead.rows(WORK)
    assert set(await patient.rows({})) == {"1"}

    async def is_passed_over() -> bool:
        return await alive.rows({}) == {}

    async def is_gone() -> bool:
        await alive.rows({})
        return bool(await connection.client.hkeys(KEYS.routers) == [b"2"])

    await until(is_passed_over)
    await until(is_gone)


@pytest.mark.parametrize(
    "row", [b"", b"no time", b"\xff\xff", b"12345", b"99999999999999 \xc1", b"99999999999999 \x01"]
)
async def test_an_unreadable_row_is_skipped(connection: RedisConnection, row: bytes) -> None:
    one, two = rows(connection, "1", "2")
    await one.rows(WORK)
    await connection.client.hset(KEYS.routers, "strange", row)
    assert await two.rows({}) == {"1": WORK}


@pytest.fixture
def own_server() -> Iterator[RedisProcess]:
    with redis_process() as running:
        yield running


async def test_two_routers_share_their_load_and_keep_their_own_without_redis(own_server: RedisProcess) -> None:
    """A dispatch of one counts for the other until it finishes or Redis fails."""
    connections = [RedisConnection(address_of(own_server.url, timeout_s=20)) for _ in range(2)]
    ledgers = [Ledger(), Ledger()]
    feeds = [
        SharedWork(connection, KEYS, name, ledger, 60)
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
        own_server.kill()
        await until(is_alone)
        assert feeds[1].known == 1, "the other one still sends to the same pods"
        assert ledgers[0].inflight() == ledgers[0].own() != {}
        own_server.start()
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


async def test_a_router_of_an_earlier_version_shares_the_same_rows(connection: RedisConnection) -> None:
    """The bytes are those that 58a10953 wrote. Fields may be added at the end; nothing else may change."""
    await connection.client.set(KEYS.drains, b'{"rack=r1":{"at_s":1.0,"by":"old","why":"x"}}')
    await connection.client.set(KEYS.response("r"), b"\x93\xa1a\xa1m\xa0")
    now_ms = (await connection.client.time())[0] * 1000
    work = b"\x81\xa1a\x9a\x02\x01\xcd\x01,\xcb@D\xc0" + 5 * b"\0" + b"\xcd\x03\x84\x00\x00" + 2 * (b"\xcb" + 8 * b"\0")
    work += b"\xcb" + 8 * b"\0"
    await connection.client.hset("state:1:routers", "old", b"%d " % now_ms + work)
    await connection.client.hset("state:1:{quotas}:members", "old", str(now_ms))
    await connection.client.hset("state:1:{quotas}:meter:m", "old", f"3 5 {now_ms}")
    (router,) = rows(connection, "new")
    assert await router.rows({"a": WORK["a"]}) == {"old": {"a": WORK["a"]}}
    assert (await connection.client.hget("state:1:routers", "new")).partition(b" ")[2] == work
    responses = SharedResponses(connection, KEYS)
    found = await responses.find("r")
    assert found is not None and (found.pod, found.model, found.owner) == ("a", "m", "")
    responses.add(StoredResponse("own", "a", "m", 0.0))
    await responses.exchange()
    assert await connection.client.get("state:1:response:own") == await connection.client.get("state:1:response:r")
    drains = Drains()
    drains.change("rack=r2", Drain(2.0, "new"))
    assert await SharedDrains(connection, KEYS, drains, no_pods).share()
    assert await connection.client.get("state:1:drains") == (
        b'{"rack=r1":{"at_s":1.0,"by":"old","why":"x"},"rack=r2":{"at_s":2.0,"by":"new","why":""}}'
    )
    granted = await SharedQuotas(connection, KEYS, "new", MeterSharing()).grants([CeilingReport("m", 10, 1, 9)])
    assert granted == Grants([Grant(5, 3, 0)], 2)
    assert (await connection.client.hget("state:1:{quotas}:meter:m", "new")).startswith(b"1 5 ")


async def no_pods() -> None:
    """There are none to apply drains to."""
