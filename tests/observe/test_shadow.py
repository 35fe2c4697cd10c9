"""A shadow policy decides a sample of the traffic again."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from router.observe.metrics import Metrics
from router.observe.shadow import MAX_WAITING, Shadows
from router.policy.decide import decide
from router.policy.recording import record
from router.policy.spec import Policy, Shadow
from router.types import InFlight, Role, Scene
from tests.policy.scenes import holding, pod, policy, ready, request, scene

pytestmark = pytest.mark.anyio

CHAT = {"class": "chat"}
LIVE, HIT = policy("queue", "prefill", name="live"), policy("prefill", name="hit")


def seen(name: str = "r") -> Scene:
    """The holder of the prompt has a queue of 500 ms."""
    busy = {"a": InFlight(1, 1, 9, 500.0, 9)}
    return holding(scene(*ready(pod("a"), pod("b")), request=request(name), inflight=busy), "a", 60)


def shadows(metrics: Metrics, *policies: Policy) -> Shadows:
    return Shadows({one.name: one for one in policies}.get, metrics)


def shadowed_by(name: str, rate: float = 1.0) -> Policy:
    """The live policy with a shadow."""
    return replace(LIVE, shadow=Shadow(policy=name, rate=rate))


def offer(shadow: Shadows, live: Policy, name: str = "r", ttft_ms: float | None = None) -> None:
    shadow.offer(record(seen(name), "chat"), decide(seen(name), live), live, ttft_ms)


async def compared(shadow: Shadows) -> None:
    async with asyncio.timeout(30):
        while shadow._waiting:
            await asyncio.sleep(0.001)


def counted(metrics: Metrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(name, labels) or 0.0


async def test_a_policy_agrees_with_itself() -> None:
    """For many requests."""
    metrics = Metrics()
    shadow = shadows(metrics, LIVE)
    for number in range(20):
        offer(shadow, shadowed_by("live"), str(number))
    assert shadow._waiting  # nothing is decided while the request is there
    await compared(shadow)
    assert counted(metrics, "warmroute_shadow_decisions_total", policy="live", agrees="yes", **CHAT) == 20


async def test_the_gain_of_the_other_choice_is_counted_by_both_prices() -> None:
    """The live policy prices the queue, the shadow only the cache; the first token came after 600 ms."""
    metrics = Metrics()
    shadow = shadows(metrics, HIT)
    offer(shadow, shadowed_by("hit"), ttft_ms=600.0)
    await compared(shadow)
    assert counted(metrics, "warmroute_shadow_decisions_total", policy="hit", **CHAT, agrees="no") == 1
    later = counted(metrics, "warmroute_shadow_later_seconds_total", policy="hit", **CHAT, prices="live")
    sooner = counted(metrics, "warmroute_shadow_sooner_seconds_total", policy="hit", **CHAT, prices="shadow")
    regret = counted(metrics, "warmroute_shadow_regret_seconds_sum", policy="hit", **CHAT)
    assert (later, sooner, regret) == pytest.approx((0.480, 0.020, 0.098), abs=0.003)


@pytest.mark.parametrize(("rate", "least", "most"), [(0.0, 0, 0), (0.5, 60, 140), (1.0, 200, 200)])
async def test_a_shadow_decides_its_share_of_the_requests(rate: float, least: int, most: int) -> None:
    """Chosen by id, so that replicas and restarts choose the same."""
    metrics = Metrics()
    shadow = shadows(metrics, LIVE)
    for number in range(200):
        offer(shadow, shadowed_by("live", rate), str(number))
    waiting = len(shadow._waiting)
    assert least <= waiting <= most


async def test_requests_over_the_queue_limit_are_dropped_and_counted() -> None:
    """Without waiting."""
    metrics = Metrics()
    shadow = shadows(metrics, LIVE)
    for number in range(MAX_WAITING + 3):
        offer(shadow, shadowed_by("live"), str(number))
    assert counted(metrics, "warmroute_shadow_dropped_total", policy="live", **CHAT) == 3


async def test_a_scene_that_the_shadow_refuses_is_counted_as_dropped() -> None:
    """There is nothing to compare."""
    metrics = Metrics()
    refusing: Policy = policy("queue", "handoff", name="refusing", pd={"on_no_prefill": "fail"})
    shadow = shadows(metrics, refusing)
    alone = scene(*ready(pod("d", role=Role.DECODE, handoff="nixl")))
    shadow.offer(record(alone, "chat"), decide(alone, LIVE), shadowed_by("refusing"), None)
    await compared(shadow)
    assert counted(metrics, "warmroute_shadow_dropped_total", policy="refusing", **CHAT) == 1


async def test_without_a_shadow_nothing_is_decided_twice() -> None:
    """Also where a reload removed the shadow."""
    shadow = shadows(Metrics(), LIVE)
    offer(shadow, LIVE)
    offer(shadow, shadowed_by("gone"))
    assert not shadow._waiting
