"""A decode pod gets no prompt that would delay what is handed over to it."""

from __future__ import annotations

import pytest

from router.admission.admission_queue import MAX_DELAY_S, MAX_NAMES, HandoffsDue

SHORT_MS = MAX_DELAY_S * 1000


def test_a_long_prompt_waits_until_those_that_it_would_delay_have_arrived() -> None:
    """One that is done soon enough does not, nor does another pod."""
    due = HandoffsDue()
    due.sent("d", 10.5, 10.0)
    due.sent("d", 10.8, 10.0)
    assert due.wait_ms("d", SHORT_MS + 499.0, 10.0) == 0.0
    assert due.wait_ms("d", SHORT_MS + 501.0, 10.0) == pytest.approx(500.0)
    assert due.wait_ms("d", SHORT_MS + 900.0, 10.0) == pytest.approx(800.0)
    assert due.wait_ms("d", SHORT_MS + 900.0, 10.7) == pytest.approx(100.0)
    assert due.wait_ms("d", SHORT_MS + 900.0, 10.8) == 0.0
    assert due.wait_ms("e", SHORT_MS + 900.0, 10.0) == 0.0


def test_memory_is_bounded_by_handoffs_under_way() -> None:
    """Pods come and go, and one gets many."""
    due = HandoffsDue()
    for at in range(2 * MAX_NAMES):
        due.sent(str(at), at + 1.0, float(at))
        due.sent("d", at + 1.0, float(at))
    assert len(due._due_s) <= MAX_NAMES
    assert len(due._due_s["d"]) <= 2
