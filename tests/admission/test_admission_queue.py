"""A request goes now, waits, or is refused at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.admission.admission_queue import (
    AHEAD_MS,
    FIRST_REST_MS,
    HEADROOM,
    MAX_ERROR_SHARE,
    MAX_REST_MS,
    MIN_RECHECK_MS,
    AdmissionConfig,
    AdmissionQueue,
    Closed,
    QueueCandidate,
    Reason,
    Refusal,
)
from router.admission.fair_order import Waiting
from router.admission.tenant import OPEN_TENANT, Tenant

LIMITS = AdmissionConfig(max_wait_ms=1000.0)
HEAVY, LIGHT = Tenant(name="heavy"), Tenant(name="light")


def candidate(
    pod: str = "a", prefill_ms: float = 100.0, queue_ms: float = 0.0, extra_ms: float = 0.0
) -> QueueCandidate:
    """`extra_ms` is cost that is no time to first token."""
    ttft_ms = queue_ms + prefill_ms
    return QueueCandidate(pod, ttft_ms + extra_ms, ttft_ms, queue_ms, prefill_ms, 0.0)


def offer(tenant: Tenant = OPEN_TENANT, limit_ms: float = 2000.0, body_bytes: int = 10) -> Waiting:
    return Waiting(tenant, limit_ms, body_bytes)


def busy(
    limits: AdmissionConfig = LIMITS,
    ms: float = 500.0,
    pods: Sequence[str] = "a",
    error_share: float = 0.0,
    rest_ms: float = FIRST_REST_MS,
) -> AdmissionQueue:
    """At time 0 all pods have prompts for so long."""
    queue = AdmissionQueue(limits, error_share=error_share, rest_ms=rest_ms)
    for pod in pods:
        assert queue.send_at_once(offer(limit_ms=1e9), candidate(pod, prefill_ms=ms), 0.0)
    return queue


def wait(queue: AdmissionQueue, request: Waiting, candidates: Sequence[QueueCandidate], now_s: float = 0.0) -> Waiting:
    assert queue.offer(request, candidates, now_s) is None
    return request


def next_to_send(
    queue: AdmissionQueue, now_s: float, queue_candidates: Callable[[Waiting], Sequence[QueueCandidate]]
) -> tuple[Waiting, QueueCandidate] | float:
    """The first request that is sent, and its candidate; or the milliseconds until it is worth trying again."""
    soonest_ms = math.inf
    for one in queue.first():
        found = queue.try_send(one, queue_candidates(one), now_s)
        if isinstance(found, QueueCandidate):
            return one, found
        soonest_ms = min(soonest_ms, found.wait_ms)
    return max(soonest_ms, MIN_RECHECK_MS)


def run(
    queue: AdmissionQueue, candidates: Sequence[QueueCandidate], now_s: float, until_s: float
) -> list[tuple[float, Waiting]]:
    """Send all that wait until then, with the time of each."""
    sent: list[tuple[float, Waiting]] = []
    while now_s < until_s and len(queue):
        found = next_to_send(queue, now_s, lambda _: candidates)
        if isinstance(found, float):
            now_s += found / 1000
        else:
            sent.append((now_s, found[0]))
    return sent


def test_a_request_goes_at_once_while_nobody_waits_and_the_pod_is_open() -> None:
    """The second on the same pod does not."""
    queue = AdmissionQueue(LIMITS, error_share=0.0)
    assert queue.send_at_once(offer(), candidate(), 0.0)
    assert not queue.send_at_once(offer(), candidate(), 0.0)
    assert queue.send_at_once(offer(), candidate("b"), 0.0)
    assert queue.send_at_once(offer(), candidate(), 0.1)


def test_nobody_overtakes_those_who_wait() -> None:
    """Even if a pod is open."""
    queue = busy()
    wait(queue, offer(), [candidate()])
    assert not queue.send_at_once(offer(), candidate("b"), 0.0)


def test_a_waiting_request_goes_where_a_place_comes_free_first() -> None:
    """Not where it would have been sent on arrival."""
    queue = AdmissionQueue(LIMITS, error_share=0.0)
    assert queue.send_at_once(offer(), candidate("a", 300.0), 0.0)
    assert queue.send_at_once(offer(), candidate("b", 500.0), 0.0)
    one = wait(queue, offer(), [candidate("a"), candidate("b")])
    assert next_to_send(queue, 0.0, lambda _: [candidate("a"), candidate("b")]) == pytest.approx(300.0)
    assert next_to_send(queue, 0.301, lambda _: [candidate("a"), candidate("b")]) == (one, candidate("a"))


def test_a_request_waits_for_a_cheaper_pod_if_that_costs_less_than_another_one() -> None:
    """It waits 100 ms for its prefix, not 1 s. The next in order takes the open pod."""
    queue = busy(ms=100.0)
    first = wait(queue, offer(), [candidate("a", 10.0), candidate("b", 500.0)])
    second = wait(queue, offer(), [candidate("a", 500.0), candidate("b", 500.0)])
    candidates = {
        first: [candidate("a", 10.0), candidate("b", 500.0)],
        second: [candidate("a", 500.0), candidate("b", 500.0)],
    }
    assert next_to_send(queue, 0.0, candidates.__getitem__) == (second, candidate("b", 500.0))


def test_a_request_that_would_be_late_is_refused_at_once() -> None:
    """With the time after which it would have been in time."""
    queue = busy(ms=900.0)
    found = queue.offer(offer(limit_ms=600.0), [candidate()], 0.0)
    assert isinstance(found, Refusal)
    assert found.reason is Reason.FLEET
    assert found.retry_after_s == pytest.approx(0.4)
    assert queue.offer(offer(limit_ms=600.0), [candidate()], 0.401) is None


def test_nobody_waits_longer_than_the_limit_of_the_queue() -> None:
    """Even without an SLO."""
    queue = busy(ms=1001.0)
    assert isinstance(queue.offer(offer(limit_ms=float("inf")), [candidate()], 0.0), Refusal)


def test_predictions_may_err() -> None:
    """A request that would be in time by less than the error is refused."""
    for limit_ms, is_queued in ((1101.0, True), (1099.0, False)):
        queue = busy(AdmissionConfig(), ms=900.0, error_share=0.1)
        assert (queue.offer(offer(limit_ms=limit_ms), [candidate()], 0.0) is None) == is_queued


def test_the_refusal_names_the_tenants_share_if_others_wait_and_its_own_requests_are_the_reason() -> None:
    """A tenant without requests is still queued."""
    queue = busy(ms=100.0)
    while queue.offer(offer(HEAVY), [candidate()], 0.0) is None:
        pass
    wait(queue, offer(LIGHT), [candidate()])
    refusal = queue.offer(offer(HEAVY), [candidate()], 0.0)
    assert isinstance(refusal, Refusal) and refusal.reason is Reason.TENANT


def test_a_tenant_within_its_share_does_not_wait_for_those_who_use_more() -> None:
    """Until it has used its share, half of the pod here. The others wait for what it used."""
    queue = AdmissionQueue(LIMITS, error_share=0.0)
    assert queue.send_at_once(offer(HEAVY), candidate(), 0.0)
    heavy = [wait(queue, offer(HEAVY), [candidate()]) for _ in range(2)]
    assert queue.send_at_once(offer(LIGHT), candidate(), 0.0)
    assert not queue.send_at_once(offer(LIGHT), candidate(), 0.1)
    sent = run(queue, [candidate()], 0.1, 10.0)
    assert [one for _, one in sent] == heavy
    assert sent[0][0] == pytest.approx(0.2)


def test_requests_of_a_tenant_within_its_share_do_not_wait_for_each_other() -> None:
    """It may use its share early, by the longest wait: six prompts of 200 ms at half of the pod."""
    queue = busy()
    wait(queue, offer(HEAVY), [candidate()])
    sent = [queue.send_at_once(offer(LIGHT), candidate(), 0.0) for _ in range(7)]
    assert sent == [True] * 6 + [False]


def test_a_tenant_within_its_share_waits_for_a_higher_band_and_for_a_place_in_the_engine() -> None:
    """A pod may be busy with prompts of another router."""
    queue = busy()
    wait(queue, offer(Tenant(name="vip", band=1)), [candidate()])
    assert not queue.send_at_once(offer(LIGHT), candidate(), 0.0)
    assert not AdmissionQueue(LIMITS, error_share=0.0).send_at_once(offer(LIGHT), candidate(queue_ms=1001.0), 0.0)


def test_a_higher_band_is_queued_however_many_wait_below() -> None:
    """And goes next."""
    queue = busy(ms=100.0)
    while queue.offer(offer(HEAVY), [candidate()], 0.0) is None:
        pass
    high = wait(queue, offer(Tenant(name="vip", band=1)), [candidate()])
    assert run(queue, [candidate()], 0.0, 10.0)[0][1] is high


def test_the_queue_is_bounded_in_requests_and_bytes() -> None:
    """What is too much is taken from the largest backlog."""
    for limits in (AdmissionConfig(max_requests=3), AdmissionConfig(max_bytes=30)):
        queue = busy(limits, ms=100.0)
        heavy = [wait(queue, offer(HEAVY), [candidate(prefill_ms=10.0)]) for _ in range(3)]
        assert queue.overflow() is None
        wait(queue, offer(LIGHT), [candidate(prefill_ms=10.0)])
        assert queue.overflow() is heavy[-1]
        assert (queue.overflow(), len(queue), queue.held_bytes) == (None, 3, 30)


def test_a_request_that_can_no_longer_be_in_time_is_taken_out() -> None:
    """When it is certain, however long others were expected to take. Nobody waits longer than twice the limit."""
    queue = busy()
    soon, later = (wait(queue, offer(limit_ms=limit_ms), [candidate()]) for limit_ms in (800.0, 1e9))
    assert queue.expire(0.0) == pytest.approx(700.0)
    assert queue.expire(0.701) is soon
    assert queue.expire(0.701) == pytest.approx(1299.0)
    assert queue.expire(2.001) is later
    assert (queue.expire(2.001), len(queue), queue.held_bytes) == (math.inf, 0, 0)


def test_a_client_that_leaves_is_out_at_once() -> None:
    """With its bytes; the next in order goes."""
    queue = busy()
    gone, stays = wait(queue, offer(), [candidate()]), wait(queue, offer(), [candidate()])
    queue.leave(gone)
    assert (len(queue), queue.held_bytes) == (1, 10)
    assert [one for _, one in run(queue, [candidate()], 0.0, 10.0)] == [stays]
    queue.leave(gone)
    assert (len(queue), queue.held_bytes) == (0, 0)


def test_a_queue_of_one_of_several_processes_sends_its_part() -> None:
    """Two processes send to the same pods, so each waits twice as long, until the other one is gone. It may be somewhat
    ahead of that."""
    senders = [2]
    queue = AdmissionQueue(LIMITS, error_share=0.0, senders=lambda: senders[0])
    assert queue.send_at_once(offer(), candidate(prefill_ms=1000.0), 0.0)
    open_s = 2.0 - AHEAD_MS / 1000
    assert not queue.send_at_once(offer(), candidate(), open_s - 0.01)
    assert queue.send_at_once(offer(), candidate(prefill_ms=1000.0), open_s + 0.01)
    senders[0] = 1
    assert not queue.send_at_once(offer(), candidate(prefill_ms=1000.0), 3.99)
    assert queue.send_at_once(offer(), candidate(prefill_ms=1000.0), 4.01)
    assert not queue.send_at_once(offer(), candidate(), 5.0)
    assert queue.send_at_once(offer(), candidate(), 5.02)


def test_decoding_gets_its_part_of_the_time() -> None:
    """Steps of 25 ms that may take 100 ms on average: prompts for three quarters of the time."""
    queue = AdmissionQueue(AdmissionConfig(), tpot_ms=100.0 * HEADROOM, rest_ms=0.0)
    decoding = QueueCandidate("a", 300.0, 300.0, 0.0, 300.0, 25.0)
    assert queue.send_at_once(offer(), decoding, 0.0)
    assert not queue.send_at_once(offer(), decoding, 0.399)
    assert queue.send_at_once(offer(), decoding, 0.401)


DECODING = QueueCandidate("a", 100.0, 100.0, 0.0, 100.0, 0.0)


def rest_ms(queue: AdmissionQueue, now_s: float) -> float:
    """The time after a prompt without another one."""
    assert queue.send_at_once(offer(), DECODING, now_s)
    one = wait(queue, offer(), [DECODING], now_s)
    found = queue.try_send(one, [DECODING], now_s)
    assert isinstance(found, Closed)
    queue.leave(one)
    return found.wait_ms - DECODING.prefill_ms


def test_the_pause_between_two_prompts_is_learnt_from_slow_answers() -> None:
    """It grows while more than the allowed share of answers is slow, to a bound, and else becomes shorter."""
    queue = AdmissionQueue(AdmissionConfig(), tpot_ms=50.0, rest_ms=0.0)
    assert rest_ms(queue, 0.0) == pytest.approx(0.0)
    for _ in range(10):
        queue.answered("", False, 51.0)
    longer_ms = rest_ms(queue, 1000.0)
    assert longer_ms > 100.0
    for _ in range(100):
        queue.answered("", False, 50.0)
    queue.answered("", False, None)
    assert 0.0 < rest_ms(queue, 2000.0) < longer_ms
    for _ in range(1000):
        queue.answered("", False, 51.0)
    assert rest_ms(queue, 3000.0) == pytest.approx(MAX_REST_MS)


def test_a_pod_that_does_not_decode_and_a_request_without_an_slo_need_no_pause() -> None:
    """Nothing waits for its tokens."""
    queue = AdmissionQueue(AdmissionConfig(), tpot_ms=100.0)
    prefill = msgspec.structs.replace(DECODING, decodes=False)
    assert queue.send_at_once(offer(), prefill, 0.0) and queue.send_at_once(offer(), prefill, 0.101)
    queue = AdmissionQueue(AdmissionConfig())
    assert queue.send_at_once(offer(), DECODING, 0.0) and queue.send_at_once(offer(), DECODING, 0.101)


def test_a_decode_pod_gets_no_prompt_that_would_delay_one_on_its_way_to_it() -> None:
    """It gets a short one, and the long one when the other has arrived."""
    queue = AdmissionQueue(AdmissionConfig(), tpot_ms=100.0, rest_ms=0.0)
    handed_over = msgspec.structs.replace(candidate("p", 400.0), decodes=False, decode_pod="d")
    assert queue.send_at_once(offer(), handed_over, 0.0)
    assert not queue.send_at_once(offer(), candidate("d", 800.0), 0.0)
    assert queue.send_at_once(offer(), candidate("d", 50.0), 0.0)
    assert queue.send_at_once(offer(), candidate("d", 800.0), 0.401)


def test_a_request_waits_for_room_where_it_is_decoded() -> None:
    """Or is refused, if that takes too long."""
    queue = AdmissionQueue(LIMITS, error_share=0.0)
    full = msgspec.structs.replace(candidate("p"), room_ms=300.0)
    assert not queue.send_at_once(offer(), full, 0.0)
    assert isinstance(queue.offer(offer(), [msgspec.structs.replace(full, room_ms=1001.0)], 0.0), Refusal)
    assert queue.try_send(wait(queue, offer(), [full]), [full], 0.0) == Closed(300.0, True)


def test_a_pod_that_is_open_for_others_is_not_closed() -> None:
    """A request may wait for a cheaper one meanwhile."""
    queue = busy(ms=300.0)
    cheap, dear = candidate("a", queue_ms=300.0), candidate("b", extra_ms=5000.0)
    one = wait(queue, offer(limit_ms=1e6), [cheap])
    found = queue.try_send(one, [cheap, dear], 0.0)
    assert isinstance(found, Closed) and found.wait_ms > 0 and not found.all_closed
    found = queue.try_send(one, [cheap], 0.0)
    assert isinstance(found, Closed) and found.all_closed


def test_the_error_of_predictions_is_learnt_from_late_first_tokens() -> None:
    """While they are late, requests are refused that would be in time by little; to a bound."""

    def is_refused(limit_ms: float) -> bool:
        return isinstance(queue.offer(offer(limit_ms=limit_ms), [candidate(prefill_ms=0.0)], 0.0), Refusal)

    queue = busy(ms=600.0)
    assert not is_refused(601.0)
    for _ in range(4):
        queue.answered("", True, None)
    assert is_refused(700.0)
    for _ in range(100):
        queue.answered("", True, None)
    assert is_refused(599.0 * (1 + MAX_ERROR_SHARE)) and not is_refused(601.0 * (1 + MAX_ERROR_SHARE))


@pytest.mark.parametrize("tenants", [2, 3, 9])
def test_a_minority_of_the_tenants_moves_no_margin_of_the_others(tenants: int) -> None:
    """However often it misses its limits, also if it comes first."""
    queue = busy(AdmissionConfig(), ms=600.0, rest_ms=50.0)
    names = [f"t{number}" for number in range(tenants)]
    for tenant in (*names[: tenants // 2] * 300, *names * 300):
        is_bad = tenant in names[: tenants // 2]
        queue.answered(tenant, is_bad, 1e9 if is_bad else 1.0)
    good = offer(Tenant(name=names[-1]), limit_ms=601.0)
    assert queue.offer(good, [candidate(prefill_ms=0.0)], 0.0) is None
    assert queue.error_share.of(names[0]) > 0.4 and queue.rest_ms.for_all <= 50.0


def test_a_pod_with_prompts_of_others_is_not_open() -> None:
    """However little this queue sent there."""
    queue = busy(pods="b")
    assert not queue.send_at_once(offer(), candidate(queue_ms=50.0), 0.0)
    one = wait(queue, offer(), [candidate(queue_ms=50.0)])
    assert next_to_send(queue, 0.0, lambda _: [candidate(queue_ms=50.0)]) == pytest.approx(50.0)
    assert next_to_send(queue, 0.05, lambda _: [candidate()]) == (one, candidate())


@given(
    st.lists(st.tuples(st.floats(0.0, 0.3), st.floats(1.0, 800.0), st.sampled_from([HEAVY, LIGHT])), max_size=60),
    st.integers(1, 4),
)
def test_no_pod_is_idle_while_a_request_waits_for_any(arrivals: list[tuple[float, float, Tenant]], pods: int) -> None:
    """Places of equal cost: a request is sent when the first pod is open, and none is open while one waits."""
    queue, now_s, names = AdmissionQueue(LIMITS, error_share=0.0), 0.0, [str(at) for at in range(pods)]
    waiting: dict[Waiting, float] = {}

    def queue_candidates(one: Waiting) -> list[QueueCandidate]:
        return [candidate(name, waiting[one]) for name in names]

    for pause_s, prefill_ms, tenant in arrivals:
        until_s = now_s + pause_s
        while waiting and now_s < until_s:
            found = next_to_send(queue, now_s, queue_candidates)
            if isinstance(found, float):
                assert all(queue._wait_ms(candidate(name), now_s) > 0 for name in names)
                now_s += found / 1000
            else:
                del waiting[found[0]]
        now_s = max(now_s, until_s)
        candidates = [candidate(name, prefill_ms) for name in names]
        if not queue.send_at_once(offer(tenant, 1e9), candidates[0], now_s):
            one = offer(tenant, 1e9)
            if queue.offer(one, candidates, now_s) is None:
                waiting[one] = prefill_ms


@given(st.lists(st.floats(1.0, 300.0), min_size=1, max_size=60), st.integers(1, 4))
def test_who_is_queued_is_sent_in_time(sizes: list[float], pods: int) -> None:
    """If nothing else comes, a prediction is wrong by at most the prompts in front of it."""
    names = [str(at) for at in range(pods)]
    queue = busy(ms=200.0, pods=names)
    prefill = {}
    for ms in sizes:
        one = offer()
        if queue.offer(one, [candidate(name, ms) for name in names], 0.0) is None:
            prefill[one] = ms
    now_s = 0.0
    while len(queue):
        found_or_ms = next_to_send(queue, now_s, lambda one: [candidate(name, prefill[one]) for name in names])
        if isinstance(found_or_ms, float):
            now_s += found_or_ms / 1000
        else:
            assert now_s <= found_or_ms[0].start_by_s + max(sizes) / 1000 + 0.01
