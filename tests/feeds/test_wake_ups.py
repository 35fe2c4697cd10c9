"""Pods that sleep: seen by their probes, woken when requests would wait for longer than that takes. In virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from math import inf
from typing import Any

import httpx
import pytest

from router.admission.tenant import Admitted, Tenant
from router.decision import Lease
from router.errors import NoReadyPod
from router.feeds.probe import SLEEPS, PodProbe
from router.feeds.supervise import cancel_all
from router.feeds.wake_ups import FIRST_S, WakeUps
from router.feeds.watch import Watch
from router.fleet.breaker import Breaker, Probes
from router.fleet.fleet import Fleet
from router.fleet.ledger import Ledger
from router.frontends.held_requests import HeldRequests
from router.types import Pod, PodSpeed, PodState, PrefixTrust
from tests.kit.fake_pods import Network
from tests.kit.scenes import make_pod
from tests.kit.virtual_time import run_virtually

MODELS = b'{"data": [{"id": "m"}]}'
WAKE_S = 4.0
SPEED = PodSpeed(0.0, 1.0, 0.0)
HELD = NoReadyPod("none", model="m")


@dataclass
class Engine:
    """A vLLM with sleep mode. `level` 0: awake."""

    level: int = 0
    breaks: bool = False
    calls: list[str] = field(default_factory=list)
    reports_level: bool = True

    def is_sleeping(self, _request: httpx.Request) -> bytes:
        return b'{"is_sleeping": true}' if self.level else b'{"is_sleeping": false}'

    def metrics(self, _request: httpx.Request) -> bytes:
        states = {1: "weights_offloaded", 2: "discard_all"}
        return b'vllm:engine_sleep_state{sleep_state="%b"} %d\n' % (
            states.get(self.level, "awake").encode(),
            self.reports_level,
        )


class Rig:
    """A fleet of sleeping pods of a model, its probes and what wakes it, for one router or several."""

    def __init__(self, *levels: int, routers: int = 1) -> None:
        self.network, self.engines = Network(), {f"p{number}": Engine(level) for number, level in enumerate(levels)}
        for name, engine in self.engines.items():
            known = self.network[name]
            known.answers = {"/health": b"", "/v1/models": MODELS}
            known.answers |= {"/is_sleeping": engine.is_sleeping, "/metrics": engine.metrics}
        self.routers = [Router(self) for _ in range(routers)]
        self.router = self.routers[0]

    async def post(self, pod: Pod, path: str, body: Any, timeout_s: float) -> bytes:
        engine = self.engines[pod.id]
        engine.calls.append(path + str(body.get("method", "")))
        if engine.breaks:
            return await self.network.post(pod, "/missing", {}, timeout_s)
        await asyncio.sleep(WAKE_S)
        if path in ("/wake_up", "/wake_up?tags=kv_cache"):
            engine.level = 0
        return b"{}"

    def run(self, scenario: Coroutine[Any, Any, Any]) -> Any:
        async def running() -> Any:
            tasks = [asyncio.create_task(router.watch.run()) for router in self.routers]
            try:
                await asyncio.sleep(3.0)  # all are seen
                return await scenario
            finally:
                await cancel_all(tasks)

        return run_virtually(running())


class Router:
    """What one router knows."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.fleet, self.ledger = rig, Fleet(), Ledger()
        self.held = HeldRequests(self.fleet, 600.0, 100)
        self.fleet.sync([make_pod(name, models=(), speed=SPEED, url=f"http://{name}") for name in rig.engines])
        breaker = Breaker(self.fleet, Probes())
        probe = PodProbe(self.fleet, breaker, rig.network.fetch, self._describe, Probes())
        now_s = lambda: asyncio.get_running_loop().time()  # noqa: E731
        wakes = WakeUps(self.fleet, self.ledger, rig.network.fetch, rig.post, self.held.is_wanted, now_s)
        self.watch = Watch(self.fleet, [[probe.check], [wakes.check]])

    def _describe(self, pod: Pod, _facts: Any) -> None:
        self.fleet.describe(pod.id, models=("m",))

    def states(self) -> list[PodState]:
        return [status.state for status in self.fleet.snapshot.pods]

    async def wait(self) -> float:
        """How long a request waits for the first pod."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await self.held.wait(HELD, Admitted("a", Tenant(name="a")), 100, inf)
        return loop.time() - began_s

    def book(self, pod: str, prefill_s: float) -> Lease:
        status = self.fleet.status(pod)
        assert status is not None
        return self.ledger.book(status.pod, int(prefill_s * 1000), 0, asyncio.get_running_loop().time())


READY, DRAINING = PodState.READY, PodState.DRAINING


async def seen(rig: Rig) -> None:
    router, engine = rig.router, rig.engines["p0"]
    assert router.states() == [READY]
    router.fleet.trust("p0", PrefixTrust.TRUSTED, "tested")
    before, engine.level = router.fleet.snapshot.pods[0].pod.epoch, 1
    await asyncio.sleep(3.0)
    pod = router.fleet.snapshot.pods[0].pod
    assert (router.states(), pod.is_asleep, router.fleet.state_reason("p0")) == ([DRAINING], True, SLEEPS)
    assert (pod.epoch > before, pod.trust) == (True, PrefixTrust.UNTESTED)
    engine.level, epoch = 0, pod.epoch
    await asyncio.sleep(3.0)
    pod = router.fleet.snapshot.pods[0].pod
    assert (router.states(), pod.is_asleep, pod.epoch, engine.calls) == ([READY], False, epoch, [])


def test_a_pod_that_falls_asleep_gets_no_requests_and_has_forgotten_its_cache() -> None:
    """It is tested again when it wakes. Nobody wakes it while nobody waits."""
    rig = Rig(0)
    rig.run(seen(rig))


@pytest.mark.parametrize(
    ("level", "calls"),
    [
        (1, ["/wake_up"]),
        (2, ["/wake_up?tags=weights", "/collective_rpcreload_weights", "/wake_up?tags=kv_cache"]),
    ],
)
def test_a_request_without_a_ready_pod_wakes_one(level: int, calls: list[str]) -> None:
    """One only. At level 2 the weights are loaded again before it serves."""
    rig = Rig(level, level)
    waited_s = rig.run(rig.router.wait())
    assert waited_s == pytest.approx(len(calls) * WAKE_S, abs=2.0)
    assert [engine.calls for engine in rig.engines.values()] == [calls, []]


def test_several_routers_wake_the_same_pod() -> None:
    rig = Rig(1, 1, 1, routers=3)

    async def scenario() -> None:
        await asyncio.gather(*(router.wait() for router in rig.routers))

    rig.run(scenario())
    assert [bool(engine.calls) for engine in rig.engines.values()] == [True, False, False]


def test_a_pod_that_cannot_be_woken_is_the_last_one() -> None:
    """Also one that is paused, for new weights, or does not say how it sleeps."""
    rig = Rig(1, 1, 1)
    rig.engines["p0"].breaks, rig.engines["p1"].reports_level = True, False
    waited_s = rig.run(rig.router.wait())
    assert waited_s < 4 * WAKE_S
    assert [bool(engine.calls) for engine in rig.engines.values()] == [True, False, True]


async def queued(rig: Rig, prefill_s: float) -> list[PodState]:
    rig.router.book("p0", prefill_s)
    await asyncio.sleep(1.0 + WAKE_S + 3.0)
    return rig.router.states()


@pytest.mark.parametrize(("prefill_s", "second"), [(FIRST_S - 1, DRAINING), (2 * FIRST_S, READY)])
def test_a_second_pod_is_woken_if_the_prompts_ahead_take_longer_than_that(prefill_s: float, second: PodState) -> None:
    rig = Rig(0, 1, 1)
    assert rig.run(queued(rig, prefill_s)) == [READY, second, DRAINING]


def test_what_the_last_wake_up_took_is_what_the_next_one_costs() -> None:
    """4 s, which is less than what is assumed at first."""
    rig = Rig(1, 1)

    async def scenario() -> list[PodState]:
        await rig.router.wait()
        return await queued(rig, FIRST_S - 1)

    assert rig.run(scenario()) == [READY, READY]


def test_a_pod_without_sleep_mode_is_asked_once() -> None:
    rig = Rig(0)
    del rig.network["p0"].answers["/is_sleeping"]
    rig.run(asyncio.sleep(10.0))
    assert (rig.router.states(), rig.network["p0"].asked["/is_sleeping"]) == ([READY], 1)
