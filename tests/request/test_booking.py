"""The leases of an attempt, and their release."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.decision import Candidate, Cost, Direct, Plan, Pull, Split
from router.fleet.ledger import Ledger
from router.policy.prefill_clock import SAME_STEP_S, PrefillClock
from router.request.booking import Booking
from router.types import ScenePicture
from tests.kit.scenes import SPEED, pod

NOW_S = 100.0


PLANS: list[Plan] = [
    Direct(pod("a")),
    Direct(pod("a"), Pull("b", 64)),
    Split(pod("b"), pod("a")),
    Split(pod("b"), pod("a"), 0, Pull("c", 64)),
]


def booked(ledger: Ledger, plan: Plan) -> Booking:
    return Booking(ledger, Candidate(plan, Cost.of((), 1.0), 64), 100, lambda _: PrefillClock(), NOW_S)


def test_a_split_computes_on_one_pod_and_keeps_its_context_on_the_other() -> None:
    """Cached tokens of the prefill pod are not computed; after its response it only sends."""
    ledger = Ledger()
    booking = booked(ledger, PLANS[2])
    now = ledger.inflight()
    assert (now["b"].prefill_tokens, now["a"].prefill_tokens, now["a"].context_tokens) == (36, 0, 100)
    booking.handed_over(NOW_S)
    now = ledger.inflight()
    assert (now["b"].requests, now["b"].pulls, now["a"].requests) == (0, 1, 1)
    booking.first_token(NOW_S)
    assert "b" not in ledger.inflight()


def test_a_prefill_pod_pulls_until_it_has_responded() -> None:
    """Then it sends itself, until the first token."""
    ledger = Ledger()
    booking = booked(ledger, PLANS[3])
    assert ledger.inflight()["c"].pulls == 1 and ledger.inflight()["b"].pulls == 0
    booking.handed_over(NOW_S)
    assert "c" not in ledger.inflight() and ledger.inflight()["b"].pulls == 1
    booking.first_token(NOW_S)
    assert "b" not in ledger.inflight()


@pytest.mark.parametrize("plan", PLANS)
def test_pictures_that_the_computing_pod_has_not_seen_are_work(plan: Plan) -> None:
    """Behind the 64 cached tokens; where their end is unknown, too."""
    computing = plan.prefill.id if isinstance(plan, Split) else plan.pod.id
    pictures = [
        ScenePicture(60, 1000, ()),
        ScenePicture(90, 2000, ("c",)),
        ScenePicture(99, 4000, (computing,)),
        ScenePicture(None, 8000, ()),
    ]
    ledger = Ledger()
    candidate = Candidate(plan, Cost.of((), 1.0), 64)
    without, booking = (
        Booking(ledger, candidate, 100, lambda _: PrefillClock(), NOW_S, given) for given in ([], pictures)
    )
    assert booking.prefill_ms - without.prefill_ms == pytest.approx(10_000 * SPEED.c1_ms_per_token)
    assert ledger.inflight()[computing].prefill_ms == pytest.approx(booking.prefill_ms + without.prefill_ms)


def test_a_pull_counts_on_its_holder_until_the_first_token() -> None:
    """Then the holder is no longer involved."""
    ledger = Ledger()
    booking = booked(ledger, PLANS[1])
    assert ledger.inflight()["b"].pulls == 1
    booking.first_token(NOW_S)
    assert set(ledger.inflight()) == {"a"}


def test_a_handoff_that_ends_after_the_first_token_sends_nothing() -> None:
    """Where both requests are sent at once, the prefill response may come last."""
    ledger = Ledger()
    booking = booked(ledger, PLANS[2])
    booking.first_token(NOW_S)
    booking.handed_over(NOW_S)
    assert set(ledger.inflight()) == {"a"}


@pytest.mark.parametrize("plan", PLANS)
def test_the_booked_prefill_is_available_in_milliseconds(plan: Plan) -> None:
    """On either pod."""
    assert booked(Ledger(), plan).prefill_ms == PLANS[0].pod.speed.compute_ms(64, 100)


@given(
    plans=st.lists(st.sampled_from(PLANS), min_size=1, max_size=4),
    steps=st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["handed_over", "first_token"])), max_size=8),
)
def test_nothing_is_booked_after_the_release(plans: list[Plan], steps: list[tuple[int, str]]) -> None:
    """After any sequence of handoff and first token, once or twice."""
    ledger = Ledger()
    bookings = [booked(ledger, plan) for plan in plans]
    for number, step in dict.fromkeys(steps):
        getattr(bookings[number % len(bookings)], step)(NOW_S) if step == "first_token" or number < len(
            bookings
        ) else None
    for booking in bookings:
        booking.release(NOW_S)
        booking.release(NOW_S)
    assert ledger.inflight() == {}


@pytest.mark.parametrize("others", [0, 1])
def test_a_pull_to_an_idle_pod_is_timed(others: int) -> None:
    """Not on a busy pod, and not where the first token was not seen."""
    ledger = Ledger()
    for _ in range(others):
        ledger.book(pod("a"), 100, 0, 0.0)
    booking, unseen = booked(ledger, PLANS[1]), booked(Ledger(), PLANS[1])
    assert booking.pulled_ms is None
    booking.first_token(NOW_S)
    assert (booking.pulled_ms is None) is bool(others)
    unseen.assume_first_token(NOW_S)
    assert unseen.pulled_ms is None


def test_a_first_token_after_its_expected_time_has_no_effect() -> None:
    """Nor does a second one, or one after the release."""
    ledger, clock = Ledger(), PrefillClock()
    booking = Booking(ledger, Candidate(PLANS[0], Cost.of((), 1.0), 64), 100, lambda _: clock, NOW_S)
    booking.assume_first_token(NOW_S)
    assert ledger.inflight()["a"].prefill_requests == 0
    for again in (booking.first_token, booking.assume_first_token):
        again(NOW_S)
        assert ledger.inflight()["a"].prefill_requests == 0
    assert booking.observation is None
    booking.release(NOW_S)
    booking.first_token(NOW_S)
    assert (ledger.inflight(), booking.observation, clock.first_token(1, 1e9)) == ({}, None, None)


def test_a_repeated_first_token_keeps_the_observation() -> None:
    """The second one belongs to no waiting prompt."""
    ledger, clock = Ledger(), PrefillClock()
    booking = Booking(ledger, Candidate(Direct(pod("a")), Cost.of((), 1.0), 0), 1000, lambda _pod: clock, NOW_S)
    later_s = NOW_S + 2 * SAME_STEP_S
    booking.first_token(later_s)
    observation = booking.observation
    assert observation is not None and observation.tokens == 1000
    booking.first_token(later_s)
    assert booking.observation is observation
    booking.release(NOW_S)
    assert not ledger.inflight()
