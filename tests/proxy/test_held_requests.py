"""Requests that wait for the first pod of their model: how long, in which order, and what the others get."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from msgspec.structs import replace

from router.admission.tenant import Admitted, Tenant
from router.errors import NoReadyPod
from router.fleet.fleet import Fleet, PodEvent
from router.frontends.held_requests import HeldRequests
from tests.kit.cores import CoreOfPods
from tests.kit.scenes import make_pod
from tests.kit.virtual_time import run_virtually

MISSING = NoReadyPod("none", model="m")
TENANTS = {name: Tenant(name=name, weight=weight) for name, weight in (("a", 1.0), ("b", 1.0), ("c", 2.0))}


class Rig:
    """A fleet without pods, and what waits for one."""

    def __init__(self, hold_s: float = 60.0, max_requests: int = 1000) -> None:
        self.fleet, self.waiting, self.order = Fleet(), list[int](), list[str]()
        self.held = HeldRequests(self.fleet, hold_s, max_requests, lambda _model, count: self.waiting.append(count))

    async def wait(self, tenant: str, size_bytes: int = 100) -> None:
        until_s = asyncio.get_running_loop().time() + self.held.hold_s
        await self.held.wait(MISSING, Admitted(tenant, TENANTS[tenant]), size_bytes, until_s)
        self.order.append(tenant)

    def start_pod(self) -> None:
        self.fleet.sync([make_pod("p", models=("m",))])
        self.fleet.event("p", PodEvent.PROBE_OK)


def test_all_go_when_the_first_pod_is_ready() -> None:
    async def scenario(rig: Rig) -> float:
        tasks = [asyncio.create_task(rig.wait("a")) for _ in range(200)]
        asyncio.get_running_loop().call_later(20.0, rig.start_pod)
        await asyncio.gather(*tasks)
        return asyncio.get_running_loop().time()

    rig = Rig()
    assert run_virtually(scenario(rig)) == pytest.approx(20.0, abs=0.5)
    assert (max(rig.waiting), rig.waiting[-1], len(rig.order)) == (200, 0, 200)


def test_their_order_is_fair_by_bytes_and_weights() -> None:
    """Also where one tenant has sent most of them first. Of two tenants with one weight, each has half of the bytes."""

    async def scenario(rig: Rig) -> None:
        asked = [("a", 100)] * 100 + [("b", 200)] * 30 + [("c", 100)] * 60
        tasks = [asyncio.create_task(rig.wait(*one)) for one in asked]
        asyncio.get_running_loop().call_later(20.0, rig.start_pod)
        await asyncio.gather(*tasks)

    rig = Rig()
    run_virtually(scenario(rig))
    sent = Counter(rig.order[1:81])  # the first had its turn before others came
    assert [sent["a"], 2 * sent["b"]] == pytest.approx([23, 23], abs=3)
    assert sent["c"] == pytest.approx(2 * sent["a"], abs=3)


def test_a_tenant_that_asks_without_end_leaves_others_their_places() -> None:
    """An eighth more than all is kept for those that come later, and one of them gets half of that."""

    async def scenario(rig: Rig) -> None:
        tasks = [asyncio.create_task(rig.wait(tenant)) for tenant in "a" * 50 + "b" * 10 + "a" * 50]
        asyncio.get_running_loop().call_later(5.0, rig.start_pod)
        await asyncio.gather(*tasks, return_exceptions=True)

    rig = Rig(max_requests=16)
    run_virtually(scenario(rig))
    assert (rig.order.count("a"), rig.order.count("b")) == (16, 1)


def test_a_request_waits_no_longer_than_it_may() -> None:
    """Those after it wait on."""

    async def scenario(rig: Rig) -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        first = asyncio.create_task(rig.wait("a"))
        await asyncio.sleep(20)
        second = asyncio.create_task(rig.wait("b"))
        with pytest.raises(NoReadyPod, match="none"):
            await first
        refused_s = loop.time()
        loop.call_later(5.0, rig.start_pod)
        await second
        return refused_s, loop.time()

    rig = Rig(hold_s=30.0)
    assert run_virtually(scenario(rig)) == pytest.approx((30.0, 35.0), abs=1.5)
    assert (rig.order, rig.waiting[-1]) == (["b"], 0)


def test_what_the_last_start_took_is_when_to_try_again() -> None:
    """For those that are too many to wait; without a start, after a second."""

    async def scenario(rig: Rig) -> list[float | None]:
        found = list[float | None]()
        for start_s in (40.0, 60.0):
            waiting = asyncio.create_task(rig.wait("a"))
            await asyncio.sleep(10)
            with pytest.raises(NoReadyPod) as caught:
                await rig.wait("a")
            found.append(caught.value.retry_after_s)
            await asyncio.sleep(start_s - 10)
            rig.start_pod()
            await waiting
            rig.fleet.sync([])
        return found

    assert run_virtually(scenario(Rig(hold_s=100.0, max_requests=1))) == pytest.approx([1.0, 30.0], abs=1.5)


def test_a_pod_that_comes_before_the_wait_teaches_nothing() -> None:
    """The last start that was seen stays what it was."""

    async def scenario(rig: Rig) -> float | None:
        waiting = asyncio.create_task(rig.wait("a"))
        await asyncio.sleep(40)
        rig.start_pod()
        await waiting
        await rig.wait("b")
        rig.fleet.sync([])
        first = asyncio.create_task(rig.wait("a"))
        await asyncio.sleep(10)
        with pytest.raises(NoReadyPod) as caught:
            await rig.wait("a")
        rig.start_pod()
        await first
        return caught.value.retry_after_s

    assert run_virtually(scenario(Rig(hold_s=100.0, max_requests=1))) == pytest.approx(30.0, abs=1.5)


def test_a_client_that_leaves_waits_no_more() -> None:
    """Neither the first nor another one holds up the rest."""

    async def scenario(rig: Rig) -> None:
        tasks = [asyncio.create_task(rig.wait(name)) for name in "abc"]
        await asyncio.sleep(1)
        for task in tasks[:2]:
            task.cancel()
        await asyncio.wait(tasks[:2])
        rig.start_pod()
        await tasks[2]

    rig = Rig()
    run_virtually(scenario(rig))
    assert (rig.order, rig.waiting[-1]) == (["c"], 0)


@pytest.mark.parametrize(("stored_pod", "waits"), [("", True), ("p", False)])
def test_a_request_for_a_stored_response_does_not_wait_while_its_pod_drains(stored_pod: str, waits: bool) -> None:
    """No other pod has the response."""
    core = CoreOfPods([make_pod("p")])
    core.fleet.event("p", PodEvent.DRAIN)
    context, held = core.context(), HeldRequests(core.fleet, 60.0, 10)
    context.stored_pod = stored_pod
    assert (held.unserved(context, {}) is not None) is waits


def test_a_pod_is_wanted_while_a_fallback_serves_in_its_place() -> None:
    """Else no request would wake one that sleeps, and a provider would take money for good."""
    core = CoreOfPods([make_pod("p"), make_pod("q")])
    core.fleet.describe("q", models=("n",))
    core.fleet.event("p", PodEvent.DRAIN)
    context, held = core.context(), HeldRequests(core.fleet, 60.0, 10)
    context.request = replace(context.request, fallbacks=("n",))
    assert not held.is_wanted("m") and held.unserved(context, {}) is None and held.is_wanted("m")
