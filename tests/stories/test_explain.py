"""Can anybody find out why a request went where it went, what would happen now, and what another policy would do?"""

from __future__ import annotations

import asyncio
import json
import sys
from http import HTTPStatus
from pathlib import Path

import msgspec
import pytest

from router.cli import main
from router.cli.replay import Decided
from router.observe.receipts import Explained
from router.policy.price import Choice
from router.policy.review import against
from router.sim.mock_engine import Fault, FaultKind
from tests.policy.scenes import POLICIES
from tests.stories.conftest import City, OpenCity
from tests.stories.test_first_light import converse, opening

pytestmark = [pytest.mark.net, pytest.mark.anyio]


async def explain(city: City, request_id: str) -> Explained:
    answer = await city.client.get(f"/admin/explain/{request_id}")
    assert answer.status_code == 200, answer.text
    return msgspec.json.decode(answer.content, type=Explained)


async def metrics(city: City) -> dict[str, str]:
    """Samples by name, without those of time and of what happens by itself."""
    lines = (await city.client.get("/metrics")).text.splitlines()
    samples = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    own_will = ("index", "calibration", "kv_events", "loop_lag", "process_", "python_")
    return {name: value for name, value in samples.items() if not any(part in name for part in own_will)}


async def test_a_served_request_explains_itself(open_city: OpenCity) -> None:
    """By the id that its answer carries: where it went, the price of each way, what was expected and what came."""
    async with open_city(pods=3) as city:
        *_, last = await converse(city, opening("tides"), turns=3)
        found = await explain(city, last.headers["x-request-id"])
        first, cached = found.explanation.columns[0], int(last.headers["x-warmroute-cached-tokens"])
        assert first.plan.choice == Choice(last.headers["x-warmroute-pod"])
        assert found.explanation.candidate_count == len(found.explanation.columns) == 3
        assert sum(ms for _, ms in first.plan.parts) == pytest.approx(first.plan.total_ms)
        reported = last.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert (found.receipt.predicted_cached_tokens, found.receipt.cached_tokens) == (cached, reported)
        assert 0 < cached <= reported
        assert found.receipt.result == "ok" and set(found.receipt.phases_ms) >= {"admit", "decide", "relay"}
        assert "tides" not in msgspec.json.encode(found).decode()


async def test_a_request_that_is_being_served_explains_itself(open_city: OpenCity) -> None:
    """Nobody has to wait for the end of what hangs."""
    async with open_city(pods=1, engine={"time_scale": 1.0}) as city:
        city.client.headers["x-request-id"] = "hanging/1"
        asked = asyncio.create_task(city.chat(opening("slow"), max_tokens=500))
        await city.until(lambda: bool(city.program.pods.ledger.inflight()))
        found = await explain(city, "hanging%2F1")
        assert (found.receipt.id, found.receipt.result) == ("hanging/1", "") and found.explanation.columns
        asked.cancel()


async def test_a_retry_tells_who_failed_and_who_served(open_city: OpenCity) -> None:
    """The decision stays as it was; the failure stands beside it."""
    async with open_city(pods=2) as city:
        warm = (await city.chat(opening("stones"))).headers["x-warmroute-pod"]
        holder = next(engine for engine in city.engines if engine.url.endswith(warm))
        holder.inject(Fault(kind=FaultKind.STATUS, status=HTTPStatus.SERVICE_UNAVAILABLE))
        answer = await city.chat(opening("stones"))
        found = await explain(city, answer.headers["x-request-id"])
        assert [(one.pod, one.error) for one in found.receipt.failures] == [(warm, "UpstreamBroken")]
        assert found.explanation.columns[0].plan.choice == Choice(warm)
        assert found.receipt.pod == answer.headers["x-warmroute-pod"] != warm


async def test_an_unknown_id_is_a_clear_404(open_city: OpenCity) -> None:
    """And says how long decisions are kept."""
    async with open_city(pods=1) as city:
        answer = await city.client.get("/admin/explain/nobody")
        assert answer.status_code == 404 and "receipts.keep" in answer.json()["error"]["message"]


