"""Files of receipts say what requests got by hour, class and pod, and what changed."""

from __future__ import annotations

import json
import random
import time
import tracemalloc
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import typer
from msgspec import structs

from router.cli import receipt_files
from router.cli.receipt_files import lines_of, moment, receipts_of
from router.cli.receipts_command import MAX_ROWS, OTHERS, Tally
from router.cli.receipts_command import summed as summed_up
from router.observe.receipts import Receipt
from router.observe.receipts import receipt as receipt_of
from tests.cli.receipt_lines import NOON_S, change, lines, made, seen_at, write
from tests.kit.command_line import Typed
from tests.kit.scenes import POLICIES, pod, ready

HOUR_S = 3600.0


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()


def summed(typed: Typed, path: Path, *options: str) -> dict[str, Any]:
    ended = typed("receipts", "summary", path, "--json", *options)
    assert ended.code == 0, ended.err
    found: dict[str, Any] = json.loads(ended.out)
    return found


def test_requests_are_summed_by_hour_class_and_pod(typed: Typed, tmp_path: Path) -> None:
    """A client that left is no failure, and an answer that is not streamed has no time to first token."""
    first = [
        made(60, 10.0),
        made(120, 30.0),
        made(180, None, result="pod_error"),
        made(240, 20.0, result="client_gone"),
    ]
    path = write(tmp_path / "r.jsonl", lines([*first, made(HOUR_S, 1000.0)]))
    found = summed(typed, path)
    early, late = found["hour"]["2025-12-01 12:00"], found["hour"]["2025-12-01 13:00"]
    assert (early["requests"], early["failed"], early["cached"]) == (4, 1, 25.0)
    assert early["ttft"] == 20.0 and late["p99"] == pytest.approx(1000, rel=0.01)
    assert found["class"]["chat"]["requests"] == found["pod"]["a"]["requests"] == 5
    shown = typed("receipts", "summary", path, "--by", "hour").out
    assert "2025-12-01 13:00" in shown and "1,0" in shown and "no recorded changes" in shown and "class" not in shown


def test_quantiles_are_right_to_one_percent() -> None:
    """In bounded memory: they are counted in steps."""
    tally, drawn = Tally(), random.Random(1)
    times = sorted(drawn.lognormvariate(4, 1) for _ in range(5000))
    receipt = receipt_of(made(0))
    for ttft_ms in times:
        tally.add(structs.replace(receipt, ttft_ms=ttft_ms))
    row = tally.row()
    assert row["p50"] == pytest.approx(times[2499], rel=0.011)
    assert row["p99"] == pytest.approx(times[4949], rel=0.011)
    assert tally.steps.total() == 5000 and len(tally.steps) < 1000


def test_a_time_and_a_model_limit_what_is_summed(typed: Typed, tmp_path: Path) -> None:
    """`--until` is not included."""
    path = write(tmp_path / "r.jsonl", lines([made(0), made(60, model="other"), made(HOUR_S)]))
    assert sum(row["requests"] for row in summed(typed, path, "--since", "2025-12-01T13:00")["hour"].values()) == 1
    assert sum(row["requests"] for row in summed(typed, path, "--until", "2025-12-01T13:00Z")["hour"].values()) == 2
    assert summed(typed, path, "--model", "other")["pod"]["a"]["requests"] == 1
    assert typed("receipts", "summary", path, "--since", "noon").code == 2


def test_recorded_changes_are_listed_in_order_of_time(typed: Typed, tmp_path: Path) -> None:
    """With their causes, of the time that is asked for."""
    recorded = [change(90, "policy", "mine", "files changed"), change(30, "ejected", "b", "connection refused")]
    path = write(tmp_path / "r.jsonl", [*lines([made(0)]), *recorded])
    changes = summed(typed, path)["changes"]
    assert [(one["what"], one["subject"], one["cause"]) for one in changes] == [
        ("ejected", "b", "connection refused"),
        ("policy", "mine", "files changed"),
    ]
    assert [one["what"] for one in summed(typed, path, "--since", "2025-12-01T12:01Z")["changes"]] == ["policy"]
    shown = typed("receipts", "summary", path).out
    assert "connection refused" in shown and "2025-12-01 12:00:30" in shown


def test_receipts_alone_show_when_pods_and_policies_served(typed: Typed, tmp_path: Path) -> None:
    """For files of versions that write no changes: the first and last request of each pod and version of a policy."""
    later = made(HOUR_S, seen=seen_at("r", *ready(pod("c"))), by=POLICIES["least_load"])
    found = summed(typed, write(tmp_path / "r.jsonl", lines([made(0), made(60), later])))
    assert {name: (row["first"], row["last"]) for name, row in found["pod"].items()} == {
        "a": ("2025-12-01 12:00:00", "2025-12-01 12:01:00"),
        "c": ("2025-12-01 13:00:00", "2025-12-01 13:00:00"),
    }
    assert list(found["policy"]) == [f"{name} {POLICIES[name].version}" for name in ("cost_aware", "least_load")]


def test_rotated_files_come_first_and_may_be_compressed(tmp_path: Path) -> None:
    """FILE.10 is older than FILE.2; other files next to it are not read."""
    for name, at_s in (("r.jsonl", 4), ("r.jsonl.1", 3), ("r.jsonl.2.gz", 2), ("r.jsonl.10", 1)):
        write(tmp_path / name, lines([made(at_s)]))
    (tmp_path / "r.jsonl.bak").write_text("nonsense")
    found = [line for line in lines_of(tmp_path / "r.jsonl") if isinstance(line, Receipt)]
    assert [one.at_s - NOON_S for one in found] == [1, 2, 3, 4]


