"""What routers share can be overwritten by a process with their user. A router reads a bounded part and goes on."""

from __future__ import annotations

import math

import msgspec
import pytest
from structlog.testing import capture_logs

from router.admission.sharing import CeilingReport, Grant, Grants, MeterSharing
from router.feeds.shared_rows import SharedQuotas, SharedResponses, SharedWork
from router.policy.calibration import Calibration
from router.stores.redis_connection import RedisConnection
from tests.stores.test_rows_in_redis import (
    H100,
    KEY,
    KEYS,
    PRIOR,
    WORK,
    fitted,
    observe_prompts,
    prefill_ms,
    rows,
    shared,
)

pytestmark = [pytest.mark.anyio, pytest.mark.net]

MIB = 1 << 20


async def sent_bytes(connection: RedisConnection) -> int:
    """What the server has sent to all its clients."""
    return int((await connection.client.info("stats"))["total_net_output_bytes"])


async def forge_row(connection: RedisConnection, router: str | bytes, row: bytes) -> None:
    """Write a row as a router would, now."""
    seconds, micros = await connection.client.time()
    await connection.client.hset(KEYS.routers, router, b"%d %b" % (seconds * 1000 + micros // 1000, row))


async def router_two(connection: RedisConnection) -> SharedWork:
    """A second router; the first has shared its work."""
    one, two = rows(connection, "1", "2")
    await one.rows(WORK)
    return two


# --- rows of routers ---


async def test_a_large_row_is_not_read_and_the_others_are(connection: RedisConnection) -> None:
    """It is removed and named in a warning, once."""
    two = await router_two(connection)
    before = await sent_bytes(connection)
    with capture_logs() as lines:
        for _ in range(3):
            await forge_row(connection, "large", b"x" * 25 * MIB)
            await forge_row(connection, b"y" * 9 * MIB, b"\x80")
            assert await two.rows({}) == {"1": WORK}
    assert await sent_bytes(connection) - before < MIB
    assert {line["router"][:9] for line in lines} == {"large", "y" * 9} and len(lines) == 2


async def test_many_rows_are_dropped(connection: RedisConnection) -> None:
    """Routers write theirs again with their next exchange."""
    one, two = rows(connection, "1", "2")
    stamp = (await connection.client.time())[0] * 1000
    await connection.client.hset(KEYS.routers, mapping={str(n): b"%d \x80" % stamp for n in range(20_000)})
    before = await sent_bytes(connection)
    for _ in range(2):
        await two.rows({})
        await one.rows(WORK)
    assert await two.rows({}) == {"1": WORK}
    assert await sent_bytes(connection) - before < MIB


async def test_rows_with_more_pods_than_a_fleet_has_are_skipped(connection: RedisConnection) -> None:
    """Each pod costs work at every exchange."""
    two = await router_two(connection)
    many = msgspec.msgpack.encode({format(number, "x"): [] for number in range(4_000)})
    for number in range(20):
        await forge_row(connection, f"forged {number}", many)
    found = await two.rows({})
    assert sum(map(len, found.values())) <= 10_000


@pytest.mark.parametrize(
    "work", [[-5], [10**12], [1, 1, 1, math.nan], [1, 1, 1, math.inf], [1, 1, 1, 1e300], [1, 1, 1, -1e6], [0, 0, 2**60]]
)
async def test_a_row_with_numbers_out_of_range_is_skipped(connection: RedisConnection, work: list[float]) -> None:
    """With a warning."""
    two = await router_two(connection)
    await forge_row(connection, "forged", msgspec.msgpack.encode({"a": work}))
    with capture_logs() as lines:
        assert await two.rows({}) == {"1": WORK}
    assert [line["router"] for line in lines] == ["forged"]


# --- calibration ---


async def test_a_large_calibration_is_not_read(connection: RedisConnection) -> None:
    """And replaced."""
    own = fitted(10)
    await connection.client.set(KEY, b"x" * 25 * MIB)
    before = await sent_bytes(connection)
    await shared(connection, own).exchange()
    assert await sent_bytes(connection) - before < MIB
    assert await connection.client.get(KEY) == own.dump()


async def test_a_calibration_of_many_classes_is_not_loaded(connection: RedisConnection) -> None:
    """Each takes time, and would be kept and passed on."""
    forged, own = Calibration(), Calibration()
    for number in range(100):
        observe_prompts(forged, 2, class_key=f"org/model/{number}/x")
    await connection.client.set(KEY, forged.dump())
    await shared(connection, own).exchange()
    assert not list(own.rows())


async def test_forged_calibrations_do_not_add_up(connection: RedisConnection) -> None:
    """Other classes in each."""
    own = fitted(10)
    exchange = shared(connection, own)
    for number in range(20):
        forged = Calibration()
        for other in range(10):
            observe_prompts(forged, 2, class_key=f"org/model/{number}/{other}")
        observe_prompts(forged, 2, class_key=f"another/model/{number}")
        await connection.client.set(KEY, forged.dump())
        await exchange.exchange()
    known = msgspec.msgpack.decode(own.dump())["classes"]
    assert H100 in known and len(known) <= 32 and all(key.startswith("org/model/") for key in known)


@pytest.mark.parametrize("factor", [50.0, 1 / 50])
async def test_forged_speeds_far_from_the_prior_are_not_loaded(connection: RedisConnection, factor: float) -> None:
    """A router that believes in them refuses or overloads."""
    own, forged = Calibration(), msgspec.msgpack.decode(fitted(200).dump())
    fit = forged["classes"][H100]
    size = len(fit["prior"])
    fit["log_coefficients"] = [math.log(factor * value) for value in fit["prior"]]
    fit["covariance"] = [[1e-6 * (row == column) for row in range(size)] for column in range(size)]
    await connection.client.set(KEY, msgspec.msgpack.encode(forged))
    await shared(connection, own).exchange()
    assert prefill_ms(own) == PRIOR.prefill_ms(1000)


# --- responses and quotas ---


async def test_a_large_row_of_a_response_is_not_read(connection: RedisConnection) -> None:
    await connection.client.set(KEYS.response("r"), msgspec.msgpack.encode(("a", "m" * 25 * MIB, "")))
    before = await sent_bytes(connection)
    assert await SharedResponses(connection, KEYS).find("r") is None
    assert await sent_bytes(connection) - before < MIB


@pytest.mark.parametrize("row", ["", "x", "nan", "1e999", pytest.param("9" * 400, id="long"), "99999999999999"])
async def test_members_that_are_none_do_not_count(connection: RedisConnection, row: str) -> None:
    """And keep no router from its share."""
    await connection.client.hset(KEYS.quota_members, "forged", row)
    await connection.client.hset(KEYS.quota("m"), "forged", f"10 10 {row}")
    granted = await SharedQuotas(connection, KEYS, "a", MeterSharing()).grants([CeilingReport("m", 10, 0, 5)])
    assert granted == Grants([Grant(5, 0, 5)], 1)


async def test_forged_use_does_not_become_an_allowance(connection: RedisConnection) -> None:
    """Sums that do not fit into 64 bits would be negative."""
    seconds, _ = await connection.client.time()
    for forged in range(3):
        row = f"{'9' * 300} 0 {seconds * 1000}"
        await connection.client.hset(KEYS.quota("m"), f"forged {forged}", row)
    granted = await SharedQuotas(connection, KEYS, "a", MeterSharing()).grants([CeilingReport("m", 10, 0, 5)])
    assert granted.grants[0].others_used > 10


async def test_many_members_are_dropped(connection: RedisConnection) -> None:
    """Redis would go through all of them for every router, twenty times a second."""
    crowd = {str(number): "x" for number in range(20_000)}
    await connection.client.hset(KEYS.quota_members, mapping=crowd)
    await connection.client.hset(KEYS.quota("m"), mapping=crowd)
    await SharedQuotas(connection, KEYS, "a", MeterSharing()).grants([CeilingReport("m", 10, 0, 5)])
    assert await connection.client.hlen(KEYS.quota_members) == await connection.client.hlen(KEYS.quota("m")) == 1