async def test_a_preview_decides_and_changes_nothing(open_city: OpenCity) -> None:
    """Nothing is sent, booked, counted or learnt; the request then goes where the preview said."""
    async with open_city(pods=3) as city:
        for number in range(12):
            await city.chat(opening("harbour") if number == 5 else opening(f"boat {number}"))
        body = {"model": "demo", "messages": opening("harbour"), "max_tokens": 8}
        seen = city.program.proxy.forwarder._decisions._traffic._by_model
        counts = {name: [run.count for run in shared._runs.values()] for name, shared in seen.items()}
        before, blocks = await metrics(city), [engine.load for engine in city.engines]
        previews = [await city.client.post("/admin/preview", json=body) for _ in range(3)]
        found = [msgspec.json.decode(answer.content, type=Explained) for answer in previews]
        assert await metrics(city) == before and [engine.load for engine in city.engines] == blocks
        assert counts == {name: [run.count for run in shared._runs.values()] for name, shared in seen.items()}
        assert not city.program.pods.ledger.inflight()
        served = await city.chat(opening("harbour"))
        expected = (served.headers["x-warmroute-pod"], int(served.headers["x-warmroute-cached-tokens"]))
        plans = [one.explanation.columns[0].plan for one in found]
        assert {(plan.choice.pod, plan.cached_tokens) for plan in plans} == {expected}


@pytest.mark.parametrize(
    ("body", "status"), [(b"{", 400), (b'{"model": "none", "messages": [{"role": "user", "content": ""}]}', 404)]
)
async def test_a_preview_of_a_bad_request_says_what_is_wrong(open_city: OpenCity, body: bytes, status: int) -> None:
    """As the request itself would."""
    async with open_city(pods=1) as city:
        answer = await city.client.post("/admin/preview", content=body)
        assert answer.status_code == status and answer.json()["error"]["type"] == "invalid_request_error"


async def test_a_shadow_of_the_live_policy_always_agrees(open_city: OpenCity, tmp_path: Path) -> None:
    """Sixty requests, many at once; every decision is compared, none differs."""
    beside = {"name": "beside", "extends": "cost_aware", "about": "", "shadow": {"policy": "cost_aware", "rate": 1.0}}
    (tmp_path / "beside.yaml").write_text(json.dumps(beside))
    async with open_city(pods=3, policy="beside", policies=tmp_path) as city:
        city.client.headers["x-workload-class"] = "batch"
        await asyncio.gather(*(city.chat(opening(f"road {number % 7}", 60)) for number in range(60)))
        shadows = city.program.records.journal.shadows
        assert shadows is not None
        await city.until(lambda: shadows.idle)
        samples = await metrics(city)
        name = "warmroute_shadow_decisions_total"
        assert float(samples[name + '{agrees="yes",class="batch",policy="cost_aware"}']) == 60
        assert name + '{agrees="no",class="batch",policy="cost_aware"}' not in samples


async def test_recorded_traffic_is_decided_again(open_city: OpenCity, tmp_path: Path) -> None:
    """As it was, by the policy that decided it; and otherwise by another."""
    file = tmp_path / "receipts.jsonl"
    async with open_city(pods=3, receipts=file) as city:
        await converse(city, opening("tides"), turns=4)
        await asyncio.gather(*(city.chat(opening(f"road {number % 3}", 60)) for number in range(12)))
    same, other = (
        against([(seen.scene(), was) for seen, was, _ in Decided(file)], POLICIES[name])
        for name in ("cost_aware", "round_robin")
    )
    assert (same.decisions, same.changed) == (16, 0)
    assert other.decisions == 16 and other.changed > 0 and other.after.mean_ms > same.after.mean_ms


async def test_the_command_prints_it(
    open_city: OpenCity, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Within 100 columns; an id that is not kept, and a router that is not there, are one line and exit code 1."""

    def typed(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["warmroute", "explain", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0)

    monkeypatch.setenv("COLUMNS", "100")
    async with open_city(pods=2) as city:
        asked = await city.chat(opening("tides"))
        capsys.readouterr()
        known = await asyncio.to_thread(typed, asked.headers["x-request-id"], "--url", city.url)
        printed = capsys.readouterr().out
        unknown = await asyncio.to_thread(typed, "nobody", "--url", city.url)
    nowhere = await asyncio.to_thread(typed, "nobody", "--url", city.url)
    assert (known, unknown, nowhere) == (0, 1, 1)
    assert "= price, ms" in printed and max(map(len, printed.splitlines())) <= 100
    assert "No decision about `nobody` is in memory" in capsys.readouterr().err
