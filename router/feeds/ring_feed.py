"""Computes the ring points of pods when they join, before a decision needs them.

The points of one pod take up to 0.1 ms. One pod is computed in each turn of the event loop, so that 500 pods that join
together do not stop it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from router.feeds.supervise import pause
from router.fleet.fleet import Fleet
from router.policy.pickers import RingBoundedLoad
from router.policy.policy_set import PolicySet
from router.policy.ring import pod_points

INTERVAL_S = 1.0
"""Time between checks for policies that have changed."""


@dataclass(slots=True, eq=False)
class RingFeed:
    fleet: Fleet
    policies: Callable[[], PolicySet]

    async def run(self) -> None:
        changed = asyncio.Event()
        unlisten = self.fleet.listen(lambda *_: changed.set())
        try:
            while True:
                await self.prepare()
                await pause(changed, INTERVAL_S)
        finally:
            unlisten()

    async def prepare(self) -> None:
        for points_per_pod in ring_sizes(self.policies()):
            for status in self.fleet.snapshot.pods:
                known = pod_points.cache_info().misses
                pod_points(status.pod.id, points_per_pod)
                if pod_points.cache_info().misses > known:
                    await asyncio.sleep(0)


def ring_sizes(policies: PolicySet) -> set[int]:
    """`points_per_pod` of all rings in use."""
    pickers = (policy.picker for policy in policies.active)
    return {picker.points_per_pod for picker in pickers if isinstance(picker, RingBoundedLoad)}
