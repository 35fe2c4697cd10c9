"""A fleet that the configuration names."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from router.config.schema import PodConfig
from router.errors import ConfigError
from router.feeds.discovery.static import StaticDiscovery, configured_pods
from router.types import Pod, PodSpeed, Role

SPEED = PodSpeed(1.0, 0.02, 0.0)


def pods(*ids: str) -> tuple[Pod, ...]:
    return tuple(Pod(id=pod_id, url=f"http://{pod_id}", engine="vllm", speed=SPEED) for pod_id in ids)


@pytest.mark.parametrize(
    ("config", "ids"),
    [
        (PodConfig(url="http://10.0.0.7:8000"), ["10.0.0.7:8000"]),
        (PodConfig(url="https://gate.svc/pods/3/"), ["gate.svc/pods/3"]),
        (PodConfig(url="http://10.0.0.7:8000", dp_size=2), ["10.0.0.7:8000#0", "10.0.0.7:8000#1"]),
        (PodConfig(url="http://10.0.0.7:8000", id="left", dp_size=2), ["left#0", "left#1"]),
    ],
)
def test_a_definition_becomes_a_pod_for_each_rank(config: PodConfig, ids: list[str]) -> None:
    """Named after where it is, unless it has a name."""
    found = configured_pods(config, SPEED)
    assert [pod.id for pod in found] == ids
    assert [pod.dp_rank for pod in found] == ([None] if config.dp_size == 1 else [0, 1])
    assert {pod.url for pod in found} == {config.url}


def test_a_pod_stands_where_the_definition_says() -> None:
    """Engine, role, speed and topology are taken over."""
    config = PodConfig(
        url="http://p:1", engine="sglang", role=Role.PREFILL, handoff="bootstrap", host="h", rack="r", zone="z"
    )
    (pod,) = configured_pods(config, SPEED)
    assert (pod.engine, pod.role, pod.speed) == ("sglang", Role.PREFILL, SPEED)
    assert (pod.host, pod.rack, pod.zone) == ("h", "r", "z")


def test_pods_that_start_from_different_speeds_do_not_learn_as_one() -> None:
    """What one has shown would be forgotten each time that the other shows something."""
    slower = replace(SPEED, c1_ms_per_token=SPEED.c1_ms_per_token * 2)
    first, same, other, plain = (
        configured_pods(PodConfig(url=f"http://p:{number}", hardware="h100x4", speed=speed), speed or SPEED)[0].hardware
        for number, speed in enumerate((SPEED, SPEED, slower, None))
    )
    assert first == same and len({first, other, plain}) == 3 and plain == "h100x4"


def test_a_pod_moves_kv_as_the_definition_says() -> None:
    """Every rank alike; a token's bytes are unknown unless they are given."""
    config = PodConfig(url="http://p:1", dp_size=2, handoff="nixl", pulls="p2p")
    for pod in configured_pods(config, SPEED, 131_072):
        assert (pod.handoff, pod.pulls, pod.kv_bytes_per_token) == ("nixl", "p2p", 131_072)
    (plain,) = configured_pods(PodConfig(url="http://p:1"), SPEED)
    assert (plain.handoff, plain.pulls, plain.kv_bytes_per_token) == ("", "", 0)


def test_two_pods_may_not_share_an_id() -> None:
    """The set that was there stays."""
    discovery = StaticDiscovery(pods("a"))
    with pytest.raises(ConfigError, match="id a"):
        discovery.replace(pods("a", "b", "a"))
    assert discovery.pods == pods("a")


@pytest.mark.anyio
async def test_sets_come_complete_at_once_and_after_each_change() -> None:
    """A change that comes while the reader is busy is not lost, and only the latest counts."""
    discovery = StaticDiscovery(pods("a"))
    async with asyncio.timeout(5.0):
        sets = aiter(discovery)
        assert await anext(sets) == pods("a")
        discovery.replace(pods("a", "b"))
        discovery.replace(pods("b"))
        assert await anext(sets) == pods("b")
        waiting = asyncio.ensure_future(anext(sets))
        await asyncio.sleep(0)
        assert not waiting.done()
        discovery.replace(pods("c"))
        assert await waiting == pods("c")