def test_an_incomplete_last_line_of_a_file_is_named_and_skipped(typed: Typed, tmp_path: Path) -> None:
    """As after a full disk, or while the router writes."""
    path = write(tmp_path / "r.jsonl", lines([made(0)]))
    path.write_bytes(path.read_bytes() + b'{"kind":"rec')
    ended = typed("receipts", "summary", path, "--json")
    assert ended.code == 0 and json.loads(ended.out)["pod"]["a"]["requests"] == 1
    assert f"{path}:3: skipped the last line, which is incomplete" in ended.err


def test_a_rotation_while_a_file_is_read_hides_no_line(tmp_path: Path) -> None:
    """Nor shows one twice."""
    path = tmp_path / "r.jsonl"
    for name, at_s in (("r.jsonl.1", 1), ("r.jsonl", 2)):
        write(tmp_path / name, lines([made(at_s)], scenes=False))
    reading = lines_of(path)
    first = next(reading)
    for number in (1, 0):
        path.with_name(f"r.jsonl.{number}" if number else "r.jsonl").rename(path.with_name(f"r.jsonl.{number + 1}"))
    write(path, lines([made(3)], scenes=False))
    assert [one.at_s - NOON_S for one in (first, *reading)] == [1, 2]


def test_beyond_the_most_rows_the_oldest_hours_are_added_up(typed: Typed, tmp_path: Path) -> None:
    """And the page says so."""
    hours = MAX_ROWS + 3
    path = write(tmp_path / "r.jsonl", lines([made(number * HOUR_S) for number in range(hours)], scenes=False))
    ended = typed("receipts", "summary", path, "--json", "--by", "hour")
    found = json.loads(ended.out)["hour"]
    newest = f"{datetime.fromtimestamp(NOON_S + (hours - 1) * HOUR_S):%Y-%m-%d %H:%M}"
    assert found[OTHERS]["requests"] == 3 and newest in found and "2025-12-01 12:00" not in found
    assert f"more than {MAX_ROWS} rows by hour" in ended.err


def test_a_file_without_summary_says_what_to_run(typed: Typed, tmp_path: Path) -> None:
    path = tmp_path / "receipts.jsonl"
    path.touch()
    ended = typed("receipts", path)
    assert ended.code == 2 and "warmroute receipts summary" in ended.err


def test_a_line_that_is_no_receipt_is_named(typed: Typed, tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", [*lines([made(0)]), b"{"])
    ended = typed("receipts", "summary", path)
    assert ended.code == 2 and f"{path}:3: not a receipt" in ended.err


def test_a_long_file_takes_no_more_memory(tmp_path: Path) -> None:
    """Neither its lines are kept, nor more than a fixed number of rows."""
    path = write(tmp_path / "r.jsonl", lines(made(at_s) for at_s in range(2000)))
    tracemalloc.start()
    try:
        summed_up(lines_of(path))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < path.stat().st_size
    receipt = receipt_of(made(0))
    named = (structs.replace(receipt, pod=f"p{n}", workload=f"w{n}", policy=f"x{n}") for n in range(MAX_ROWS + 9))
    tallies, _ = summed_up(named)
    assert {len(rows) for rows in tallies.values()} == {1, MAX_ROWS + 1} and tallies["pod"][OTHERS].requests == 9


class Clock(datetime):
    """A day whose time is 13:30 UTC."""

    @classmethod
    def now(cls, tz: Any = None) -> Clock:
        return cls(2025, 12, 1, 13, 30)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12:00", "2025-12-01T12:00Z"),
        ("14:00", "2025-11-30T14:00Z"),
        ("12:00:30", "2025-12-01T12:00:30Z"),
        ("14:00+02:00", "2025-12-01T12:00Z"),
        ("23:00-08:00", "2025-12-01T07:00Z"),
        ("2025-12-24", "2025-12-24T00:00Z"),
        ("2025-12-01 09:00", "2025-12-01T09:00Z"),
        ("2025-12-01T09:00+01:00", "2025-12-01T08:00Z"),
    ],
)
def test_a_time_is_the_last_one_before_now_or_that_of_a_date(
    monkeypatch: pytest.MonkeyPatch, text: str, expected: str
) -> None:
    """In the zone of this machine, unless it names one."""
    monkeypatch.setattr(receipt_files, "datetime", Clock)
    assert moment(text) == datetime.fromisoformat(expected).timestamp()


@pytest.mark.parametrize("text", ["noon", "25:00", "", "12:00 yesterday"])
def test_another_text_is_no_time(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is no time such as 14:00"):
        moment(text)


def test_a_line_of_no_possible_time_is_named(typed: Typed, tmp_path: Path) -> None:
    path = write(tmp_path / "receipts.jsonl", lines([made(0), made(1e300)], scenes=False))
    ended = typed("receipts", "summary", path)
    assert ended.code == 2 and f"{path}:2: not a receipt: at_s is no Unix time" in ended.err


def test_an_empty_file_has_no_receipts(tmp_path: Path) -> None:
    path = tmp_path / "receipts.jsonl"
    path.touch()
    assert receipts_of(path) == []
