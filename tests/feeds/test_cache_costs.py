"""Deletion costs from the index: what is cached where, asked of a fleet that works."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest

from router.feeds.cache_costs import TURN_STEPS, CacheCosts
from router.fleet.fleet import PodEvent
from router.fleet.ledger import Ledger
from router.index.recent_prompts import RecentPrompts
from router.stores.prefix_store import LocalStore
from router.types import Generation, PodSpeed, PrefixMatch, PromptPrefix
from tests.policy.scenes import fleet_of, make_pod

pytestmark = pytest.mark.anyio
GENERATION = Generation(model="m", block_size_tokens=16)
SPEED = PodSpeed(c0_ms=0.0, c1_ms_per_token=1.0, c2_ms_per_token2=0.0)
BLOCK_MS = 16


class Routed:
    """A router's state. `pods` by id are Kubernetes pods with the uid `uid-ID`, each with one rank."""

    def __init__(self, *pods: str) -> None:
        self.recent = RecentPrompts()
        self.store = LocalStore()
        self.ledger = Ledger()
        self.fleet = fleet_of(*(make_pod(pod, uid=f"uid-{pod}", speed=SPEED, models=("m",)) for pod in pods))
        self.costs = CacheCosts(
            self.recent, self.store, self.fleet, self.ledger, lambda pod: GENERATION if "m" in pod.models else None
        )

    def send(self, pod: str, hashes: Sequence[int]) -> None:
        now_s = time.monotonic()
        self.recent.put(hashes, None, now_s)
        prediction = self.store.predict(pod, PromptPrefix(GENERATION, (), hashes), ttl_s=1000.0, capacity_blocks=None)
        self.store.confirm(prediction, now_s)


async def test_a_pod_costs_the_prefill_of_what_it_alone_holds() -> None:
    routed = Routed("a", "b", "c")
    routed.send("a", range(1, 11))
    routed.send("b", [1, 2, 3, 4, 20, 21])
    assert await routed.costs.read() == {"uid-a": 6 * BLOCK_MS, "uid-b": 2 * BLOCK_MS, "uid-c": 0}


async def test_work_in_flight_is_added() -> None:
    routed = Routed("a", "b")
    pod = routed.fleet.snapshot.pods[0].pod
    lease = routed.ledger.book(pod, 500, 200, 0.0)
    assert await routed.costs.read() == {"uid-a": 300, "uid-b": 0}
    routed.ledger.first_token(lease, 1.0)
    assert await routed.costs.read() == {"uid-a": 500, "uid-b": 0}


async def test_what_an_ejected_pod_holds_counts_nothing() -> None:
    routed = Routed("a", "b")
    routed.send("a", range(1, 11))
    routed.send("b", range(1, 11))
    routed.fleet.event("b", PodEvent.EJECT)
    assert await routed.costs.read() == {"uid-a": 10 * BLOCK_MS, "uid-b": 0}


async def test_pods_outside_of_kubernetes_hold_blocks_and_have_no_cost() -> None:
    routed = Routed("a")
    routed.fleet.sync([*(status.pod for status in routed.fleet.snapshot.pods), make_pod("static")])
    routed.fleet.event("static", PodEvent.PROBE_OK)
    routed.fleet.describe("static", models=("m",))
    routed.send("a", range(1, 11))
    routed.send("static", range(1, 8))
    assert await routed.costs.read() == {"uid-a": 3 * BLOCK_MS}


async def test_costs_are_unknown_while_the_index_is_incomplete(monkeypatch: pytest.MonkeyPatch) -> None:
    routed = Routed("a")
    routed.send("a", range(1, 11))

    def degraded(_prefix: PromptPrefix, _now_s: float) -> PrefixMatch:
        return PrefixMatch(degraded=True)

    monkeypatch.setattr(routed.store, "match", degraded)
    assert await routed.costs.read() is None


async def test_other_tasks_run_between_a_few_prompts() -> None:
    """A million blocks are not read in one turn of the event loop."""
    prompts, blocks = 256, 256
    routed = Routed("a")
    for number in range(prompts):
        routed.send("a", range(1 + blocks * number, 1 + blocks * (number + 1)))
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(count())
    costs = await routed.costs.read()
    task.cancel()
    assert costs is not None
    assert costs["uid-a"] == pytest.approx(prompts * blocks * BLOCK_MS, rel=0.05)
    assert turns >= prompts * blocks // TURN_STEPS
