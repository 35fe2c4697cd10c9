"""Work on many pods is divided into steps, between which the event loop serves requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.config.pod_schema import KubernetesPods, PodConfig
from router.feeds.discovery.kube_api import KubePod
from router.feeds.discovery.kubernetes_pods import NodePlaces, PodReader
from router.feeds.discovery.membership import ConfiguredPods, ListedPod, Membership, sets_between
from router.feeds.discovery.pod_facts import NodePlace
from router.feeds.supervise import STEP, in_turns, running
from router.fleet.fleet import Fleet
from tests.kit.deadlines import DEADLINE_S
from tests.kit.scenes import SPEED

MANY = 500
NAMES = [f"{number:03}" for number in range(MANY)]


async def most_in_a_turn(count: Callable[[], int], work: Callable[[], Awaitable[object]]) -> int:
    """How much `count` grows at most in one turn of the event loop while `work` runs."""
    task, most, before = asyncio.ensure_future(work()), 0, count()
    async with asyncio.timeout(DEADLINE_S):
        while not task.done():
            await asyncio.sleep(0)
            now = count()
            most, before = max(most, now - before), now
        await task
    return most


@pytest.mark.anyio
async def test_the_first_pods_of_a_source_join_in_steps() -> None:
    """Also the first 500."""
    fleet = Fleet()
    source = ConfiguredPods([PodConfig(url=f"http://{name}:8000") for name in NAMES])
    members = Membership(fleet, lambda *_: (SPEED, 0), {"many": source})

    async def work() -> None:
        async with running(members.feeds):
            while len(fleet.snapshot.pods) < MANY:
                await asyncio.sleep(0)

    assert 0 < await most_in_a_turn(lambda: len(fleet.snapshot.pods), work) <= STEP


class CountedNodes:
    """Counts the pods whose facts are read."""

    read = 0

    def place(self, _node: str) -> NodePlace:
        self.read += 1
        return NodePlace()


@pytest.mark.anyio
async def test_the_facts_of_many_pods_are_read_in_steps() -> None:
    """A set that is read again costs no turns."""
    nodes, entry = CountedNodes(), KubernetesPods(selector="app=vllm", namespaces=("ns",))
    reader = PodReader(entry, cast(NodePlaces, nodes), (), many_namespaces=False)
    pods = [KubePod(key=("ns", name), uid=name, address="10.0.0.1") for name in NAMES]
    assert 0 < await most_in_a_turn(lambda: nodes.read, lambda: reader.seen(pods)) <= STEP
    assert await most_in_a_turn(lambda: nodes.read, lambda: reader.seen(pods)) == MANY


@pytest.mark.anyio
async def test_items_are_the_same_in_turns() -> None:
    """In their order."""
    passed: list[int] = []

    async def work() -> None:
        async for number in in_turns(range(MANY)):
            passed.append(number)

    assert await most_in_a_turn(lambda: len(passed), work) <= STEP
    assert passed == list(range(MANY))


Urls = st.lists(st.integers(0, 120), unique=True, max_size=120)


@given(
    before=st.dictionaries(st.integers(0, 120), st.sampled_from("ab"), max_size=120),
    after=Urls,
    uid=st.sampled_from("ab"),
)
def test_sets_between_two_sets_lose_at_once_and_gain_in_steps(
    before: dict[int, str], after: list[int], uid: str
) -> None:
    """The last one is the new set. Pods that are in both are in each."""
    known = {f"http://p:{url + 1}": listed(url, old) for url, old in before.items()}
    wanted = [listed(url, uid) for url in after]
    sets = list(sets_between(known, wanted))
    assert sets[-1] == wanted
    for old, new in zip([list(known.values()), *sets], sets, strict=False):
        urls = {pod.config.url for pod in new}
        assert urls <= {pod.config.url for pod in wanted}
        assert urls >= known.keys() & {pod.config.url for pod in wanted}
        assert sum(pod not in old for pod in new) <= STEP


def listed(url: int, uid: str) -> ListedPod:
    return ListedPod(PodConfig(url=f"http://p:{url + 1}"), uid)


def test_pods_that_exchange_their_addresses_never_share_an_id() -> None:
    """A pod whose URL has another id now is left out until its turn."""
    known = {f"http://{name}:1": ListedPod(PodConfig(url=f"http://{name}:1", id=name)) for name in NAMES}
    wanted = [
        ListedPod(PodConfig(url=f"http://{name}:1", id=new)) for name, new in zip(NAMES, NAMES[::-1], strict=True)
    ]
    for pods in sets_between(known, wanted):
        ids = [pod.config.id for pod in pods]
        assert len(ids) == len(set(ids))
