"""The snapshots of the operators' page: bounded, and computed in slices."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from router.config.policy_files import PolicyFolder
from router.config.watched_file import StaleFile
from router.feeds.kv_zmq import KvStreams
from router.feeds.pod_log import log_changes
from router.feeds.policy_feed import PolicyFeed
from router.fleet.fleet import Fleet, PodEvent
from router.fleet.ledger import Ledger
from router.fleet.scaling import Scaling, ScalingView
from router.frontends.admin.page_snapshot import (
    MAX_CHANGES,
    MAX_CHARACTERS,
    MAX_DECISIONS,
    MAX_PODS_BYTES,
    MAX_POINTS,
    MAX_SERIES,
    SLICE_PODS,
    PageFacts,
    PageSource,
)
from router.frontends.admin.views import MetricsPage
from router.index.evicted import PRIOR_REUSE
from router.observe.changes import Changes
from router.observe.declared import of_requests
from router.observe.ended import Ended
from router.observe.metrics import Metrics
from router.observe.recent_decisions import RecentDecisions
from router.observe.shadow_caches import ShadowCaches
from router.policy.calibration import Calibration
from router.policy.calibrator import Calibrator
from router.policy.decide import decide, expected_ttft_ms
from router.stores.prefix_store import LocalStore
from router.types import Links, PrefixTrust
from tests.kit.scenes import POLICIES, pod, ready, request, scene

pytestmark = pytest.mark.anyio
HOSTILE = "<img src=x onerror=alert(1)>\u202e\x00'\"</script>"
BY = POLICIES["cost_aware"]


class Page:
    """A page source without a router around it."""

    def __init__(self, folder: Path, *pods: str, facts: PageFacts | None = None) -> None:
        (folder / "mine.yaml").write_text("name: mine\nabout: x\npicker:\n  lowest_cost: {}\n")
        self.fleet, self.metrics = Fleet(), Metrics()
        self.shadows = ShadowCaches(self.metrics, lambda _: 8, 400_000)
        self.recent = RecentDecisions(on_decided=self.shadows.decided)
        self.changes = Changes()
        self.fleet.listen(log_changes(self.fleet, self.changes))
        self.fleet.sync([pod(name) for name in pods])
        store = LocalStore()

        ledger = Ledger()
        gauges = MetricsPage(
            self.metrics,
            self.fleet,
            ledger,
            store,
            Calibrator(Calibration(), self.metrics, Links()),
            ScalingView(self.fleet, ledger, Scaling(), 12.0, 0.0),
            in_flight_tokens=self.recent.in_flight_tokens,
        )
        self.source = PageSource(
            gauges,
            KvStreams(self.fleet, store, self.metrics.kv),
            self.recent,
            PolicyFeed(PolicyFolder(folder, "mine", frozenset()), self.metrics),
            facts or PageFacts(),
            self.changes,
        )

    def serve(
        self, request_id: str, workload: str = "chat", result: str = "ok", cached_tokens: int | None = None
    ) -> None:
        """Decide about a request, and end it."""
        seen = scene(*ready(pod("a"), pod("b")), request=request(request_id))
        decision = decide(seen, BY)
        ended = Ended(
            id=request_id,
            at_s=1.0,
            model="m",
            endpoint="x",
            result=result,
            served=decision.candidates[0],
            ttft_ms=5.0,
            prompt_tokens=1000,
            cached_tokens=cached_tokens,
            workload=workload,
            decision=self.recent.record(seen, decision, BY, time.time(), workload),
        )
        for sink in (self.recent.settle, self.metrics.ended, self.shadows.ended):
            sink(ended, seen.prompt)

    def answer(self, request_id: str, name: str, *, stream: bool, factor: float) -> None:
        """A request that took this many times as long as expected."""
        seen = scene(*ready(pod(name)), request=request(request_id, stream=stream))
        decision = decide(seen, BY)
        served = decision.candidates[0]
        expected_ms = expected_ttft_ms(served.cost)
        whole_ms = expected_ms + 10 * served.pod.speed.step_ms(1, 1000)
        ended = Ended(
            id=request_id,
            at_s=1.0,
            model="m",
            endpoint="x",
            result="ok",
            served=served,
            ttft_ms=factor * expected_ms if stream else None,
            e2e_ms=factor * whole_ms,
            prompt_tokens=1000,
            output_tokens=10,
            decision=self.recent.record(seen, decision, BY, time.time(), "chat"),
        )
        self.recent.settle(ended, None)

    async def shown(self) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.json.decode(await self.source.snapshot())
        return found


async def test_requests_and_recent_decisions_are_shown(tmp_path: Path) -> None:
    """Newest first, with expected and actual time to first token."""
    page = Page(tmp_path, "a", "b")
    page.serve("first")
    page.serve("second", "rag", "pod_error")
    found = await page.shown()
    assert [one["id"] for one in found["decisions"]] == ["second", "first"]
    assert found["decisions"][0]["ttft_ms"] == 5.0 and found["decisions"][0]["expected_ms"] > 0
    classes = found["since_start"]["classes"]
    assert {name: (one["requests"], one["failures"]) for name, one in classes.items()} == {
        "chat": (1, 0),
        "rag": (1, 1),
    }
    assert found["in_flight"] == 0


async def test_requests_that_missed_their_slo_are_a_notice(tmp_path: Path) -> None:
    page = Page(tmp_path, "a", "b")
    page.metrics[of_requests.SLO_REQUESTS].labels("m", "mine", "false").inc(9)
    assert "slo" in [one["about"] for one in (await page.shown())["notices"]]


async def test_pods_that_need_attention_are_first_with_the_reason(tmp_path: Path) -> None:
    page = Page(tmp_path, "a", "b", "c")
    for name in ("a", "b", "c"):
        page.fleet.event(name, PodEvent.PROBE_OK)
    page.fleet.trust("b", PrefixTrust.MISMATCH, "other tokens")
    page.fleet.event("c", PodEvent.DRAIN)
    found = (await page.shown())["pods"]
    assert [one["id"] for one in found] == ["b", "c", "a"]
    assert found[0]["trust"] == "mismatch"
    assert found[1]["state"] == "draining"
    assert "state" not in found[2], "facts of a healthy pod are omitted"


async def test_what_needs_attention_is_said(tmp_path: Path) -> None:
    """A pod that restarted, also while nobody watched; in red, that no pod is ready."""
    page = Page(tmp_path, "a", "b")
    [notice] = (await page.shown())["notices"]
    assert (notice["about"], notice["is_red"]) == ("unserved", True)
    for name in ("a", "b"):
        page.fleet.event(name, PodEvent.PROBE_OK)
    assert (await page.shown())["notices"] == []
    page.fleet.restarted("b")
    [notice] = (await page.shown())["notices"]
    assert (notice["about"], notice["view"], notice["is_red"]) == ("restarts", "now", False)


async def test_what_a_client_got_is_what_is_counted(tmp_path: Path) -> None:
    """Also where no class and no pod was reached: without a pod, of a model that nobody serves, refused by a quota."""
    page = Page(tmp_path)
    results = ["no_ready_pod"] * 3 + ["model_not_found"] * 2 + ["rate_limit_exceeded"]
    for result in results:
        page.metrics.ended(Ended("r", 1.0, "", "/v1/chat/completions", result, 503, is_read=False))
    found = await page.shown()
    assert found["since_start"]["requests"] == 6 and found["since_start"]["classes"] == {}
    assert found["since_start"]["failed"] == {"no_ready_pod": 3, "model_not_found": 2, "rate_limit_exceeded": 1}
    assert found["notices"][0]["text"].startswith("No pod is known")


async def test_the_latest_changes_are_shown(tmp_path: Path) -> None:
    """Newest first, at most as many as the page shows."""
    page = Page(tmp_path, *"abcd")
    page.fleet.event("a", PodEvent.PROBE_OK)
    page.fleet.event("a", PodEvent.EJECT, reason="connection refused")
    found = (await page.shown())["changes"]
    assert [(one["what"], one["subject"], one["cause"]) for one in found] == [
        ("ejected", "a", "connection refused"),
        ("joined", "a", "health check passed"),
    ]
    for number in range(2 * MAX_CHANGES):
        page.fleet.restarted("abcd"[number % 4])
    assert len((await page.shown())["changes"]) == MAX_CHANGES


async def test_each_pod_has_what_its_rates_are_computed_from(tmp_path: Path) -> None:
    page = Page(tmp_path, "a", "b")
    page.metrics.attempt_ended("a", "ok")
    page.metrics.attempt_ended("a", "connect_failed")
    page.metrics.pod_ttft_s.labels("a").observe(0.25)
    found = {one["id"]: (one["attempts"], one["first_tokens"], one["ttft_s"]) for one in (await page.shown())["pods"]}
    assert found == {"a": (2, 1, 0.25), "b": (0, 0, 0)}


async def test_the_line_of_the_last_hour_has_a_bounded_row_a_minute(tmp_path: Path) -> None:
    """Also while nobody watches, and its counters are those of the minute before the first viewer comes."""
    page = Page(tmp_path, "a", "b")
    following = asyncio.create_task(page.source.follow())
    while not page.source.hour:
        await asyncio.sleep(0)
    following.cancel()
    page.serve("first")
    following = asyncio.create_task(page.source.follow())
    while len(page.source.hour) < 2:
        await asyncio.sleep(0)
    following.cancel()
    (_, none, _), (_, p50_s, _) = (await page.shown())["hour"]
    assert none is None and p50_s == pytest.approx(0.0025)
    assert (await page.shown())["last_minute"]["requests"] == 1
    assert page.source.hour.maxlen == MAX_POINTS


@pytest.mark.parametrize("stream", [True, False])
async def test_a_slow_pod_is_late_by_its_streams_or_by_its_whole_answers(tmp_path: Path, stream: bool) -> None:
    page = Page(tmp_path, "a", "b")
    for number in range(20):
        page.answer(f"a{number}", "a", stream=stream, factor=1.0)
    for number in range(4):
        page.answer(f"b{number}", "b", stream=stream, factor=3.0)
    found = [one["text"] for one in (await page.shown())["notices"] if one["about"] == "slow"]
    assert found == ["Requests on b take 3.0 times as long as expected."]


async def test_names_are_shown_as_they_are_but_not_longer_than_a_line(tmp_path: Path) -> None:
    page = Page(tmp_path, HOSTILE, "x" * 1000)
    names = [one["id"] for one in (await page.shown())["pods"]]
    assert HOSTILE in names
    assert max(map(len, names)) < MAX_CHARACTERS + 10


async def test_a_snapshot_is_bounded_whatever_pods_and_clients_are_called(tmp_path: Path) -> None:
    """5,000 pods with the longest names, as many classes and decisions as fit: the rest is counted."""
    page = Page(tmp_path, *(f"{number:04}" + "\x01" * 1000 for number in range(5000)))
    for number in range(MAX_SERIES + 40):
        page.serve("\x01" * 120 + f"{number:03}", workload="\x02" * 900 + f"{number:03}")
    body = await page.source.snapshot()
    found = msgspec.json.decode(body)
    assert len(body) < MAX_PODS_BYTES + 512 * 1024
    assert found["pods"] and len(found["pods"]) + found["pods_not_shown"] == 5000
    assert len(found["decisions"]) == MAX_DECISIONS
    classes = found["since_start"]["classes"]
    assert len(classes) == MAX_SERIES + 1 and classes["other"]["requests"] == 40.0


async def test_requests_are_served_while_a_large_fleet_is_described(tmp_path: Path) -> None:
    """Other tasks run after every slice of pods and after every metric."""
    page = Page(tmp_path, *(f"pod-{number}" for number in range(500)))
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    await page.source.snapshot()
    counting.cancel()
    assert turns > 500 // SLICE_PODS + 20


async def test_the_last_reload_is_shown(tmp_path: Path) -> None:
    page = Page(tmp_path, "a")
    assert (await page.shown())["policies"]["last_reload"] is None
    (tmp_path / "mine.yaml").write_text("name: mine\nabout: x\npicker: 7\n")
    await page.source.policies.reload()
    found = (await page.shown())["policies"]
    assert "mine.yaml:3" in found["error"] and "mine.yaml:3" in found["last_reload"]["error"]


async def test_the_hottest_prefixes_are_shown_with_what_they_saved(tmp_path: Path) -> None:
    page = Page(tmp_path, "a", "b")
    page.serve("ours", cached_tokens=64)
    [found] = (await page.shown())["prefixes"]
    assert (found["requests"], found["hits"], found["saved_tokens"]) == (1, 1, 64)


async def test_what_hits_saved_is_shown_with_its_error(tmp_path: Path) -> None:
    """In seconds of pods and of their GPUs, with the price of these, and how far shadow caches are from the real ones:
    here these were full before."""
    page = Page(tmp_path, "a", "b", facts=PageFacts(price=2.5, currency="EUR"))
    assert (await page.shown())["placed_error"] is None
    page.serve("ours", cached_tokens=640)
    assert not list(page.shadows.follow())
    found = await page.shown()
    saved, gpus = found["since_start"]["saved_s"], found["since_start"]["saved_gpu_s"]
    assert saved["chosen"] == pytest.approx(pod("a").speed.compute_ms(0, 640) / 1000)
    assert gpus["chosen"] == pytest.approx(8 * saved["chosen"])
    assert found["placed_error"] == pytest.approx(0.64) and saved["round_robin"] == saved["chosen"]
    assert found["since_start"]["placed_shares"]["chosen"] == pytest.approx(0.64, rel=0.01)
    assert (found["price"], found["currency"]) == (2.5, "EUR")


async def test_files_that_are_not_in_use_are_shown_with_the_time_since_when(tmp_path: Path) -> None:
    """Policies that were refused, and files that need a restart."""
    page = Page(tmp_path, "a", facts=PageFacts(stale_files=lambda: [StaleFile("router.yaml", "changed", 5.0)]))
    assert [one["file"] for one in (await page.shown())["health"]["stale_files"]] == ["router.yaml"]
    (tmp_path / "mine.yaml").write_text("name: mine\nabout: x\npicker: 7\n")
    await page.source.policies.reload()
    since_s = page.source.policies.refused_since_s
    await page.source.policies.reload()
    _, refused = (await page.shown())["health"]["stale_files"]
    assert refused["file"] == str(tmp_path) and "mine.yaml:3" in refused["problem"]
    assert refused["since_s"] == since_s, "since the first refusal"
    (tmp_path / "mine.yaml").write_text("name: mine\nabout: x\npicker:\n  lowest_cost: {}\n")
    await page.source.policies.reload()
    assert len((await page.shown())["health"]["stale_files"]) == 1


async def test_what_evictions_cost_is_counted_when_the_page_is_shown(tmp_path: Path) -> None:
    """Tokens that were asked again soon, their prefill, and the learnt value of an evicted block."""
    page = Page(tmp_path, "a")
    page.source.gauges.store.evicted["m"].soon_tokens = 640.0
    for _ in range(2):
        found = await page.shown()
        assert found["evicted_reuse"] == {"m": PRIOR_REUSE}
        assert found["since_start"]["evicted_tokens"] == {"m": 640.0}
        assert found["since_start"]["evicted_s"]["m"] == pytest.approx(640 * pod("a").speed.c1_ms_per_token / 1000), (
            "counted once"
        )
