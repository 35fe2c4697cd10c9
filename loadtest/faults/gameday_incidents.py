"""The seven incidents of the game day: what begins each, and the line of the page and the alert that should show it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from loadtest.commands.child_processes import JSON_CALL, FleetPlan
from tests.redis_process import RedisProcess

PODS = 6
PLAN = FleetPlan(pods=PODS, num_blocks=8192, time_scale=2.0)
"""Half as fast as the hardware, so that the router's own time is small against that of the engines."""
LINK_GB_PER_S = 25.0
"""The configuration has a port of 200 Gb/s. Over a link of 6 GB/s, splitting prompts would not pay in this fleet."""
MOCK_LINK_FACTOR = 137.0 / LINK_GB_PER_S / PLAN.time_scale
"""Makes the mock engines' own link, at their speed, as fast as the configured one."""


@dataclass(slots=True)
class Rig:
    """What an incident acts on. `send` starts the load of one more tenant."""

    pods: Sequence[str]
    policies: Path
    redis: RedisProcess | None
    send: Callable[[], object] = lambda: None

    async def inject(self, pods: Sequence[str], **fault: object) -> None:
        """Arm a fault of these mock engines."""
        async with httpx.AsyncClient(trust_env=False) as client:
            for url in pods:
                (await client.post(f"{url}/_fault", json=fault, headers=JSON_CALL)).raise_for_status()


async def _restart(rig: Rig) -> None:
    await rig.inject(rig.pods[: PODS // 2], kind="restart")


async def _throttle(rig: Rig) -> None:
    await rig.inject(rig.pods[3:4], kind="throttle", factor=3.0)


async def _lose_events(rig: Rig) -> None:
    await rig.inject(rig.pods[2:3], kind="lose_events", count=20, replayable=False)


async def _kill_redis(rig: Rig) -> None:
    assert rig.redis is not None
    await asyncio.to_thread(rig.redis.kill)


async def _change_policy(rig: Rig) -> None:
    """Somebody wanted 0.01."""
    path = rig.policies / "cost_aware.yaml"
    text = path.read_text()
    changed = text.replace("weight: 0.01 ", "weight: 100 ")
    assert changed != text
    path.write_text(changed)


async def _flood(rig: Rig) -> None:
    rig.send()


async def _slow_link(rig: Rig) -> None:
    await rig.inject(rig.pods, kind="slow_link", factor=10 * MOCK_LINK_FACTOR)


@dataclass(frozen=True, slots=True)
class Incident:
    """One incident: what it is, what begins it, and the line and the alert that should show it."""

    title: str
    begin: Callable[[Rig], Awaitable[None]]
    notice: str
    alert: str
    redis: bool = False
    split: bool = False
    """The fleet has prefill and decode pods."""


INCIDENTS: Mapping[str, Incident] = {
    "caches": Incident(f"{PODS // 2} of {PODS} pods restart", _restart, "restarts", "WarmrouteCachesLost"),
    "slow-pod": Incident("one pod becomes three times slower", _throttle, "slow", "WarmroutePodSlow"),
    "events": Incident("KV events of one pod are lost", _lose_events, "events", "WarmrouteKvEventsIncomplete"),
    "redis": Incident("Redis is killed", _kill_redis, "index", "WarmrouteIndexStale", redis=True),
    "policy": Incident("decode.weight 100, not 0.01", _change_policy, "policy", "WarmroutePolicyWorse"),
    "tenant": Incident("a tenant floods with long prompts", _flood, "tenant", "WarmrouteTenantFloods"),
    "link": Incident("P/D links at a tenth of their bandwidth", _slow_link, "link", "WarmrouteLinkSlow", split=True),
}
