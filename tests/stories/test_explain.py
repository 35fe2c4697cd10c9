"""Explain, preview and replay of routing decisions."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from helm.monitoring.metric_catalog import declarations_of
from router.cli import main
from router.cli.replay import choices
from router.observe.declared import of_decisions, of_pods, of_requests
from router.observe.fast_metrics import MetricKind
from router.observe.receipts import Explained
from router.policy.price import Choice
from router.policy.review import review
from tests.kit.scenes import POLICIES
from tests.stories.conftest import Deploy, Deployment
from tests.stories.test_first_light import converse, opening

pytestmark = [pytest.mark.net, pytest.mark.anyio]


async def explain(deployment: Deployment, request_id: str) -> Explained:
    answer = await deployment.admin.get(f"/admin/explain/{request_id}")
    assert answer.status_code == 200, answer.text
    return msgspec.json.decode(answer.content, type=Explained)


COUNTED = {
    one.series
    for chapter in (of_requests, of_decisions, of_pods)
    for one in declarations_of(chapter)
    if one.kind is not MetricKind.GAUGE and one is not of_pods.KV_EVENTS and "_placed_" not in one.series
}
"""Metrics that grow with requests alone, at once. Gauges follow pods and time. KV events, and what other placements
would have found, come after a response."""


async def counted(deployment: Deployment) -> dict[str, str]:
    """Samples of these metrics by name and labels."""
    lines = (await deployment.admin.get("/metrics")).text.splitlines()
    samples = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    names = {name: name.partition("{")[0] for name in samples}
    return {
        name: value
        for name, value in samples.items()
        if names[name] in COUNTED or names[name].rpartition("_")[0] in COUNTED
    }


async def test_a_served_request_can_be_explained(deploy: Deploy) -> None:
    """By the id of its response: pods, the cost of each candidate, the prediction and the result."""
    async with deploy(pods=3) as deployment:
        *_, last = await converse(deployment, opening("tides"), turns=3)
        found = await explain(deployment, last.headers["x-request-id"])
        first, cached = found.explanation.columns[0], int(last.headers["x-warmroute-cached-tokens"])
        assert first.plan.choice == Choice(last.headers["x-warmroute-pod"])
        assert found.explanation.candidate_count == len(found.explanation.columns) == 3
        assert sum(ms for _, ms in first.plan.parts) == pytest.approx(first.plan.total_ms)
        reported = last.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert (found.receipt.predicted_cached_tokens, found.receipt.cached_tokens) == (cached, reported)
        assert 0 < cached <= reported
        assert found.receipt.result == "ok" and set(found.receipt.phases_ms) >= {"admit", "decide", "relay"}
        assert "tides" not in msgspec.json.encode(found).decode()


async def test_a_preview_decides_and_changes_nothing(deploy: Deploy) -> None:
    """Nothing is sent, leased, counted or learned; the request then goes to the previewed pod."""
    async with deploy(pods=3) as deployment:
        for number in range(12):
            await deployment.chat(opening("harbour") if number == 5 else opening(f"boat {number}"))
        body = {"model": "demo", "messages": opening("harbour"), "max_tokens": 8}
        seen = deployment.program.core.decisions._prefixes
        counts = {name: [run.count for run in shared._runs.values()] for name, shared in seen.items()}
        before, blocks = await counted(deployment), [engine.load for engine in deployment.engines]
        previews = [await deployment.admin.post("/admin/preview", json=body) for _ in range(3)]
        found = [msgspec.json.decode(answer.content, type=Explained) for answer in previews]
        assert await counted(deployment) == before and [engine.load for engine in deployment.engines] == blocks
        assert counts == {name: [run.count for run in shared._runs.values()] for name, shared in seen.items()}
        assert not deployment.program.pods.state.ledger.inflight()
        served = await deployment.chat(opening("harbour"))
        expected = (served.headers["x-warmroute-pod"], int(served.headers["x-warmroute-cached-tokens"]))
        plans = [one.explanation.columns[0].plan for one in found]
        assert {(plan.choice.pod, plan.cached_tokens) for plan in plans} == {expected}


async def test_recorded_decisions_are_replayed(deploy: Deploy, tmp_path: Path) -> None:
    """The same decision under the recorded policy, another under another policy."""
    file = tmp_path / "receipts.jsonl"
    async with deploy(pods=3, receipts=file) as deployment:
        await converse(deployment, opening("tides"), turns=4)
        await asyncio.gather(*(deployment.chat(opening(f"road {number % 3}", 60)) for number in range(12)))
    same, other = (
        review([(seen.scene(), was, POLICIES[name]) for seen, was, _ in choices(file, Counter())], name)
        for name in ("cost_aware", "round_robin")
    )
    assert (same.decisions, same.changed) == (16, 0)
    assert other.decisions == 16 and other.changed > 0


async def test_the_explain_command_prints_a_decision(
    deploy: Deploy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Within 100 columns; an unknown id or a missing router is one line and exit code 1."""

    def typed(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["warmroute", "explain", *arguments])
        with pytest.raises(SystemExit) as ended, capture_logs():  # those of the router, which is in this process
            main()
        return int(ended.value.code or 0)

    monkeypatch.setenv("COLUMNS", "100")
    async with deploy(pods=2) as deployment:
        asked, url = await deployment.chat(opening("tides")), str(deployment.admin.base_url)
        capsys.readouterr()
        known = await asyncio.to_thread(typed, asked.headers["x-request-id"], "--url", url)
        printed = capsys.readouterr().out
        unknown = await asyncio.to_thread(typed, "nobody", "--url", url)
    nowhere = await asyncio.to_thread(typed, "nobody", "--url", url)
    assert (known, unknown, nowhere) == (0, 1, 1)
    assert "= cost, ms" in printed and max(map(len, printed.splitlines())) <= 100
    assert "No decision about `nobody` is in memory" in capsys.readouterr().err
