"""The worth of the last answer for the next turn, as `loadtest/studies/next_turn.py` plays it."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.studies.next_turn import PUBLISHED, WAYS, Play, Recorded, plays, run

NOTHING = Recorded(Path())
"""The published measurement needs no recorded traffic."""


def test_the_published_gain_has_the_simulated_size() -> None:
    """vLLM measured 778 ms without the last answer, and 460 ms with it, of prompts and answers of unknown lengths."""
    found = {way: run(NOTHING, Play(PUBLISHED, 1.0, "1 + 1 always", 50.0, way, 7)) for way in WAYS}
    assert found["store"].ttft_mean_ms / found["none"].ttft_mean_ms == pytest.approx(460 / 778, abs=0.12)
    assert all(one.split_share == 1.0 for one in found.values())
    computed = {way: one.computed_mtokens for way, one in found.items()}
    assert computed["store of prompts"] == computed["none"]
    assert computed["p2p"] == computed["p2p, unpriced"] == computed["store"] == computed["store, unpriced"]
    assert computed["store"] < 0.7 * computed["none"]


def test_every_setting_is_played_once_with_each_seed() -> None:
    found = plays([1, 2], [12.0, 50.0], {"chat": 1.0, "agents": 2.0})
    assert len(set(found)) == len(found) and {one.seed for one in found} == {1, 2}
