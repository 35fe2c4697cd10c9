"""What one router learnt another one finds, in a real Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from router.policy.calibration import Calibration, PrefillObservation
from router.stores.calibration import SharedCalibration, calibration_key
from router.stores.connection import Connection, parse_url
from router.stores.schema import Keys
from router.types import PodSpeed
from tests.redis_servers.server import RedisServer, binaries, until

pytestmark = [pytest.mark.anyio, pytest.mark.net]

KEYS = Keys("calibration")
KEY = calibration_key(KEYS, "org/model")
PRIOR = PodSpeed(10.0, 0.05, 1e-6)


@pytest.fixture(params=sorted(binaries()))
async def connection(request: pytest.FixtureRequest) -> AsyncIterator[Connection]:
    """To each server that exists here."""
    async with RedisServer(str(request.param)) as server:
        made = Connection(parse_url(server.url), timeout_s=2)
        yield made
        await made.close()


def shared(connection: Connection, lifetime_s: float = 60) -> SharedCalibration:
    return SharedCalibration(connection, KEYS, "org/model", lifetime_s=lifetime_s)


def learnt(observations: int, factor: float = 2.0, class_key: str = "h100") -> Calibration:
    """From prompts of 1,000 tokens that take `factor` times what the prior says."""
    calibration = Calibration()
    learn(calibration, observations, factor, class_key)
    return calibration


def learn(calibration: Calibration, observations: int, factor: float = 2.0, class_key: str = "h100") -> None:
    for _ in range(observations):
        seen = PrefillObservation(1, 1000, 1_000_000, factor * PRIOR.prefill_ms(1000))
        calibration.observe_prefill(class_key, "pod", PRIOR, seen)


def prefill_ms(calibration: Calibration, class_key: str = "h100") -> float:
    return calibration.speed(class_key, "pod", PRIOR).prefill_ms(1000)


async def test_a_new_router_starts_with_what_others_know(connection: Connection) -> None:
    """And not from the prior."""
    old, new = learnt(80), Calibration()
    await shared(connection).exchange(old)
    await shared(connection).exchange(new)
    assert prefill_ms(new) == prefill_ms(old) != PRIOR.prefill_ms(1000)


async def test_of_each_class_the_fit_that_has_seen_most_stays(connection: Connection) -> None:
    """Whoever writes last."""
    one, other = learnt(80), learnt(5, factor=3.0)
    learn(other, 40, class_key="a100")
    await shared(connection).exchange(one)
    await shared(connection).exchange(other)
    newcomer = Calibration()
    await shared(connection).exchange(newcomer)
    assert prefill_ms(newcomer) == prefill_ms(other) == prefill_ms(one)
    assert prefill_ms(newcomer, "a100") == prefill_ms(other, "a100") != PRIOR.prefill_ms(1000)


async def test_a_router_without_news_repeats_nothing(connection: Connection) -> None:
    """What others have learnt since stands."""
    idle, busy = learnt(200), learnt(200, factor=0.5)
    idle_shared = shared(connection)
    await idle_shared.exchange(idle)
    await shared(connection).exchange(busy)
    written = await connection.client.get(KEY)
    await idle_shared.exchange(idle)
    assert await connection.client.get(KEY) == written == busy.dump()


async def test_after_redis_lost_everything_it_is_written_again(connection: Connection) -> None:
    """By whoever comes next, news or not."""
    calibration, store = learnt(10), shared(connection)
    await store.exchange(calibration)
    await connection.client.flushall()
    await store.exchange(calibration)
    assert await connection.client.get(KEY) == calibration.dump()


@pytest.mark.parametrize("garbage", [b"", b"\xc1", b"nonsense", b"\x80"])
async def test_garbage_is_passed_over_and_replaced(connection: Connection, garbage: bytes) -> None:
    """Nobody fails for it."""
    calibration, store = learnt(10), shared(connection)
    before = prefill_ms(calibration)
    await store.exchange(calibration)
    await connection.client.set(KEY, garbage)
    await store.exchange(calibration)
    assert prefill_ms(calibration) == before
    assert await connection.client.get(KEY) == calibration.dump()


async def test_it_expires_when_nobody_learns_any_more(connection: Connection) -> None:
    """A model that is not served leaves nothing behind."""
    await shared(connection, lifetime_s=0.05).exchange(learnt(10))

    async def is_gone() -> bool:
        return not await connection.client.exists(KEY)

    await until(is_gone)


def test_models_and_versions_do_not_meet() -> None:
    """The key tells them apart."""
    assert KEY == "calibration:1:calibration:2:org/model"
