"""Each change of a pod is one log line with its reason; so is how its prompts are matched, once all are tested."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import pytest
from structlog.testing import capture_logs

from router.engines.adapter import PodFacts
from router.feeds.pod_log import MatchingLog, log_changes, warn_of_others_models
from router.feeds.supervise import STEP
from router.fleet.breaker import Breaker, Probes
from router.fleet.fleet import Fleet, PodEvent
from router.observe.changes import Changes
from router.types import Matching, Pod, PodId, PrefixTrust
from tests.kit.scenes import fleet_of, make_pod

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
            await self.log.write()
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
        checking = asyncio.create_task(log.write())
        while not checking.done():
            before = len(logs)
            await asyncio.sleep(0)
            most = max(most, len(logs) - before)
    assert len(logs) == len(pods) + 1 and most <= STEP


@pytest.fixture
def changes() -> Changes:
    return Changes()


@pytest.fixture
def fleet(changes: Changes) -> Fleet:
    """Two ready pods, whose changes are logged from now on."""
    fleet = fleet_of(make_pod("a"), make_pod("b"))
    fleet.listen(log_changes(fleet, changes))
    return fleet


def logged(change: Callable[[], object]) -> dict[str, Any]:
    """The only line that a change causes."""
    with capture_logs() as lines:
        change()
    [line] = lines
    return dict(line)


def test_a_drain_has_the_reason_of_its_source(fleet: Fleet) -> None:
    line = logged(lambda: fleet.event("a", PodEvent.DRAIN, reason="not ready in Kubernetes"))
    assert (line["log_level"], line["new"], line["reason"]) == ("info", "draining", "not ready in Kubernetes")
    assert logged(lambda: fleet.event("b", PodEvent.DRAIN))["reason"] == "admin call"


def test_an_ejection_is_a_warning_with_the_failures_that_caused_it(fleet: Fleet) -> None:
    breaker = Breaker(fleet, Probes(failures_to_eject=2, min_ready_share=0.0))
    breaker.failure("a", 0.0)
    line = logged(lambda: breaker.failure("a", 0.0))
    assert (line["log_level"], line["reason"]) == ("warning", "2 requests in a row failed")
    assert fleet.state_reason("a") == "2 requests in a row failed"


def test_a_restart_is_no_change_of_state(fleet: Fleet) -> None:
    line = logged(lambda: fleet.restarted("a"))
    assert line["event"] == "pod restarted; its cache is empty"


def test_an_event_that_changes_nothing_is_no_line(fleet: Fleet) -> None:
    with capture_logs() as lines:
        fleet.event("a", PodEvent.PROBE_OK)
        fleet.event("a", PodEvent.UNDRAIN)
    assert not lines


@pytest.mark.parametrize(
    ("facts", "allowed", "of"),
    [
        ({"models": ("other", "m")}, (), "a"),
        ({"models": ("other",), "adapters": ("m",)}, (), "a"),
        ({"models": ("other", "m")}, ("other", "m"), None),
        ({"models": ("m",)}, (), None),
        ({"models": ("other",)}, (), None),
    ],
)
def test_a_pod_that_lists_models_of_others_is_named(
    facts: dict[str, tuple[str, ...]], allowed: tuple[str, ...], of: str | None
) -> None:
    """It would receive their prompts. Not where its `models` are configured, nor a pod of the same model."""
    fleet, pod = fleet_of(make_pod("a", models=("m",)), make_pod("b")), make_pod("b", allowed_models=allowed)
    with capture_logs() as lines:
        warn_of_others_models(fleet, pod, PodFacts(**facts))  # type: ignore[arg-type]
    assert [(line["pod"], line["of"], line["models"]) for line in lines] == ([("b", of, ["m"])] if of else [])


def test_what_changes_the_pods_that_can_serve_is_recorded_with_its_cause(fleet: Fleet, changes: Changes) -> None:
    """A pod joins when it is ready, and leaves when it is drained: that it is listed or removed then is no change."""
    fleet.event("a", PodEvent.EJECT, reason="3 health checks in a row failed")
    fleet.explain_state("a", "connection refused")
    fleet.event("a", PodEvent.PROBE_OK)
    fleet.restarted("a")
    fleet.event("a", PodEvent.DRAIN)
    fleet.event("a", PodEvent.UNDRAIN)
    fleet.event("a", PodEvent.PROBE_OK)
    fleet.event("b", PodEvent.DRAIN, reason="not ready in Kubernetes")
    fleet.event("b", PodEvent.LOST)
    fleet.event("a", PodEvent.LOST)
    assert [(one.what, one.subject, one.cause) for one in reversed(changes.latest())] == [
        ("ejected", "a", "3 health checks in a row failed"),
        ("readmitted", "a", "health check passed"),
        ("restarted", "a", "a new process answers; its cache is empty"),
        ("left", "a", "admin call"),
        ("joined", "a", "health check passed"),
        ("left", "b", "not ready in Kubernetes"),
        ("left", "a", "removed, or no longer listed"),
    ]
