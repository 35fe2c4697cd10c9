"""Facts that a handoff needs of a pod."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.engines.handoff.vllm_connectors import Mooncake, Nixl
from router.feeds.probe import HandoffFacts
from router.types import Pod, Role
from tests.kit.deadlines import running, until
from tests.kit.fake_pods import Network, watched
from tests.kit.scenes import fleet_of, make_pod

pytestmark = pytest.mark.anyio


def engine(name: str) -> bytes:
    """The response of a bootstrap server."""
    return b'{"0": {"engine_id": "%b", "worker_addr": {}}}' % name.encode()


class FactsWorld:
    """The feed over ready pods."""

    def __init__(self, network: Network, *pods: Pod) -> None:
        self.fleet = fleet_of(*pods)
        dialects = {"mooncake": Mooncake(), "nixl": Nixl()}
        self.feed = HandoffFacts(self.fleet, network.get_url, timeout_s=1.0, dialects=dialects, retry_s=0.001)

    def of(self, pod_id: str, dialect: str = "mooncake") -> Any:
        status = self.fleet.status(pod_id)
        return self.feed.of(status.pod, dialect) if status else None


async def test_a_dialect_without_facts_needs_no_request(network: Network) -> None:
    """The facts are empty at once."""
    learning = FactsWorld(network, make_pod("p", handoff="nixl"))
    assert learning.of("p", "nixl") == {}
    assert not network.pods


async def test_a_bootstrap_server_is_polled_until_it_answers(network: Network) -> None:
    """The facts are unknown until then."""
    learning = FactsWorld(network, make_pod("p", handoff="mooncake"))
    async with running(watched(learning.fleet, learning.feed.check)):
        await until(lambda: network["p"].asked["/query"] > 1)
        assert learning.of("p") is None
        network["p"].answers["/query"] = b"not yet"
        asked = network["p"].asked["/query"]
        await until(lambda: network["p"].asked["/query"] > asked)
        network["p"].answers["/query"] = engine("one")
        await until(lambda: learning.of("p"))
        assert learning.of("p") == {"engine_id": "one"}


async def test_facts_of_an_earlier_epoch_are_unknown(network: Network) -> None:
    """Until the restarted pod has answered."""
    learning = FactsWorld(network, make_pod("p", handoff="mooncake"))
    network["p"].answers["/query"] = engine("one")
    async with running(watched(learning.fleet, learning.feed.check)):
        await until(lambda: learning.of("p"))
        network["p"].answers["/query"] = engine("two")
        learning.fleet.restarted("p")
        assert learning.of("p") is None
        await until(lambda: learning.of("p"))
        assert learning.of("p") == {"engine_id": "two"}


async def test_decode_pods_are_not_polled(network: Network) -> None:
    """They have no bootstrap server."""
    pods = make_pod("d", handoff="mooncake", role=Role.DECODE), make_pod("p", handoff="mooncake")
    learning = FactsWorld(network, *pods)
    network["p"].answers["/query"] = engine("one")
    async with running(watched(learning.fleet, learning.feed.check)):
        await until(lambda: learning.of("p"))
        assert "d" not in network.pods


async def test_the_facts_of_a_removed_pod_are_dropped(network: Network) -> None:
    """The table does not grow with the number of pods that ever existed."""
    learning = FactsWorld(network, make_pod("p", handoff="mooncake"))
    network["p"].answers["/query"] = engine("one")
    async with running(watched(learning.fleet, learning.feed.check)):
        await until(lambda: learning.of("p"))
        learning.fleet.sync([])
        await until(lambda: not learning.feed._known)


@pytest.mark.parametrize(("url", "expected"), [("http://p", "Bearer k"), ("https://p", None)])
async def test_a_bootstrap_server_gets_the_pods_credentials(
    network: Network, tmp_path: Path, url: str, expected: str | None
) -> None:
    """Not without TLS if the pod has TLS."""
    key, seen, asked = tmp_path / "key", list[str | None](), asyncio.Event()
    key.write_text("k")

    def answer(request: httpx.Request) -> bytes:
        seen.append(request.headers.get("authorization"))
        asked.set()
        return engine("one")

    network["p"].answers["/query"] = answer
    facts = FactsWorld(network, make_pod("p", url=url, handoff="mooncake", bearer_file=str(key)))
    async with running(watched(facts.fleet, facts.feed.check)):
        await asked.wait()
    assert seen == [expected]
