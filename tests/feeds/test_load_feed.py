"""Scraping the load of pods."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from router.decision import Lease
from router.engines.prometheus import METRICS
from router.feeds.load_feed import LoadFeed
from router.feeds.pod_problems import Fetch
from router.fleet.breaker import Probes
from router.fleet.fleet import Fleet, PodEvent
from router.fleet.ledger import Ledger
from router.types import PodLoad, PodState
from tests.policy.scenes import fleet_of, make_pod

pytestmark = pytest.mark.anyio
Network = Any
Running = Callable[[Any], AbstractAsyncContextManager[None]]
Until = Callable[[Callable[[], object]], Awaitable[None]]


def metrics(running: int, engine: int = 0) -> bytes:
    return f'vllm:num_requests_running{{engine="{engine}"}} {running}\n'.encode()


def fetching(network: Network) -> Fetch:
    """Fetches over the fake network."""
    fetch: Fetch = network.fetch
    return fetch


def load(fleet: Fleet, pod_id: str) -> PodLoad:
    status = fleet.status(pod_id)
    assert status is not None
    return status.load


async def test_slow_pods_do_not_delay_others(network: Network, running: Running, until: Until) -> None:
    """A pod has at most one scrape in progress."""
    fleet = fleet_of(make_pod("slow"), make_pod("quick"))
    network["slow"].hangs.add("/metrics")
    network["quick"].answers["/metrics"] = metrics(1)
    feed = LoadFeed(fleet, Ledger(), fetching(network), Probes(load_interval_s=0.001, load_timeout_s=60.0))
    async with running(feed.run()):
        await until(lambda: load(fleet, "quick").running == 1)
        network["quick"].answers["/metrics"] = metrics(2)
        await until(lambda: load(fleet, "quick").running == 2)
    assert network["slow"].asked["/metrics"] == 1
    assert network["quick"].busiest == 1
    assert load(fleet, "slow") == PodLoad()


async def test_an_idle_pod_is_scraped_half_as_often(network: Network) -> None:
    """Idle by its own metrics and by the ledger."""
    pod, ledger = make_pod("a"), Ledger()
    fleet = fleet_of(pod)
    feed = LoadFeed(fleet, ledger, fetching(network), Probes(load_interval_s=0.25, load_timeout_s=1.0))
    assert feed.interval_s("a") == 0.5
    lease = ledger.book(pod, 100, 0, 0.0)
    assert feed.interval_s("a") == 0.25
    ledger.release(lease, 0.1)
    for busy in (PodLoad(1, 0, 0.1, 1.0), PodLoad(0, 1, 0.1, 1.0)):
        fleet.observe_load("a", busy)
        assert feed.interval_s("a") == 0.25
    fleet.observe_load("a", PodLoad(0, 0, 0.9, 2.0))
    assert feed.interval_s("a") == 0.5


async def test_a_failed_scrape_changes_nothing(network: Network) -> None:
    """The last load stays with its age, and the pod is not ejected."""
    fleet = fleet_of(make_pod("a"))
    feed = LoadFeed(fleet, Ledger(), fetching(network), Probes(load_interval_s=1.0, load_timeout_s=0.001))
    network["a"].answers["/metrics"] = metrics(3)
    await feed.scrape("a")
    before, received_at_s = load(fleet, "a"), fleet.received_at_s("a")
    assert before.running == 3
    assert received_at_s > 0.0
    assert before.scraped_at_s >= received_at_s
    for broken in ({"statuses": {"/metrics": 500}}, {"answers": {"/metrics": b"?"}}, {"hangs": {"/metrics"}}):
        for name, value in broken.items():
            setattr(network["a"], name, value)
        await feed.scrape("a")
    network["a"].refuses = True
    await feed.scrape("a")
    assert load(fleet, "a") == before
    assert fleet.snapshot.pods[0].state is PodState.READY


async def test_only_ready_and_draining_pods_are_scraped(network: Network) -> None:
    """Others cannot have work."""
    fleet = fleet_of(make_pod("ready"), make_pod("draining"), make_pod("ejected"))
    fleet.event("draining", PodEvent.DRAIN)
    fleet.event("ejected", PodEvent.EJECT)
    fleet.sync([*(status.pod for status in fleet.snapshot.pods), make_pod("joining")])
    feed = LoadFeed(fleet, Ledger(), fetching(network), Probes(load_interval_s=1.0, load_timeout_s=1.0))
    for pod_id in ("ready", "draining", "ejected", "joining", "unknown"):
        await feed.scrape(pod_id)
    assert {host for host, pod in network.pods.items() if pod.asked} == {"ready", "draining"}


async def test_each_rank_of_a_port_has_its_own_load(network: Network) -> None:
    """Each reads its own lines of the same page."""
    ranks = [make_pod(f"a#{rank}", url="http://a", dp_rank=rank) for rank in (0, 1)]
    fleet = fleet_of(*ranks)
    network["a"].answers["/metrics"] = metrics(1, engine=0) + metrics(5, engine=1)
    feed = LoadFeed(fleet, Ledger(), fetching(network), Probes(load_interval_s=1.0, load_timeout_s=1.0))
    await feed.scrape("a#0")
    await feed.scrape("a#1")
    assert [load(fleet, rank.id).running for rank in ranks] == [1, 5]


def queue_of(waiting: int) -> bytes:
    return metrics(1) + f"vllm:num_requests_waiting {waiting}\n".encode()


@pytest.mark.parametrize("booked", ["before the question", "after the question"])
@pytest.mark.parametrize("ends", ["before the answer", "after the answer"])
async def test_prompts_of_this_router_do_not_count_as_foreign(network: Network, booked: str, ends: str) -> None:
    """Two of three waiting prompts are foreign, whether ours was sent before or during the scrape or got its first
    token meanwhile. A prompt that is sent later does not count."""
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
    await LoadFeed(fleet, ledger, fetching(network), Probes(load_interval_s=1.0, load_timeout_s=1.0)).scrape("a")
    assert load(fleet, "a").foreign_waiting == 2
    ledger.release(ours[0], 0.2)
    assert load(fleet, "a").foreign_waiting == 2
    ledger.book(pod, 1000, 0, 0.3)
    assert load(fleet, "a").foreign_waiting == 2


async def test_a_decoding_prompt_does_not_count_as_waiting(network: Network) -> None:
    """The waiting prompts are then foreign."""
    pod, ledger = make_pod("a"), Ledger()
    fleet = fleet_of(pod)
    ledger.first_token(ledger.book(pod, 1000, 0, 0.0), 0.1)
    network["a"].answers["/metrics"] = queue_of(1)
    await LoadFeed(fleet, ledger, fetching(network), Probes(load_interval_s=1.0, load_timeout_s=1.0)).scrape("a")
    assert load(fleet, "a").foreign_waiting == 1


def page(waiting: str) -> bytes:
    ranks = (f'vllm:num_requests_waiting{{engine="{rank}"}} {waiting}' for rank in range(4))
    return metrics(1) + "\n".join([*ranks, ""]).encode()


async def test_a_pod_whose_load_cannot_be_true_counts_as_one_without_a_load(network: Network) -> None:
    """Its last load is forgotten, too; it is logged once, and the pod stays ready."""
    fleet, excess = fleet_of(make_pod("a")), list[object]()
    feed = LoadFeed(fleet, Ledger(), fetching(network), Probes(), lambda *found: excess.append(found))
    network["a"].answers["/metrics"] = page("3")
    await feed.scrape("a")
    assert load(fleet, "a").waiting == 12
    network["a"].answers["/metrics"] = page("1e308")
    with capture_logs() as logs:
        for _ in range(3):
            await feed.scrape("a")
    assert load(fleet, "a") == PodLoad() and not excess
    assert [(line["pod"], line["reason"]) for line in logs] == [
        ("a", "vllm:num_requests_waiting is 1e+308, expected 0 to 1e+06")
    ]


async def test_a_pod_with_more_metrics_than_are_read_is_reported(network: Network) -> None:
    """Its load is unknown."""
    fleet, excess = fleet_of(make_pod("a")), list[tuple[str, str]]()
    feed = LoadFeed(fleet, Ledger(), fetching(network), Probes(), lambda pod, why, _: excess.append((pod, why)))
    network["a"].answers["/metrics"] = b"#" * METRICS.max_bytes + metrics(1)
    await feed.scrape("a")
    size_bytes = METRICS.max_bytes + len(metrics(1))
    assert load(fleet, "a") == PodLoad()
    assert excess == [("a", f"page of metrics: {size_bytes} bytes, at most {METRICS.max_bytes} are read")]


SCALING = b'{"error": "The model is currently scaling. Please try again later."}'
RETIRED = b'{"error": "This data-parallel rank has been retired and is awaiting shutdown."}'


@pytest.mark.parametrize("said", [SCALING, RETIRED])
async def test_a_pod_that_is_being_scaled_is_drained_until_it_answers_again(network: Network, said: bytes) -> None:
    """Its health check succeeds meanwhile."""
    fleet = fleet_of(make_pod("a"))
    feed = LoadFeed(fleet, Ledger(), fetching(network), Probes())
    states = []
    for answer, status in ((said, 503), (metrics(1), 200)):
        network["a"].answers["/metrics"], network["a"].statuses["/metrics"] = answer, status
        await feed.scrape("a")
        states.append(fleet.snapshot.pods[0].state)
    assert states == [PodState.DRAINING, PodState.JOINING]


async def test_a_pod_that_an_operator_has_drained_stays_drained_when_it_has_been_scaled(network: Network) -> None:
    fleet = fleet_of(make_pod("a"))
    fleet.event("a", PodEvent.DRAIN)
    feed = LoadFeed(fleet, Ledger(), fetching(network), Probes())
    for answer, status in ((SCALING, 503), (metrics(1), 200)):
        network["a"].answers["/metrics"], network["a"].statuses["/metrics"] = answer, status
        await feed.scrape("a")
    assert fleet.snapshot.pods[0].state is PodState.DRAINING


async def test_any_other_503_changes_no_state(network: Network) -> None:
    fleet = fleet_of(make_pod("a"))
    network["a"].answers["/metrics"], network["a"].statuses["/metrics"] = b"overloaded", 503
    await LoadFeed(fleet, Ledger(), fetching(network), Probes()).scrape("a")
    assert fleet.snapshot.pods[0].state is PodState.READY
