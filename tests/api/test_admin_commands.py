"""What people change at one worker reaches the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.api.admin_commands import AdminCommands
from router.config.policies import PolicyFolder
from router.config.schema import PodConfig
from router.config.shipped import shipped
from router.feeds.policy_feed import PolicyFeed
from router.fleet.fleet import Fleet
from router.fleet.lifecycle import PodEvent
from router.observe.metrics import Metrics
from router.types import Pod, PodId, PodSpeed, PodState

URL = "http://a:8000"


class Worker:
    """One with orders and nothing else; `told` is what the others hear."""

    def __init__(self) -> None:
        self.fleet = Fleet()
        folder = PolicyFolder(Path(shipped("policies")), "cost_aware", frozenset())
        self.policies = PolicyFeed(folder, Metrics())
        self.commands = AdminCommands(self.fleet, self.policies, self._add, self._remove)
        self.told: list[tuple[str, str]] = []
        self.commands.publish = lambda subject, wanted: self.told.append((subject, wanted))

    def _add(self, pod: PodConfig) -> None:
        self.fleet.sync([Pod(id="a:8000", url=pod.url, engine=pod.engine, speed=PodSpeed(1.0, 1.0, 0.0))])

    def _remove(self, pod_id: PodId) -> bool:
        self.fleet.event(pod_id, PodEvent.LOST)
        return True

    def hear(self, other: Worker) -> None:
        """Obey all that `other` told."""
        for subject, wanted in other.told:
            self.commands.apply_remote(subject, wanted)
        other.told.clear()

    def state(self) -> PodState | None:
        status = self.fleet.status("a:8000")
        return status.state if status else None


def test_a_pod_is_added_drained_undrained_and_removed_everywhere() -> None:
    """Step by step; those who obey tell nobody."""
    one, two = Worker(), Worker()
    one.commands.add(PodConfig(url=URL))
    two.hear(one)
    assert two.state() is PodState.JOINING
    assert one.commands.drain("a:8000", PodEvent.DRAIN) is PodState.DRAINING
    two.hear(one)
    assert two.state() is PodState.DRAINING
    assert one.commands.drain("a:8000", PodEvent.UNDRAIN) is PodState.JOINING
    two.hear(one)
    assert two.state() is PodState.JOINING
    assert one.commands.remove("a:8000")
    two.hear(one)
    assert two.state() is None
    assert not two.told


def test_nobody_is_told_of_a_pod_that_is_none() -> None:
    """There is nothing to remove."""
    one = Worker()
    assert not one.commands.remove("a:8000")
    assert not one.told


@pytest.mark.anyio
async def test_the_others_are_told_before_policies_are_read() -> None:
    """Of two who read at once, the one that was asked first hears of the other, and reads again what that has seen."""
    one, when_told = Worker(), list[bool]()
    read_by_then = b'warmroute_policy_reloads_total{result="ok"} 1.0'
    one.commands.publish = lambda subject, wanted: when_told.append(read_by_then in one.policies._metrics.render())
    await one.commands.reload()
    assert (when_told, read_by_then in one.policies._metrics.render()) == ([False], True)


@pytest.mark.anyio
async def test_policies_are_read_anew_everywhere() -> None:
    """Each worker reads the files itself."""
    one, two = Worker(), Worker()
    done = await one.commands.reload()
    two.hear(one)
    for reload in tuple(two.commands._reloads):
        assert (await reload).version == done.version
    assert b'warmroute_policy_reloads_total{result="ok"} 1.0' in two.policies._metrics.render()
