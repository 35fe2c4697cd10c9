"""Scraping the load of pods."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import msgspec
import pytest
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from router.decision import Lease
from router.engines.prometheus import METRICS
from router.feeds import scrapes
from router.feeds.scrapes import IDLE_FACTOR, LOOP_FACTOR, MAX_FACTOR, MAX_SHARE, LoadScrapes, intervals_s, metered
from router.feeds.watch import Fetch, Turn
from router.fleet.breaker import Probes
from router.fleet.fleet import Fleet, PodEvent
from router.fleet.ledger import Ledger
from router.types import PodLoad, PodState, Role
from tests.kit.closed_port import closed_port
from tests.kit.deadlines import DEADLINE_S, running, until
from tests.kit.fake_pods import watched
from tests.kit.scenes import fleet_of, make_pod

pytestmark = pytest.mark.anyio
Network = Any


def metrics(running: int, engine: int = 0) -> bytes:
    return f'vllm:num_requests_running{{engine="{engine}"}} {running}\n'.encode()


def fetching(network: Network) -> Fetch:
    """Fetches over the fake network."""
    fetch: Fetch = network.fetch
    return fetch


async def scrape(feed: LoadScrapes, pod_id: str) -> None:
    """As the watch does it for a pod whose scrape is due."""
    if pod_id in feed._scraped:
        feed._scraped[pod_id].at_s = 0.0
    status = feed.fleet.status(pod_id)
    if status is not None and feed.check.due(status):
        await feed.check.run(status.pod, Turn(feed.check))


def interval_s(feed: LoadScrapes) -> float:
    return feed.interval_s(feed.fleet.snapshot.pods[0])


def load(fleet: Fleet, pod_id: str) -> PodLoad:
    status = fleet.status(pod_id)
    assert status is not None
    return status.load


async def test_slow_pods_do_not_delay_others(network: Network) -> None:
    """A pod has at most one scrape in progress."""
    fleet = fleet_of(make_pod("slow"), make_pod("quick"))
    network["slow"].hangs.add("/metrics")
    network["quick"].answers["/metrics"] = metrics(1)
    feed = LoadScrapes(fleet, Ledger(), fetching(network), Probes(load_interval_s=0.001, load_timeout_s=60.0))
    async with running(watched(fleet, feed.check)):
        await until(lambda: load(fleet, "quick").running == 1)
        network["quick"].answers["/metrics"] = metrics(2)
        await until(lambda: load(fleet, "quick").running == 2)
    assert network["slow"].asked["/metrics"] == 1
    assert network["quick"].busiest == 1
    assert load(fleet, "slow") == PodLoad()


# --- pods that publish their load ---


@pytest.mark.net
async def test_a_pod_that_publishes_its_load_is_not_scraped(network: Network) -> None:
    """Until it is silent. What it waits for of this router is not foreign."""
    with zmq.asyncio.Context() as context, context.socket(zmq.PUB) as pub:
        port = pub.bind_to_random_port("tcp://127.0.0.1")
        fleet = fleet_of(make_pod("a", engine="sglang", load_endpoint=f"tcp://127.0.0.1:{port}"))
        network["a"].answers["/metrics"] = b"sglang:num_running_reqs 1\n"
        feed = LoadScrapes(fleet, Ledger(), fetching(network), Probes(load_interval_s=0.001, load_timeout_s=60.0))
        async with running(watched(fleet, feed.check)):
            for waiting in (2, 5):
                async with asyncio.timeout(DEADLINE_S):
                    while load(fleet, "a").waiting != waiting:
                        stat = msgspec.msgpack.encode(["LoadStat", 3, waiting, 500, 1000, 0])
                        await pub.send_multipart([b"load", bytes(8), stat])
                        await asyncio.sleep(0.001)
            assert (load(fleet, "a").running, load(fleet, "a").kv_usage) == (3, 0.5)
            assert network["a"].asked["/metrics"] == 0
            await pub.send_multipart([b"load", bytes(8), b"nonsense"])
            await until(lambda: load(fleet, "a").running == 1)


@pytest.mark.net
async def test_a_pod_that_publishes_all_the_time_is_scraped(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    """To read all of it would take a core."""
    monkeypatch.setattr(scrapes, "MAX_EARLY", 3)
    with zmq.asyncio.Context() as context, context.socket(zmq.PUB) as pub:
        port = pub.bind_to_random_port("tcp://127.0.0.1")
        fleet = fleet_of(make_pod("a", engine="sglang", load_endpoint=f"tcp://127.0.0.1:{port}"))
        network["a"].answers["/metrics"] = b"sglang:num_running_reqs 1\n"
        feed = LoadScrapes(fleet, Ledger(), fetching(network), Probes(load_interval_s=60.0, load_timeout_s=60.0))
        stat = msgspec.msgpack.encode(["LoadStat", 3, 2, 500, 1000, 0])
        async with running(watched(fleet, feed.check)), asyncio.timeout(DEADLINE_S):
            while load(fleet, "a").running != 1:
                await pub.send_multipart([b"load", bytes(8), stat])
                await asyncio.sleep(0.001)


@pytest.mark.net
async def test_a_pod_whose_load_cannot_be_reached_is_scraped(network: Network) -> None:
    with closed_port() as port:
        fleet = fleet_of(make_pod("a", engine="sglang", load_endpoint=f"tcp://127.0.0.1:{port}"))
        network["a"].answers["/metrics"] = b"sglang:num_running_reqs 1\n"
        feed = LoadScrapes(fleet, Ledger(), fetching(network), Probes(load_interval_s=0.001, load_timeout_s=60.0))
        async with running(watched(fleet, feed.check)):
            await until(lambda: load(fleet, "a").running == 1)


async def test_an_idle_pod_is_scraped_half_as_often(network: Network) -> None:
    """Idle by its own metrics and by the ledger."""
    pod, ledger = make_pod("a"), Ledger()
    fleet = fleet_of(pod)
    feed = LoadScrapes(fleet, ledger, fetching(network), Probes(load_interval_s=0.25, load_timeout_s=1.0))
    assert interval_s(feed) == 0.5
    lease = ledger.book(pod, 100, 0, 0.0)
    assert interval_s(feed) == 0.25
    ledger.release(lease, 0.1)
    for busy in (PodLoad(1, 0, 0.1, 1.0), PodLoad(0, 1, 0.1, 1.0)):
        fleet.observe_load("a", busy)
        assert interval_s(feed) == 0.25
    fleet.observe_load("a", PodLoad(0, 0, 0.9, 2.0))
    assert interval_s(feed) == 0.5


async def test_a_failed_scrape_changes_nothing(network: Network) -> None:
    """The last load stays with its age, and the pod is not ejected."""
    fleet = fleet_of(make_pod("a"))
    feed = LoadScrapes(fleet, Ledger(), fetching(network), Probes(load_interval_s=1.0, load_timeout_s=0.001))
    network["a"].answers["/metrics"] = metrics(3)
    await scrape(feed, "a")
    before, received_at_s = load(fleet, "a"), fleet.received_at_s("a")
    assert before.running == 3
    assert received_at_s > 0.0
    assert before.scraped_at_s >= received_at_s
    for broken in ({"statuses": {"/metrics": 500}}, {"answers": {"/metrics": b"?"}}, {"hangs": {"/metrics"}}):
        for name, value in broken.items():
            setattr(network["a"], name, value)
        await scrape(feed, "a")
    network["a"].refuses = True
    await scrape(feed, "a")
    assert load(fleet, "a") == before
    assert fleet.snapshot.pods[0].state is PodState.READY


async def test_only_ready_and_draining_pods_are_scraped(network: Network) -> None:
    """Others cannot have work."""
    fleet = fleet_of(make_pod("ready"), make_pod("draining"), make_pod("ejected"))
    fleet.event("draining", PodEvent.DRAIN)
    fleet.event("ejected", PodEvent.EJECT)
    fleet.sync([*(status.pod for status in fleet.snapshot.pods), make_pod("joining")])
    feed = LoadScrapes(fleet, Ledger(), fetching(network), Probes(load_interval_s=1.0, load_timeout_s=1.0))
    for pod_id in ("ready", "draining", "ejected", "joining", "unknown"):
        await scrape(feed, pod_id)
    assert {host for host, pod in network.pods.items() if pod.asked} == {"ready", "draining"}


async def test_each_rank_of_a_port_has_its_own_load(network: Network) -> None:
    """Each reads its own lines of the same page."""
    ranks = [make_pod(f"a#{rank}", url="http://a", dp_rank=rank) for rank in (0, 1)]
    fleet = fleet_of(*ranks)
    network["a"].answers["/metrics"] = metrics(1, engine=0) + metrics(5, engine=1)
    feed = LoadScrapes(fleet, Ledger(), fetching(network), Probes(load_interval_s=1.0, load_timeout_s=1.0))
    await scrape(feed, "a#0")
    await scrape(feed, "a#1")
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
    await scrape(LoadScrapes(fleet, ledger, fetching(network), Probes(load_interval_s=1.0, load_timeout_s=1.0)), "a")
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
    await scrape(LoadScrapes(fleet, ledger, fetching(network), Probes(load_interval_s=1.0, load_timeout_s=1.0)), "a")
    assert load(fleet, "a").foreign_waiting == 1


@pytest.mark.parametrize(
    ("role", "kv_usage", "running", "warned"),
    [
        (Role.DECODE, 0.2, 0, 1),
        (Role.PREFILL, 0.2, 0, 0),
        (Role.DECODE, 0.2, 1, 0),
        (Role.DECODE, 0.0, 0, 0),
    ],
)
async def test_an_idle_decode_pod_with_kv_in_use_is_logged_once(
    network: Network, monkeypatch: pytest.MonkeyPatch, role: Role, kv_usage: float, running: int, warned: int
) -> None:
    """It holds the KV of its answers for a next turn that never reads it. A prefill pod holds handoffs."""
    monkeypatch.setattr(scrapes, "PINNED_S", 0.0)
    feed = LoadScrapes(fleet_of(make_pod("a", role=role)), Ledger(), fetching(network), Probes())
    network["a"].answers["/metrics"] = (
        metrics(running) + f'vllm:kv_cache_usage_perc{{engine="0"}} {kv_usage}\n'.encode()
    )
    with capture_logs() as logs:
        for _ in range(4):
            await scrape(feed, "a")
    assert [line["event"] for line in logs] == ["an idle decode pod has KV in use"] * warned


def page(waiting: str) -> bytes:
    ranks = (f'vllm:num_requests_waiting{{engine="{rank}"}} {waiting}' for rank in range(4))
    return metrics(1) + "\n".join([*ranks, ""]).encode()


async def test_a_pod_whose_load_cannot_be_true_counts_as_one_without_a_load(network: Network) -> None:
    """Its last load is forgotten, too; it is logged once, and the pod stays ready."""
    fleet, excess = fleet_of(make_pod("a")), list[object]()
    feed = LoadScrapes(fleet, Ledger(), fetching(network), Probes(), lambda *found: excess.append(found))
    network["a"].answers["/metrics"] = page("3")
    await scrape(feed, "a")
    assert load(fleet, "a").waiting == 12
    network["a"].answers["/metrics"] = page("1e308")
    with capture_logs() as logs:
        for _ in range(3):
            await scrape(feed, "a")
    assert load(fleet, "a") == PodLoad() and not excess
    assert [(line["pod"], line["reason"]) for line in logs] == [
        ("a", "vllm:num_requests_waiting is 1e+308, expected 0 to 1e+06")
    ]


async def test_a_pod_with_more_metrics_than_are_read_is_reported(network: Network) -> None:
    """Its load is unknown."""
    fleet, excess = fleet_of(make_pod("a")), list[tuple[str, str]]()
    feed = LoadScrapes(fleet, Ledger(), fetching(network), Probes(), lambda pod, why, _: excess.append((pod, why)))
    network["a"].answers["/metrics"] = b"#" * METRICS.max_bytes + metrics(1)
    await scrape(feed, "a")
    size_bytes = METRICS.max_bytes + len(metrics(1))
    assert load(fleet, "a") == PodLoad()
    assert excess == [("a", f"page of metrics: {size_bytes} bytes, at most {METRICS.max_bytes} are read")]


SCALING = b'{"error": "The model is currently scaling. Please try again later."}'
RETIRED = b'{"error": "This data-parallel rank has been retired and is awaiting shutdown."}'


@pytest.mark.parametrize("said", [SCALING, RETIRED])
async def test_a_pod_that_is_being_scaled_is_drained_until_it_answers_again(network: Network, said: bytes) -> None:
    """Its health check succeeds meanwhile."""
    fleet = fleet_of(make_pod("a"))
    feed = LoadScrapes(fleet, Ledger(), fetching(network), Probes())
    states = []
    for answer, status in ((said, 503), (metrics(1), 200)):
        network["a"].answers["/metrics"], network["a"].statuses["/metrics"] = answer, status
        await scrape(feed, "a")
        states.append(fleet.snapshot.pods[0].state)
    assert states == [PodState.DRAINING, PodState.JOINING]


async def test_a_pod_that_an_operator_has_drained_stays_drained_when_it_has_been_scaled(network: Network) -> None:
    fleet = fleet_of(make_pod("a"))
    fleet.event("a", PodEvent.DRAIN)
    feed = LoadScrapes(fleet, Ledger(), fetching(network), Probes())
    for answer, status in ((SCALING, 503), (metrics(1), 200)):
        network["a"].answers["/metrics"], network["a"].statuses["/metrics"] = answer, status
        await scrape(feed, "a")
    assert fleet.snapshot.pods[0].state is PodState.DRAINING


async def test_any_other_503_changes_no_state(network: Network) -> None:
    fleet = fleet_of(make_pod("a"))
    network["a"].answers["/metrics"], network["a"].statuses["/metrics"] = b"overloaded", 503
    await scrape(LoadScrapes(fleet, Ledger(), fetching(network), Probes()), "a")
    assert fleet.snapshot.pods[0].state is PodState.READY


# --- how often ---


@given(least_s=st.floats(0.01, 10.0), cost_s=st.floats(0.0, 0.1), busy=st.integers(0, 5000), idle=st.integers(0, 5000))
def test_scrapes_take_at_most_a_tenth_of_a_core_and_pods_with_work_come_first(
    least_s: float, cost_s: float, busy: int, idle: int
) -> None:
    """Unless the longest interval is reached. Idle pods give way before pods with work do."""
    busy_s, idle_s = intervals_s(least_s, cost_s, busy, idle)
    most_s = MAX_FACTOR * least_s
    assert least_s <= busy_s <= most_s and IDLE_FACTOR * least_s <= idle_s <= most_s
    assert cost_s * (busy / busy_s + idle / idle_s) <= MAX_SHARE * (1 + 1e-9) or idle_s == most_s
    assert busy_s == least_s or idle_s >= most_s * (1 - 1e-9) or not idle


@pytest.mark.parametrize(
    ("busy", "idle", "cost_s", "expected"),
    [
        (4, 36, 0.0007, (0.25, 0.5)),
        (0, 500, 0.0007, (5.0, 3.5)),
        (20, 480, 0.0007, (0.28, 5.0)),
        (500, 0, 1e-4, (0.5, 5.0)),
    ],
)
def test_examples_of_fleets(busy: int, idle: int, cost_s: float, expected: tuple[float, float]) -> None:
    """At 0.25 s: a small one, an idle one on a slow core, one with few busy pods, a busy one on a fast core."""
    busy_s, idle_s = intervals_s(0.25, cost_s, busy, idle)
    assert (busy_s if busy else 5.0, idle_s) == pytest.approx(expected)


async def test_the_cost_of_a_scrape_is_learnt_from_its_own_steps(network: Network) -> None:
    """Not from its waits; an outlier, such as a step of a process that was stopped, hardly counts."""
    feed = LoadScrapes(fleet_of(make_pod("a")), Ledger(), fetching(network), Probes())
    for spent_s in [1e-4] * 100:
        feed._spend(spent_s)
    learnt_s = feed.cost_s
    feed._spend(10.0)
    assert learnt_s == pytest.approx(LOOP_FACTOR * 1e-4)
    assert feed.cost_s < 1.1 * learnt_s


async def test_a_metered_task_returns_raises_and_is_cancelled_as_any_other() -> None:
    spent, ended, started = list[float](), list[str](), asyncio.Event()

    async def work() -> str:
        await asyncio.sleep(0)
        return "done"

    async def endless() -> None:
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            ended.append("endless")

    async def failing() -> None:
        await asyncio.sleep(0)
        raise KeyError("failed")

    async def run(work: Any) -> Any:
        return await metered(work, spent.append)

    assert await run(work()) == "done" and len(spent) == 1
    with pytest.raises(KeyError):
        await run(failing())
    task = asyncio.create_task(run(endless()))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (ended, len(spent)) == (["endless"], 1)


# --- what is asked for ---


class FilteringPod:
    """A page of which an engine gives the samples with the names of a query, all, or none."""

    def __init__(self, network: Network, kind: str) -> None:
        self.kind, self.paths, self.running = kind, list[str](), 1
        network["a"].answers["/metrics"] = self.answer
        self.fleet = fleet_of(make_pod("a"))
        self.feed = LoadScrapes(self.fleet, Ledger(), fetching(network), Probes())

    def answer(self, request: httpx.Request) -> bytes:
        names = tuple(request.url.params.get_list("name[]"))
        self.paths.append("part" if names else "page")
        lines = [*metrics(self.running).splitlines(), b"vllm:num_requests_waiting 2", b"vllm:others 3"]
        if names and self.kind != "ignored":
            wanted = tuple(name.encode() for name in names if self.kind == "names" or "running" in name)
            lines = [line for line in lines if self.kind != "empty" and line.startswith(wanted)]
        return b"".join(line + b"\n" for line in lines)

    async def scrape(self, times: int = 1) -> list[str]:
        self.paths.clear()
        for _ in range(times):
            await scrape(self.feed, "a")
        return list(self.paths)


@pytest.mark.parametrize(
    ("kind", "then"), [("names", "part"), ("ignored", "page"), ("empty", "page"), ("only running", "page")]
)
async def test_a_part_is_asked_for_where_it_has_all_that_is_read(network: Network, kind: str, then: str) -> None:
    """Tested once in each epoch."""
    pod = FilteringPod(network, kind)
    assert await pod.scrape(3) == ["page", "part", then, then]
    assert load(pod.fleet, "a").waiting == 2
    pod.fleet.restarted("a")
    assert await pod.scrape(2) == ["page", "part", then]


async def test_a_part_without_a_load_is_a_failed_scrape_and_tested_again(network: Network) -> None:
    """The last load stays, and the pod has not shown that it is alive."""
    pod = FilteringPod(network, "names")
    await pod.scrape()
    received_at_s = pod.fleet.received_at_s("a")
    pod.kind, pod.running = "empty", 9
    assert await pod.scrape() == ["part"]
    assert (load(pod.fleet, "a").running, pod.fleet.received_at_s("a")) == (1, received_at_s)
    assert await pod.scrape(2) == ["page", "part", "page"]
    assert load(pod.fleet, "a").running == 9
