"""What is learnt of pods before they hand over KV."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from router.engines.handoff.vllm_connectors import Mooncake, Nixl
from router.feeds.handoff_facts import HandoffFacts
from router.fleet.fleet import Fleet
from router.fleet.lifecycle import PodEvent
from router.types import Pod, Role
from tests.feeds.conftest import MakePod, Network

pytestmark = pytest.mark.anyio

Running = Callable[[Coroutine[Any, Any, None]], AbstractAsyncContextManager[None]]
Until = Callable[[Callable[[], object]], Awaitable[None]]


def engine(name: str) -> bytes:
    """What a bootstrap server answers."""
    return b'{"0": {"engine_id": "%b", "worker_addr": {}}}' % name.encode()


class Learning:
    """A feed over pods that are ready."""

    def __init__(self, network: Network, *pods: Pod) -> None:
        self.fleet = Fleet()
        self.fleet.sync(pods)
        for pod in pods:
            self.fleet.event(pod.id, PodEvent.PROBE_OK)
        dialects = {"mooncake": Mooncake(), "nixl": Nixl()}
        self.feed = HandoffFacts(self.fleet, network.client, timeout_s=1.0, dialects=dialects, retry_s=0.001)

    def of(self, pod_id: str, dialect: str = "mooncake") -> Any:
        status = self.fleet.status(pod_id)
        return self.feed.of(status.pod, dialect) if status else None


async def test_a_dialect_that_needs_nothing_has_it_at_once(network: Network, make_pod: MakePod) -> None:
    """And nobody is asked."""
    learning = Learning(network, make_pod("p", handoff="nixl"))
    assert learning.of("p", "nixl") == {}
    assert not network.pods


async def test_a_prefill_pods_bootstrap_server_is_asked_until_it_answers(
    network: Network, make_pod: MakePod, running: Running, until: Until
) -> None:
    """Until then nothing is known; then it is asked no more."""
    learning = Learning(network, make_pod("p", handoff="mooncake"))
    async with running(learning.feed.run()):
        await until(lambda: network["p"].asked["/query"] > 1)
        assert learning.of("p") is None
        network["p"].answers["/query"] = b"not yet"
        asked = network["p"].asked["/query"]
        await until(lambda: network["p"].asked["/query"] > asked)
        network["p"].answers["/query"] = engine("one")
        await until(lambda: learning.of("p"))
        assert learning.of("p") == {"engine_id": "one"}


async def test_what_was_true_of_another_life_is_not_known(
    network: Network, make_pod: MakePod, running: Running, until: Until
) -> None:
    """From the restart on, until the new life has answered."""
    learning = Learning(network, make_pod("p", handoff="mooncake"))
    network["p"].answers["/query"] = engine("one")
    async with running(learning.feed.run()):
        await until(lambda: learning.of("p"))
        network["p"].answers["/query"] = engine("two")
        learning.fleet.restarted("p")
        assert learning.of("p") is None
        await until(lambda: learning.of("p"))
        assert learning.of("p") == {"engine_id": "two"}


async def test_pods_that_only_decode_are_not_asked(
    network: Network, make_pod: MakePod, running: Running, until: Until
) -> None:
    """They have no bootstrap server."""
    pods = make_pod("d", handoff="mooncake", role=Role.DECODE), make_pod("p", handoff="mooncake")
    learning = Learning(network, *pods)
    network["p"].answers["/query"] = engine("one")
    async with running(learning.feed.run()):
        await until(lambda: learning.of("p"))
        assert "d" not in network.pods


async def test_a_pod_that_has_gone_is_forgotten(
    network: Network, make_pod: MakePod, running: Running, until: Until
) -> None:
    """Nothing grows with the pods that ever were."""
    learning = Learning(network, make_pod("p", handoff="mooncake"))
    network["p"].answers["/query"] = engine("one")
    async with running(learning.feed.run()):
        await until(lambda: learning.of("p"))
        learning.fleet.sync([])
        await until(lambda: not learning.feed._known)
