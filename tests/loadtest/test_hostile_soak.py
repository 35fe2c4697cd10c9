"""The hostile soak measures good requests, attacks in every way, and finds what is wrong."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import AsyncIterator

import pytest

from loadtest.faults.good_clients import GoodClients, GoodConnection, GoodResults
from loadtest.faults.hostile_clients import KINDS, Attacker, AttackKind, Attacks, chat, huge, request
from loadtest.faults.hostile_soak import HostileResult, Percentiles, Phase, table
from loadtest.faults.soak_pods import SoakPod

net = [pytest.mark.net, pytest.mark.anyio]


@pytest.fixture
async def pod() -> AsyncIterator[int]:
    """The port of a pod."""
    server = await asyncio.get_running_loop().create_server(SoakPod, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


class TestGoodClients:
    pytestmark = net

    async def test_all_kinds_are_answered_and_timed(self, pod: int) -> None:
        """A stream's first byte comes before its end."""
        good = GoodClients(pod, 500, [chat(stream=True)], [chat(stream=False)])
        good.results = results = GoodResults()
        running = asyncio.create_task(good.run())
        async with asyncio.timeout(20):
            while len(results.e2e_s) < 3:
                await asyncio.sleep(0.01)
        running.cancel()
        await good.finish()
        assert set(results.e2e_s) == {"stream", "unary", "chat turn"}
        assert not results.failures and not good.failures
        assert 0 < min(results.ttft_s["stream"]) < min(results.e2e_s["stream"])

    async def test_caches_are_filled_until_they_are_full(self, pod: int) -> None:
        """By several clients, whose requests are not among the results."""
        good, full = GoodClients(pod, 500, [chat(stream=True)], [chat(stream=False)]), asyncio.Event()
        good.results = GoodResults()
        full.set()
        await good.fill(3, full)
        assert len(good._idle) == 3
        assert not good.results.e2e_s and not good.failures
        await good.finish()

    @pytest.mark.parametrize(
        ("fault", "error"), [(b"500", "status 500"), (b"cut", "connection lost"), (b"garbage", "unreadable response")]
    )
    async def test_a_failure_is_named(self, pod: int, fault: bytes, error: str) -> None:
        """And the connection is not used again."""
        _, connection = await asyncio.get_running_loop().create_connection(GoodConnection, "127.0.0.1", pod)
        sent = request(chat(stream=True), headers=b"x-soak-fault: %b\r\n" % fault)
        assert (await connection.ask(sent))[2] == error
        assert connection.lost


class TestAttacks:
    pytestmark = net

    async def test_every_kind_runs_and_its_end_is_counted(self, pod: int) -> None:
        """Except those that take seconds on purpose."""
        slow = {"slow senders", "slow readers", "idle connections", "huge bodies", "endless bodies"}
        kinds = {name: AttackKind(kind.run, per_s=1000, at_once=1) for name, kind in KINDS.items() if name not in slow}
        attacks = Attacks(Attacker(pod, random.Random(1)), kinds)
        running = asyncio.create_task(attacks.run())
        async with asyncio.timeout(30):
            while {end.partition(":")[0] for end in attacks.ends} < kinds.keys():
                await asyncio.sleep(0.01)
        running.cancel()
        ends = await attacks.finish()
        assert not [end for end in ends if "Error" in end]

    async def test_an_attack_that_fails_does_not_end_the_others(self, pod: int) -> None:
        async def fails(_attacker: Attacker) -> str:
            raise ValueError

        attacks = Attacks(Attacker(pod, random.Random(1)), {"broken": AttackKind(fails, per_s=1000)})
        running = asyncio.create_task(attacks.run())
        async with asyncio.timeout(10):
            while attacks.ends["broken: ValueError"] < 3:
                await asyncio.sleep(0)
        running.cancel()


def test_huge_bodies_reach_the_limit_of_a_request() -> None:
    """32 MiB, one of them above."""
    sizes = sorted(map(len, huge()))
    assert sizes[0] > 2**22 and sizes[-1] > 2**25 >= sizes[-2]


# --- the verdict ---


def result(**fields: object) -> HostileResult:
    """A run of an hour with phases of 4 minutes and constant memory."""
    phases = [Phase(hostile=bool(n % 2), began_minute=4.0 * n, rss_mib=100.0) for n in range(15)]
    return HostileResult(60, 100, **{"phases": phases, **fields})  # type: ignore[arg-type]


def test_a_run_without_failures_and_growth_is_good() -> None:
    assert result(delays_ms={"stream TTFT": 19.9}, left_behind={"warmroute_in_flight_requests": 0.0}).verdict == []


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"failures": {"stream: status 503": 2}}, "2 times stream: status 503"),
        ({"delays_ms": {"stream TTFT": 20.1}}, "p99 of stream TTFT rose by 20.1 ms"),
        ({"left_behind": {"connected clients": 1}}, "connected clients is 1"),
        ({"errors": ["phase at minute 3"]}, "phase at minute 3"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, object], said: str) -> None:
    assert result(**fields).verdict == [said]


def test_memory_is_compared_between_quiet_phases_after_the_first_quarter() -> None:
    """Caches fill before, and hostile phases hold large bodies."""
    grown = result()
    grown.phases[0].rss_mib, grown.phases[13].rss_mib = 10.0, 900.0
    assert grown.verdict == []
    grown.phases[14].rss_mib = 103.0
    assert grown.verdict == ["memory grew by 3.0%"]


def test_memory_is_not_judged_where_the_caches_still_fill() -> None:
    grown = result(fills=False)
    grown.phases[14].rss_mib = 103.0
    assert grown.verdict == []


def test_percentiles_are_in_milliseconds() -> None:
    values = array("d", [each / 1000 for each in range(1, 1001)])
    assert Percentiles.of(values).p50_ms == pytest.approx(500, abs=1)
    assert Percentiles.of(values).p99_ms == pytest.approx(990, abs=1)
    assert Percentiles.of(values).max_ms == 1000
    assert Percentiles.of(array("d")).p99_ms == 0


def test_the_table_has_both_sides() -> None:
    times = {"stream TTFT": Percentiles(1, 2, 3)}
    shown = table(result(with_attacks=times, without_attacks=times, delays_ms={"stream TTFT": 0.0}))
    assert shown.row_count > 4
