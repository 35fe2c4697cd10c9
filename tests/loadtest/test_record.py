"""Is what is read again what was measured?"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from loadtest.record import Record, RecordError, read_record, run_of, write_record
from router.cli.load_driver import DriveResults, RequestResult


def test_a_record_survives_its_file(tmp_path: Path, make_record: Callable[..., Record]) -> None:
    """Rows, bounds and figures, without loss."""
    record = make_record()
    write_record(tmp_path / "r.json", record)
    assert read_record(tmp_path / "r.json") == record


def test_figures_lie_beside_the_rows_for_other_programs(tmp_path: Path, make_record: Callable[..., Record]) -> None:
    """Plain JSON, judged against the objective: one of three was good, in two seconds."""
    write_record(tmp_path / "r.json", make_record())
    figures = json.loads((tmp_path / "r.json").read_text())["runs"][0]["figures"]
    assert (figures["requests"], figures["errors"], figures["cached_share"]) == (3, 1, 0.6)
    assert figures["within_objective_share"] == 0.3333
    assert figures["goodput_per_s"] == 0.5


def test_what_was_measured_comes_back_as_it_was() -> None:
    """Everything but the texts, which would fill the disk."""
    one = RequestResult(
        kind="chat",
        asked={"messages": ["long"]},
        sent_s=1.25,
        late_s=0.25,
        status=200,
        pod="pod-1",
        predicted_cached_tokens=16,
        prompt_tokens=40,
        cached_tokens=32,
        output_tokens=5,
        ttft_s=0.125,
        e2e_s=0.5,
        text="long",
    )
    (back,) = run_of("cost_aware", 5.0, 1, DriveResults((one,), 2.0), ["pod-1"], 32).results().served
    assert (back.due_s, back.late_s, back.ttft_s, back.e2e_s) == (1.0, 0.25, 0.125, 0.5)
    assert (back.pod, back.prompt_tokens, back.cached_tokens, back.predicted_cached_tokens) == ("pod-1", 40, 32, 16)
    assert (back.asked, back.text) == ({}, "")


def test_a_file_that_is_no_record_is_named(tmp_path: Path) -> None:
    """Such as a result in an older shape."""
    path = tmp_path / "old.json"
    path.write_text('{"policies": []}')
    with pytest.raises(RecordError, match=r"old\.json"):
        read_record(path)
