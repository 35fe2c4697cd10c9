"""Another pod beside one that does not begin to answer, where a policy wants that."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from router.sim.mock_engine import Fault, FaultKind
from tests.stories.conftest import City, OpenCity
from tests.stories.test_failures import holder_of
from tests.stories.test_fault_matrix import IMPATIENT, attempts, nothing_stays_behind
from tests.stories.test_first_light import opening

pytestmark = [pytest.mark.net, pytest.mark.anyio]

SOON_MS = 50
POLICY = "name: hedged\nabout: x\nextends: cost_aware\nretry: {{hedge_after_ms: {ms}, attempts: {attempts}}}\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A policy that hedges soon."""
    (tmp_path / "hedged.yaml").write_text(POLICY.format(ms=SOON_MS, attempts=2))
    return tmp_path


def name_of(city: City, at: int) -> str:
    return city.engines[at].url.removeprefix("http://")


async def hedged(city: City) -> float:
    """How often another pod was asked beside one."""
    wanted = 'warmroute_retries_total{reason="hedge"} '
    lines = (await city.client.get("/metrics")).text.splitlines()
    return sum(float(line.removeprefix(wanted)) for line in lines if line.startswith(wanted))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_pod_that_hangs_is_not_waited_for(open_city: OpenCity, folder: Path, stream: bool) -> None:
    """The other one answers; the first is told to stop, and nothing is held against it."""
    async with open_city(pods=2, policy="hedged", policies=folder) as city:
        at = await holder_of(city, "reefs")
        city.engines[at].inject(Fault(kind=FaultKind.HANG))
        answer = await city.chat(opening("reefs"), stream=stream)
        assert (answer.status_code, answer.headers["x-warmroute-pod"]) == (200, name_of(city, 1 - at))
        assert await hedged(city) == 1
        assert [await attempts(city, at, result) for result in ("UpstreamTimeout", "UpstreamBroken")] == [0, 0]
        await nothing_stays_behind(city)


async def test_the_first_may_still_be_first(open_city: OpenCity, folder: Path) -> None:
    """Where the other one is slower still; then that one is called off."""
    async with open_city(pods=2, policy="hedged", policies=folder) as city:
        at = await holder_of(city, "reefs")
        city.engines[at].inject(Fault(kind=FaultKind.SLOW, pause_s=3 * SOON_MS / 1000))
        city.engines[1 - at].inject(Fault(kind=FaultKind.HANG))
        answer = await city.chat(opening("reefs"))
        assert (answer.status_code, answer.headers["x-warmroute-pod"]) == (200, name_of(city, at))
        assert await hedged(city) == 1
        await nothing_stays_behind(city)


async def test_a_pod_that_answers_in_time_is_alone(open_city: OpenCity, tmp_path: Path) -> None:
    """Nobody computes in vain."""
    (tmp_path / "hedged.yaml").write_text(POLICY.format(ms=60_000, attempts=2))
    async with open_city(pods=2, policy="hedged", policies=tmp_path) as city:
        assert (await city.chat(opening("reefs"))).status_code == 200
        assert await hedged(city) == 0


async def test_where_the_other_fails_the_first_is_waited_for(open_city: OpenCity, folder: Path) -> None:
    """A hedge makes nothing worse."""
    async with open_city(pods=2, policy="hedged", policies=folder) as city:
        at = await holder_of(city, "reefs")
        city.engines[at].inject(Fault(kind=FaultKind.SLOW, pause_s=3 * SOON_MS / 1000))
        city.engines[1 - at].inject(Fault(kind=FaultKind.RESET, count=2))  # a kept connection is replaced once
        answer = await city.chat(opening("reefs"))
        assert (answer.status_code, answer.headers["x-warmroute-pod"]) == (200, name_of(city, at))
        await nothing_stays_behind(city)


async def test_where_both_fail_the_next_one_is_tried(open_city: OpenCity, tmp_path: Path) -> None:
    """Each failure is held against the pod whose it is."""
    (tmp_path / "hedged.yaml").write_text(POLICY.format(ms=SOON_MS, attempts=3))
    async with open_city(pods=3, policy="hedged", policies=tmp_path, limits=IMPATIENT) as city:
        at = await holder_of(city, "reefs")
        for number, engine in enumerate(city.engines):
            engine.inject(Fault(kind=FaultKind.HANG if number == at else FaultKind.RESET, count=2))
        failed = await city.chat(opening("reefs"))
        assert failed.status_code == 502
        assert await attempts(city, at, "UpstreamTimeout") == 1
        assert sum([await attempts(city, number, "UpstreamBroken") for number in range(3)]) == 2
        await nothing_stays_behind(city)


async def test_a_client_that_leaves_calls_both_off(open_city: OpenCity, folder: Path) -> None:
    """Nothing goes on for nobody."""
    async with open_city(pods=2, policy="hedged", policies=folder) as city:
        for engine in city.engines:
            engine.inject(Fault(kind=FaultKind.HANG))
        asking = asyncio.create_task(city.chat(opening("reefs")))
        await city.until(lambda: len(city.program.ledger.inflight()) == 2)
        asking.cancel()
        await asyncio.wait([asking])
        await nothing_stays_behind(city)
        assert 'result="client_gone"} 1.0' in (await city.client.get("/metrics")).text
