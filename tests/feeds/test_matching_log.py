"""The log says how prompts are matched: once all pods are tested, and when that changes."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping, Sequence
from typing import Any

import pytest
from structlog.testing import capture_logs

from router.feeds.matching_log import MatchingLog
from router.feeds.supervise import STEP
from router.fleet.fleet import PodEvent
from router.types import Matching, Pod, PodId, PrefixTrust
from tests.policy.scenes import fleet_of, make_pod

pytestmark = pytest.mark.anyio
GOOD = Matching.EVENTS, ""
REFUSED = Matching.NO_EVENTS, "no KV events: tcp://d:5557: Connection refused; check the port"
Logs = Sequence[MutableMapping[str, Any]]


class World:
    """Four tested pods whose prompts are matched by KV events."""

    def __init__(self) -> None:
        self.fleet = fleet_of(*map(make_pod, "abcd"))
        self.found: dict[PodId, tuple[Matching, str]] = dict.fromkeys("abcd", GOOD)
        self.log = MatchingLog(self.fleet, self.matching_of)
        for pod in "abcd":
            self.fleet.trust(pod, PrefixTrust.TRUSTED, "equal")

    def matching_of(self, pod: Pod) -> tuple[Matching, str]:
        return self.found[pod.id]

    async def check(self) -> Logs:
        with capture_logs() as logs:
            await self.log.check()
        return logs


async def test_a_good_fleet_has_one_line() -> None:
    world = World()
    (line,) = await world.check()
    assert (line["log_level"], line["event"]) == ("info", "ready")
    assert line["matching"] == "of 4 pods, 4 matched by KV events"
    assert not await world.check()


async def test_pods_that_are_not_matched_are_a_warning_with_the_reason() -> None:
    """The pods, then the sum of all."""
    world = World()
    world.found |= {"d": REFUSED, "c": (Matching.OFF, "no tokenizer; add it")}
    off, refused, ready = await world.check()
    assert {line["log_level"] for line in (off, refused, ready)} == {"warning"}
    assert (refused["pods"], refused["matching"], refused["reason"]) == (["d"], "no_events", REFUSED[1])
    assert off["pods"] == ["c"]
    assert ready["matching"] == (
        f"of 4 pods, 2 matched by KV events, 1 by what they were sent: {REFUSED[1]},"
        " 1 by load only: no tokenizer; add it"
    )


async def test_pods_with_one_cause_share_a_line_and_so_does_their_recovery() -> None:
    world = World()
    await world.check()
    away = Matching.NO_EVENTS, "no KV events: Redis at r:6379 does not answer"
    world.found = dict.fromkeys("abcd", away)
    (line,) = await world.check()
    assert (line["log_level"], line["pods"], line["reason"]) == ("warning", [*"abcd"], away[1])
    world.found = dict.fromkeys("abcd", GOOD)
    (line,) = await world.check()
    assert (line["log_level"], line["count"], line["matching"]) == ("info", 4, "events")


async def test_the_summary_waits_for_tests_but_not_for_pods_that_are_known_not_to_answer() -> None:
    world = World()
    world.fleet.restarted("a")
    assert not await world.check()
    world.fleet.trust("a", PrefixTrust.TRUSTED, "equal")
    assert [line["event"] for line in await world.check()] == ["ready"]
    world = World()
    world.fleet.event("a", PodEvent.DRAIN)
    world.fleet.event("a", PodEvent.UNDRAIN)
    assert not await world.check()
    world.fleet.explain_state("a", "connection refused")
    assert [line["matching"] for line in await world.check()] == ["of 3 pods, 3 matched by KV events"]


async def test_pods_that_each_have_a_cause_of_their_own_are_logged_in_turns() -> None:
    """A blocked port has another address on each pod; 500 lines at once stop the event loop for 20 ms."""
    pods, most = [f"pod-{number}" for number in range(200)], 0
    fleet = fleet_of(*map(make_pod, pods))
    for pod in pods:
        fleet.trust(pod, PrefixTrust.TRUSTED, "equal")
    log = MatchingLog(fleet, lambda pod: (Matching.NO_EVENTS, f"tcp://{pod.id}:5557 is refused"))
    with capture_logs() as logs:
        checking = asyncio.create_task(log.check())
        while not checking.done():
            before = len(logs)
            await asyncio.sleep(0)
            most = max(most, len(logs) - before)
    assert len(logs) == len(pods) + 1 and most <= STEP
