"""Ring points are known before the first decision."""

from __future__ import annotations

import asyncio

import pytest

from router.feeds.policy_feed import RingFeed, ring_sizes
from router.fleet.fleet import Fleet
from router.policy.policy_set import PolicySet
from router.policy.ring import PodRing, pod_points
from router.policy.spec import Policy
from tests.kit.deadlines import running, until
from tests.kit.scenes import POLICIES, make_pod

pytestmark = pytest.mark.anyio
RING = PolicySet(POLICIES["ring_bounded_load"])
POINTS = 100


@pytest.fixture(autouse=True)
def no_points() -> None:
    pod_points.cache_clear()


async def test_the_first_ring_of_a_fleet_needs_no_new_points() -> None:
    """One pod is computed in each turn of the loop."""
    fleet, turns = Fleet(), 0
    fleet.sync([make_pod(f"p{number}") for number in range(50)])
    preparing = asyncio.ensure_future(RingFeed(fleet, lambda: RING).prepare())
    while not preparing.done():
        before = pod_points.cache_info().misses
        await asyncio.sleep(0)
        turns += 1
        assert pod_points.cache_info().misses - before <= 1
    assert turns >= 50
    PodRing([status.pod.id for status in fleet.snapshot.pods], POINTS)
    assert pod_points.cache_info().misses == 50


async def test_a_pod_that_joins_is_computed_at_once() -> None:
    """Pods of the fleet before, and pods that join later."""
    fleet = Fleet()
    fleet.sync([make_pod("a")])
    async with running(RingFeed(fleet, lambda: RING).run()):
        await until(lambda: pod_points.cache_info().currsize == 1)
        fleet.sync([make_pod("a"), make_pod("b")])
        await until(lambda: pod_points.cache_info().currsize == 2)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (POLICIES["session"], {POINTS}),
        (POLICIES["cost_aware"], set()),
    ],
    ids=["ring", "no ring"],
)
async def test_only_policies_with_a_ring_need_points(policy: Policy, expected: set[int]) -> None:
    assert ring_sizes(PolicySet(policy)) == expected
