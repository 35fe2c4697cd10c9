"""Scraping the pods' load."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

import httpx
import pytest

from router.decision import Lease
from router.feeds.http_client import Fetch, get
from router.feeds.load_feed import LoadFeed, ScrapeShare
from router.fleet.fleet import Fleet
from router.fleet.ledger import Ledger
from router.fleet.lifecycle import PodEvent
from router.types import Pod, PodLoad, PodState

pytestmark = pytest.mark.anyio
MakePod = Callable[..., Pod]
Network = Any
Running = Callable[[Any], AbstractAsyncContextManager[None]]
Until = Callable[[Callable[[], object]], Awaitable[None]]


def metrics(running: int, engine: int = 0) -> bytes:
    return f'vllm:num_requests_running{{engine="{engine}"}} {running}\n'.encode()


def asking(network: Network) -> Fetch:
    """Over the network without sockets."""
    return partial(get, network.client)


def fleet_of(*pods: Pod) -> Fleet:
    fleet = Fleet()
    fleet.sync(pods)
    for pod in pods:
        fleet.event(pod.id, PodEvent.PROBE_OK)
    return fleet


def load(fleet: Fleet, pod_id: str) -> PodLoad:
    status = fleet.status(pod_id)
    assert status is not None
    return status.load


async def test_a_slow_pod_delays_no_other(network: Network, make_pod: MakePod, running: Running, until: Until) -> None:
    """While one never answers, another is scraped again and again, and no pod is asked twice at once."""
    fleet = fleet_of(make_pod("slow"), make_pod("quick"))
    network["slow"].hangs.add("/metrics")
    network["quick"].answers["/metrics"] = metrics(1)
    feed = LoadFeed(fleet, Ledger(), asking(network), interval_s=0.001, timeout_s=60.0)
    async with running(feed.run()):
        await until(lambda: load(fleet, "quick").running == 1)
        network["quick"].answers["/metrics"] = metrics(2)
        await until(lambda: load(fleet, "quick").running == 2)
    assert network["slow"].asked["/metrics"] == 1
    assert network["quick"].busiest == 1
    assert load(fleet, "slow") == PodLoad()


@pytest.mark.parametrize("workers", [1, 4])
async def test_a_pod_that_has_nothing_to_do_is_asked_half_as_often(
    network: Network, make_pod: MakePod, workers: int
) -> None:
    """By its own account and by ours: whoever waits or computes, or was just sent something, is asked as configured."""
    pod, ledger = make_pod("a"), Ledger()
    fleet = fleet_of(pod)
    scrape_share = ScrapeShare(0, lambda: workers, lambda _pod, _load: None)
    feed = LoadFeed(fleet, ledger, asking(network), interval_s=0.25, timeout_s=1.0, share=scrape_share)
    assert feed.interval_s("a") == 0.5 * workers
    lease = ledger.book(pod, 100, 0, 0.0)
    assert feed.interval_s("a") == 0.25 * workers
    ledger.release(lease, 0.1)
    for busy in (PodLoad(1, 0, 0.1, 1.0), PodLoad(0, 1, 0.1, 1.0)):
        fleet.observe_load("a", busy)
        assert feed.interval_s("a") == 0.25 * workers
    fleet.observe_load("a", PodLoad(0, 0, 0.9, 2.0))
    assert feed.interval_s("a") == 0.5 * workers


async def test_a_failed_scrape_changes_nothing(network: Network, make_pod: MakePod) -> None:
    """The last load stays with its age, and a pod is not ejected for its /metrics."""
    fleet = fleet_of(make_pod("a"))
    feed = LoadFeed(fleet, Ledger(), asking(network), interval_s=1.0, timeout_s=0.001)
    network["a"].answers["/metrics"] = metrics(3)
    await feed.scrape("a")
    before = load(fleet, "a")
    assert before.running == 3
    assert before.scraped_at_s > 0
    for broken in ({"statuses": {"/metrics": 500}}, {"answers": {"/metrics": b"?"}}, {"hangs": {"/metrics"}}):
        for name, value in broken.items():
            setattr(network["a"], name, value)
        await feed.scrape("a")
    network["a"].refuses = True
    await feed.scrape("a")
    assert load(fleet, "a") == before
    assert fleet.snapshot.pods[0].state is PodState.READY


async def test_only_pods_that_can_have_work_are_asked(network: Network, make_pod: MakePod) -> None:
    """Ready and draining ones."""
    fleet = fleet_of(make_pod("ready"), make_pod("draining"), make_pod("ejected"))
    fleet.event("draining", PodEvent.DRAIN)
    fleet.event("ejected", PodEvent.EJECT)
    fleet.sync([*(status.pod for status in fleet.snapshot.pods), make_pod("joining")])
    feed = LoadFeed(fleet, Ledger(), asking(network), interval_s=1.0, timeout_s=1.0)
    for pod_id in ("ready", "draining", "ejected", "joining", "unknown"):
        await feed.scrape(pod_id)
    assert {host for host, pod in network.pods.items() if pod.asked} == {"ready", "draining"}


async def test_ranks_behind_one_port_have_their_own_load(network: Network, make_pod: MakePod) -> None:
    """Each reads its own lines of the same text."""
    ranks = [make_pod(f"a#{rank}", url="http://a", dp_rank=rank) for rank in (0, 1)]
    fleet = fleet_of(*ranks)
    network["a"].answers["/metrics"] = metrics(1, engine=0) + metrics(5, engine=1)
    feed = LoadFeed(fleet, Ledger(), asking(network), interval_s=1.0, timeout_s=1.0)
    await feed.scrape("a#0")
    await feed.scrape("a#1")
    assert [load(fleet, rank.id).running for rank in ranks] == [1, 5]


async def test_workers_scrape_in_turns_and_tell_one_another(
    network: Network, make_pod: MakePod, running: Running, until: Until
) -> None:
    """Each as seldom as there are others, and a new pod at once."""
    fleet, told = fleet_of(make_pod("a")), list[tuple[str, int]]()
    network["a"].answers["/metrics"] = metrics(3)
    workers = [1]
    scrape_share = ScrapeShare(1, lambda: workers[0], lambda pod, load: told.append((pod, load.running)))
    feed = LoadFeed(fleet, Ledger(), asking(network), interval_s=0.001, timeout_s=1.0, share=scrape_share)
    async with running(feed.run()):
        await until(lambda: len(told) >= 3)
        workers[0] = 1_000_000
        await until(lambda: network["a"].asked["/metrics"] == len(told))
    assert set(told) == {("a", 3)}


def queue_of(waiting: int) -> bytes:
    return metrics(1) + f"vllm:num_requests_waiting {waiting}\n".encode()


@pytest.mark.parametrize("booked", ["before the question", "after the question"])
@pytest.mark.parametrize("ends", ["before the answer", "after the answer"])
async def test_our_own_prompt_in_a_queue_is_nobody_elses(
    network: Network, make_pod: MakePod, booked: str, ends: str
) -> None:
    """Of three that wait two are somebody else's, as long as that is the latest word: whether ours came before the
    engine was asked or after, has its first token before the answer is here or after, and whoever comes then."""
    pod, ledger, ours = make_pod("a"), Ledger(), list[Lease]()
    fleet = fleet_of(pod)

    def page(request: httpx.Request) -> bytes:
        if booked == "after the question":
            ours.append(ledger.book(pod, 1000, 0, 0.0))
        said = queue_of(3)
        if ends == "before the answer":
            ledger.first_token(ours[0], 0.1)
        return said

    network["a"].answers["/metrics"] = page
    if booked == "before the question":
        ours.append(ledger.book(pod, 1000, 0, 0.0))
    await LoadFeed(fleet, ledger, asking(network), interval_s=1.0, timeout_s=1.0).scrape("a")
    assert load(fleet, "a").foreign_waiting == 2
    ledger.release(ours[0], 0.2)
    assert load(fleet, "a").foreign_waiting == 2
    ledger.book(pod, 1000, 0, 0.3)
    assert load(fleet, "a").foreign_waiting == 2


async def test_a_prompt_that_had_its_first_token_before_is_not_taken_for_one_that_waits(
    network: Network, make_pod: MakePod
) -> None:
    """It decodes: who waits there now is somebody else."""
    pod, ledger = make_pod("a"), Ledger()
    fleet = fleet_of(pod)
    ledger.first_token(ledger.book(pod, 1000, 0, 0.0), 0.1)
    network["a"].answers["/metrics"] = queue_of(1)
    await LoadFeed(fleet, ledger, asking(network), interval_s=1.0, timeout_s=1.0).scrape("a")
    assert load(fleet, "a").foreign_waiting == 1
