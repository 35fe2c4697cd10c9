"""The hostile soak measures good requests, attacks in every way, and finds what is wrong."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest

from loadtest.faults.hostile_clients import KINDS, Attacker, AttackKind, Attacks
from loadtest.faults.hostile_soak import HostileResult, Phase
from loadtest.faults.soak_pods import SoakPod

net = [pytest.mark.net, pytest.mark.anyio]


@pytest.fixture
async def pod() -> AsyncIterator[int]:
    """The port of a pod."""
    server = await asyncio.get_running_loop().create_server(SoakPod, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


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
