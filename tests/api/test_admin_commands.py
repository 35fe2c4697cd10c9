"""Admin commands of one worker are applied by the others."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from router.frontends.admin.admin_commands import AdminCommands

from router.config.load import shipped
from router.config.pod_schema import PodConfig
from router.config.policy_files import PolicyFolder
from router.feeds.policy_feed import PolicyFeed
from router.fleet.fleet import Fleet, PodEvent
from router.observe.metrics import Metrics
from router.types import Pod, PodId, PodSpeed, PodState

URL = "http://a:8000"


class Worker:
    """A worker with only admin commands; `published` is what it sends to the others."""

    def __init__(self) -> None:
        self.fleet = Fleet()
        folder = PolicyFolder(Path(shipped("policies")), "cost_aware", frozenset())
        self.policies = PolicyFeed(folder, Metrics())
        self.commands = AdminCommands(self.fleet, self.policies, self._add, self._remove, self.fleet.event)
        self.published: list[tuple[str, str]] = []
        self.commands.publish = lambda subject, wanted: self.published.append((subject, wanted))

    def _add(self, pod: PodConfig) -> None:
        self.fleet.sync([Pod(id="a:8000", url=pod.url, engine=pod.engine, speed=PodSpeed(1.0, 1.0, 0.0))])

    def _remove(self, pod_id: PodId) -> bool:
        self.fleet.event(pod_id, PodEvent.LOST)
        return True

    def apply(self, other: Worker) -> None:
        """Apply everything that `other` published."""
        for subject, wanted in other.published:
            self.commands.apply_remote(subject, wanted)
        other.published.clear()

    def state(self) -> PodState | None:
        status = self.fleet.status("a:8000")
        return status.state if status else None


def test_pods_are_added_drained_undrained_and_removed_in_every_worker() -> None:
    """Applied commands are not published again."""
    one, two = Worker(), Worker()
    one.commands.add(PodConfig(url=URL))
    two.apply(one)
    assert two.state() is PodState.JOINING
    assert one.commands.drain("a:8000", PodEvent.DRAIN) is PodState.DRAINING
    two.apply(one)
    assert two.state() is PodState.DRAINING
    assert one.commands.drain("a:8000", PodEvent.UNDRAIN) is PodState.JOINING
    two.apply(one)
    assert two.state() is PodState.JOINING
    assert one.commands.remove("a:8000")
    two.apply(one)
    assert two.state() is None
    assert not two.published


def test_the_removal_of_an_unknown_pod_is_not_published() -> None:
    one = Worker()
    assert not one.commands.remove("a:8000")
    assert not one.published


@pytest.mark.anyio
async def test_a_reload_is_published_before_policies_are_read() -> None:
    """So that two workers that reload at once end with the same files."""
    one, was_read = Worker(), list[bool]()
    reloaded = b'warmroute_policy_reloads_total{result="ok"} 1.0'
    one.commands.publish = lambda subject, wanted: was_read.append(reloaded in one.policies._metrics.render())
    await one.commands.reload()
    assert (was_read, reloaded in one.policies._metrics.render()) == ([False], True)


@pytest.mark.anyio
async def test_policies_are_reloaded_in_every_worker() -> None:
    """Each worker reads the files itself."""
    one, two = Worker(), Worker()
    done = await one.commands.reload()
    two.apply(one)
    for reload in tuple(two.commands._reloads):
        assert (await reload).version == done.version
    await asyncio.sleep(0)
    assert not two.commands._reloads
    assert b'warmroute_policy_reloads_total{result="ok"} 1.0' in two.policies._metrics.render()


def test_the_adapters_of_a_pod_are_known_to_every_worker() -> None:
    """The last command counts."""
    one, two = Worker(), Worker()
    for worker in (one, two):
        worker.commands.add(PodConfig(url=URL))
        worker.published.clear()
    one.commands.set_adapters("a:8000", ("sql", "chat"))
    one.commands.set_adapters("a:8000", ("sql",))
    two.apply(one)
    for worker in (one, two):
        status = worker.fleet.status("a:8000")
        assert status is not None and status.pod.adapters == ("sql",)
