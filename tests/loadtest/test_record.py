"""Records are read back as they were written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from loadtest.fleets.record import Record, RecordError, read_record, run_of, write_record
from loadtest.traffic.load_driver import DriveResults, RequestResult


def test_a_record_is_read_back_unchanged(tmp_path: Path, make_record: Callable[..., Record]) -> None:
    """Rows, bounds and figures."""
    record = make_record()
    write_record(tmp_path / "r.json", record)
    assert read_record(tmp_path / "r.json") == record


def test_the_file_has_figures_for_other_programs(tmp_path: Path, make_record: Callable[..., Record]) -> None:
    """Plain JSON with the objective applied: one of three requests was good, in two seconds."""
    write_record(tmp_path / "r.json", make_record())
    figures = json.loads((tmp_path / "r.json").read_text())["runs"][0]["figures"]
    assert (figures["requests"], figures["errors"], figures["cached_share"]) == (3, 1, 0.6)
    assert figures["within_objective_share"] == 0.3333
    assert figures["goodput_per_s"] == 0.5


def test_results_are_read_back_unchanged() -> None:
    """All except the texts, which are not stored."""
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


def test_the_error_for_an_invalid_file_names_it(tmp_path: Path) -> None:
    """For example a result in an older format."""
    path = tmp_path / "old.json"
    path.write_text('{"policies": []}')
    with pytest.raises(RecordError, match=r"old\.json"):
        read_record(path)
