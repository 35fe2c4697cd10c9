"""Streams at a constant rate: which answers count as failed, cut, changed."""

from __future__ import annotations

from pathlib import Path

from loadtest.faults.killed_parts import EVENTS, FORMS, Seen, table
from loadtest.faults.steady_streams import Answers, continuations, counted
from loadtest.traffic.load_driver import RequestResult


def answer(text: str = "a b", *, tokens: int = 2, ttft_s: float | None = 0.1, error: str = "") -> RequestResult:
    return RequestResult("kind", {}, 1.0, id="req-1", ttft_s=ttft_s, text=text, output_tokens=tokens, error=error)


def test_an_answer_is_whole_if_it_has_all_tokens_and_equals_the_first_one_of_its_kind(tmp_path: Path) -> None:
    served = [answer(), answer("a c"), answer(tokens=1), *[answer(ttft_s=None, error="x")] * 2, answer("a", error="x")]
    found = counted(served, 2, {}, [])
    assert (found.answers, found.failed, found.cut, found.changed) == (6, 2, 1, 2)
    assert not found.all_whole and counted(served[:1], 2, {}, []).all_whole
    assert counted([answer("a c")], 2, {"kind": "a b"}, []).changed == 1


def test_an_error_is_shown_with_what_the_routers_have_logged_about_its_request(tmp_path: Path) -> None:
    log = tmp_path / "router.log"
    log.write_text('{"request":"req-0"}\n{"request":"req-1","result":"upstream_broken"}\n')
    (shown,) = counted([answer(error="cut")], 2, {}, [log]).errors
    assert shown == '1.0 s: cut; {"request":"req-1","result":"upstream_broken"}'


def test_continuations_that_did_not_happen_are_left_out() -> None:
    page = (
        '# TYPE x\nwarmroute_continuations_total{method="ids"} 3.0\nwarmroute_continuations_total{method="none"} 0.0\n'
    )
    assert continuations(page) == {'{method="ids"}': 3}


def test_the_table_counts_joined_streams_alone() -> None:
    continued = {'{method="ids",outcome="joined"}': 3, '{method="replay",outcome="joined"}': 1, '{outcome="failed"}': 9}
    *_, row = table([Seen("a pod is killed", Answers(10, 0, 1, 2, 5.0), 7, continued)])
    assert row == "| a pod is killed | 10 | 0 | 1 | 2 | 4 | 7 |"


def test_every_event_but_one_leaves_the_routers_alive() -> None:
    assert [name for name, event in EVENTS.items() if event.kills_router] == ["router"]
    assert len(FORMS) == 4
