"""`warmroute replay` decides recorded requests again and reports the changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from router.observe.ended import Ended, RecordedDecision
from router.observe.receipts import ReceiptWriter
from router.policy.decide import decide
from router.policy.recording import record
from router.types import InFlight
from tests.kit.command_line import Typed
from tests.kit.scenes import POLICIES, holding, pod, ready, request, scene

BY = POLICIES["cost_aware"]


@pytest.fixture
def receipts(tmp_path: Path) -> Path:
    """Ten requests that wait at the holder of their prompt, 5 ms each."""
    lines: list[bytes] = []
    writer = ReceiptWriter(lines.append)
    for number in range(10):
        busy = {"a": InFlight(1, 1, 9, 5.0, 9)}
        asked = request(f"req-{number}", tenant="acme" if number % 2 else "")
        seen = holding(scene(*ready(pod("a"), pod("b")), request=asked, inflight=busy), "a", 60)
        kept = RecordedDecision.of(record(seen), decide(seen, BY), BY, 0.0)
        writer.write(Ended(f"req-{number}", 0.0, "m", "chat", "ok", decision=kept), None)
    path = tmp_path / "receipts.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def test_the_policy_that_decided_changes_nothing(typed: Typed, receipts: Path) -> None:
    """Also after the policies have changed."""
    ended = typed("replay", receipts, "--policy", "cost_aware")
    assert ended.code == 0 and "0 of 10 decisions would change" in ended.out


def test_another_policy_is_compared_in_tables(typed: Typed, receipts: Path) -> None:
    """Moves by pod, and the largest changes. No mean time: later requests would find other caches."""
    ended = typed("replay", receipts, "--policy", "least_load", "--limit", 3)
    assert ended.code == 0 and "10 of 10 decisions would change" in ended.out
    assert "with the caches as they were" in ended.out and "`warmroute compare`" in ended.out
    assert "expected time to first token" not in ended.out and "%" not in ended.out
    assert ended.out.count("req-") == 3


def test_names_and_request_ids_are_never_cut(typed: Typed, receipts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In 80 columns they are folded: a request id is for `warmroute explain`."""
    request_id = "chatcmpl-0123456789abcdef0123456789abcdef-0"
    pod_id = "decode-pool-llama-70b-0.inference.svc.cluster.local:8000"
    text = receipts.read_text().replace("req-", request_id).replace('"a"', f'"{pod_id}"')
    receipts.write_text(text)
    monkeypatch.setenv("COLUMNS", "80")
    ended = typed("replay", receipts, "--policy", "least_load", "--limit", 3)
    assert ended.code == 0, ended.err
    assert "…" not in ended.out and max(map(len, ended.out.splitlines())) <= 80, ended.out


def test_a_policy_may_be_a_file_and_the_answer_json(typed: Typed, receipts: Path, tmp_path: Path) -> None:
    """One of your own, before it goes anywhere."""
    mine = tmp_path / "mine.yaml"
    mine.write_text("name: mine\nabout: mine\ncosts: {queue: {}}\npicker: {lowest_cost: {}}\n")
    ended = typed("replay", receipts, "--policy", mine, "--json")
    found = json.loads(ended.out)
    assert (found["policy"], found["decisions"], found["changed"], found["refused"]) == ("mine", 10, 10, 0)
    assert found["moves"] == [{"was": "a", "now": "b", "requests": 10}]
    assert found["largest"][0]["now_ms"] > found["largest"][0]["was_ms"] and "before" not in found


def test_a_folder_decides_each_request_by_the_policy_that_matches_it(
    typed: Typed, receipts: Path, tmp_path: Path
) -> None:
    """One of two tenants has a policy of its own; the default decides for all others."""
    (tmp_path / "mine").mkdir()
    theirs = "name: theirs\nabout: x\nmatch: {tenant: acme}\ncosts: {queue: {}}\npicker: {lowest_cost: {}}\n"
    (tmp_path / "mine" / "theirs.yaml").write_text(theirs)
    ended = typed("replay", receipts, "--policies", tmp_path / "mine", "--json")
    found = json.loads(ended.out)
    assert (found["decisions"], found["changed"]) == (10, 5)
    assert {int(one["request_id"][4:]) % 2 for one in found["largest"]} == {1}
    ended = typed("replay", receipts, "--policies", tmp_path / "mine", "--default", "least_load", "--json")
    assert json.loads(ended.out)["changed"] == 10


def test_scenes_without_their_fleet_are_counted(typed: Typed, receipts: Path) -> None:
    """The first line of a file that was rotated badly."""
    fleet, *rest = receipts.read_bytes().splitlines()
    receipts.write_bytes(b"\n".join([*rest[:4], fleet, *rest[4:]]))
    ended = typed("replay", receipts, "--policy", "cost_aware")
    assert "0 of 6 decisions" in ended.out and "skipped 4 scenes" in ended.err


def test_a_file_without_scenes_is_an_error(typed: Typed, tmp_path: Path) -> None:
    """With the line number."""
    path = tmp_path / "receipts.jsonl"
    path.write_text('{"kind":"receipt","at_s":1.0,"model":"m","endpoint":"chat"}\n')
    assert "no recorded scenes; enable receipts.replay_data" in typed("replay", path, "--policy", "cost_aware").err
    path.write_text("none\n")
    ended = typed("replay", path, "--policy", "cost_aware")
    assert ended.code == 2 and "receipts.jsonl:1: not a receipt" in ended.err
