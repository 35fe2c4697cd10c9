"""A pod gets prompts for a share of its time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.admission.admission_queue import HEADROOM, MAX_NAMES, MIN_SHARE, PrefillPace, prefill_share


def test_the_share_leaves_time_for_the_tokens_of_others() -> None:
    """Steps of 25 ms become 100 ms on average if prompts take three quarters of the time."""
    assert prefill_share(25.0, 100.0 * HEADROOM) == pytest.approx(0.75)
    assert prefill_share(50.0, 100.0 * HEADROOM) == pytest.approx(0.5)


def test_without_a_limit_prompts_may_take_all_the_time() -> None:
    """And without time left, a little."""
    assert prefill_share(25.0, float("inf")) == 1.0
    assert prefill_share(500.0, 100.0) == MIN_SHARE


def test_an_idle_pod_is_open() -> None:
    """Also one that was busy long ago: it gets no credit for it."""
    pace = PrefillPace()
    assert pace.wait_ms("a", 10.0) == 0.0
    pace.sent("a", 100.0, 1.0, 10.0)
    assert pace.wait_ms("a", 10.0) == pytest.approx(100.0)
    assert pace.wait_ms("a", 100.0) == 0.0
    pace.sent("a", 100.0, 1.0, 100.0)
    assert pace.wait_ms("a", 100.0) == pytest.approx(100.0)


def test_a_pod_rests_between_two_prompts() -> None:
    """Unless its share makes the pause longer."""
    pace = PrefillPace()
    pace.sent("a", 100.0, 0.8, 0.0, rest_ms=300.0)
    pace.sent("b", 900.0, 0.5, 0.0, rest_ms=300.0)
    assert [pace.wait_ms(name, 0.0) for name in "ab"] == [pytest.approx(400.0), pytest.approx(1800.0)]


def test_memory_is_bounded_by_those_who_are_ahead() -> None:
    """Pods come and go."""
    pace = PrefillPace()
    for at in range(2 * MAX_NAMES):
        pace.sent(str(at), 1.0, 1.0, float(at))
    assert len(pace._even_s) <= MAX_NAMES


@given(
    st.lists(st.tuples(st.floats(1.0, 1000.0), st.floats(0.0, 0.5)), min_size=1, max_size=50),
    st.floats(0.1, 1.0),
)
def test_a_pod_never_gets_more_than_its_share(prompts: list[tuple[float, float]], share: float) -> None:
    """Over any time: its share, and the last prompt."""
    pace, now_s, sent_ms = PrefillPace(), 0.0, 0.0
    for prefill_ms, pause_s in prompts:
        now_s += pause_s + pace.wait_ms("a", now_s + pause_s) / 1000
        pace.sent("a", prefill_ms, share, now_s)
        assert sent_ms <= now_s * 1000 * share + 1e-6
        sent_ms += prefill_ms
