"""How much of the fleet's time goes to those who overtake?"""

from __future__ import annotations

import pytest

from router.admission.fair_shares import DECAY_S, MAX_SHARE, OvertakingShare


def test_the_share_is_learnt_within_seconds_and_forgotten_as_fast() -> None:
    """3 ms of each 10 ms: 0.3."""
    share = OvertakingShare()
    assert share.at(100.0) == 0.0
    for at in range(4000):
        share.observe(3.0, 100.0 + at / 100)
    assert share.at(140.0) == pytest.approx(0.3, abs=0.01)
    assert share.at(140.0 + 5 * DECAY_S) < 0.01


def test_some_time_is_always_left() -> None:
    """However much overtook at once."""
    share = OvertakingShare()
    share.observe(1e9, 1.0)
    assert share.at(1.0) == MAX_SHARE
