"""Another draw of simulated traffic changes only names."""

from __future__ import annotations

from loadtest.simulator.traffic import Session, TrafficRequest
from loadtest.studies.layer_hits import renamed

FIRST, NEXT = (TrafficRequest(n * 64, 8, blocks, n) for n, blocks in ((2, [7, 8]), (3, [7, 8, 9])))


def test_another_draw_renames_all_blocks_and_keeps_what_prompts_share() -> None:
    drawn = [renamed(Session(1.5, (FIRST, NEXT)), draw) for draw in (0, 1, 2)]
    names = [[list(request.blocks) for request in session.requests] for session in drawn]
    assert names[0] == [[7, 8], [7, 8, 9]]
    assert all(later[:2] == first for first, later in names)
    assert len({name for _, later in names for name in later}) == 9
    assert {(one.start_s, *(request.prompt_tokens for request in one.requests)) for one in drawn} == {(1.5, 128, 192)}
