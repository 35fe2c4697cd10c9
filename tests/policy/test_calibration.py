"""From what a router sees of its pods, it learns how fast they are."""

from __future__ import annotations

import heapq
import math
from dataclasses import asdict, dataclass, field, replace
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.simulator.traffic import TrafficRequest
from loadtest.simulator.virtual_job import Job
from loadtest.simulator.virtual_pod import VirtualPod, VirtualPodConfig
from router.policy.calibration import VERSION, Calibration, CalibrationRow, UnreadableCalibration
from router.policy.prefill_clock import (
    LONGEST_STEP_S,
    WINDOW_STARTS,
    ConcurrentDecode,
    PrefillClock,
    PrefillObservation,
    TransferObservation,
)
from router.types import Link, PodSpeed
from tests.kit.scenes import LLAMA_70B

TRUE = PodSpeed(20.0, 0.05, 8e-7)
LINK = Link(5.0, 12.1e6, "same_rack")
Prompt = tuple[int, int]
"""Its tokens, and how many of them are cached."""


def scaled(speed: PodSpeed, factor: float) -> PodSpeed:
    c0, c1, c2 = speed.c0_ms * factor, speed.c1_ms_per_token * factor, speed.c2_ms_per_token2 * factor
    return replace(speed, c0_ms=c0, c1_ms_per_token=c1, c2_ms_per_token2=c2)


def a_prompt(random: Random) -> Prompt:
    """100 to 32,000 tokens, cached to some part or not at all."""
    n = int(math.exp(random.uniform(math.log(100), math.log(32_000))))
    return n, int(n * random.choice([0, 0, 0.3, 0.5, 0.9]))


def noise(random: Random) -> float:
    """10 %, and 3 % of outliers of 5 times or a fifth."""
    factor = random.choice([5.0, 0.2]) if random.random() < 0.03 else 1.0
    return factor * math.exp(random.gauss(0, 0.1))


def error(found: PodSpeed, true: PodSpeed) -> float:
    """Mean absolute relative one of the time of 300 prompts."""
    random = Random(1)
    prompts = [a_prompt(random) for _ in range(300)]
    return sum(abs(found.prefill_ms(*one) / true.prefill_ms(*one) - 1) for one in prompts) / 300


def alone(speed: PodSpeed, random: Random) -> PrefillObservation:
    """One prompt on an idle pod."""
    n, p = a_prompt(random)
    return PrefillObservation(1, n - p, n * n - p * p, speed.prefill_ms(n, p) * noise(random))


# --- the clock ---


def test_a_lone_prompt_is_observed_from_when_it_is_sent_to_its_first_token() -> None:
    """The time to first token, with what it needed to compute."""
    clock = PrefillClock()
    clock.sent("a", 1000, 400, now_s=5.0)
    assert clock.first_token("a", now_s=5.25) == PrefillObservation(1, 600, 1000**2 - 400**2, 250.0)
    assert clock.first_token("a", now_s=5.3) is None


def test_prompts_that_queue_are_observed_together() -> None:
    """From the first one sent until none of them waits, in any order of their ends."""
    clock = PrefillClock()
    clock.sent("a", 100, 0, now_s=1.0)
    clock.sent("b", 200, 0, now_s=1.1)
    assert clock.first_token("b", now_s=1.5) is None
    assert clock.first_token("a", now_s=2.0) == PrefillObservation(2, 300, 50_000, 1000.0)


def test_first_tokens_of_one_step_started_once() -> None:
    """A batch pays the fixed part of a step once."""
    clock = PrefillClock()
    clock.sent("a", 100, 0, now_s=1.0)
    clock.sent("b", 200, 0, now_s=1.1)
    clock.first_token("a", now_s=2.0)
    assert clock.first_token("b", now_s=2.0) == PrefillObservation(1, 300, 50_000, 1000.0)


def test_a_pod_that_is_never_idle_is_observed_in_windows() -> None:
    """Whose times add up to all the time there was."""
    clock = PrefillClock()
    seen = []
    clock.sent(0, 100, 0, now_s=0.0)
    for number in range(1, 4 * WINDOW_STARTS + 1):
        clock.sent(number, 100, 0, now_s=number - 0.5)
        seen.append(clock.first_token(number - 1, now_s=float(number)))
    windows = [one for one in seen if one]
    assert (
        windows
        == [PrefillObservation(WINDOW_STARTS, 100 * WINDOW_STARTS, 10_000 * WINDOW_STARTS, 1000.0 * WINDOW_STARTS)] * 4
    )


def test_no_window_ends_on_a_prompt_that_overtook_another() -> None:
    """Nobody knows how much of the one overtaken is computed by then."""
    clock = PrefillClock()
    clock.sent("slow", 100, 0, now_s=0.0)
    for number in range(2 * WINDOW_STARTS):
        clock.sent(number, 100, 0, now_s=number + 0.1)
        assert clock.first_token(number, now_s=number + 0.9) is None
    observation = clock.first_token("slow", now_s=20.0)
    assert observation == PrefillObservation(7, 700, 70_000, 20_000.0)


def test_a_window_with_a_prompt_without_a_first_token_gives_no_observation() -> None:
    """Cancelled, failed or unstreamed; the next window is good again, at once if the pod was never idle."""
    clock = PrefillClock()
    clock.sent("a", 100, 0, now_s=0.0)
    clock.sent("b", 100, 0, now_s=0.1)
    clock.gone("a")
    assert clock.first_token("b", now_s=1.0) is None
    clock.sent("c", 100, 0, now_s=2.0)
    clock.sent("d", 100, 0, now_s=2.1)
    clock.sent("e", 100, 0, now_s=2.2)
    clock.gone("d")
    assert clock.first_token("c", now_s=3.0) is None
    assert clock.first_token("e", now_s=3.5) == PrefillObservation(1, 100, 10_000, 500.0)


def test_a_disturbed_window_gives_no_observation() -> None:
    """Its time went into what did not come through this router."""
    clock = PrefillClock()
    clock.sent("a", 100, 0, now_s=0.0)
    clock.disturbed()
    assert clock.first_token("a", now_s=1.0) is None
    clock.sent("b", 100, 0, now_s=2.0)
    assert clock.first_token("b", now_s=2.5) is not None
    clock.gone("b")
    clock.sent("c", 100, 0, now_s=3.0)
    assert clock.first_token("c", now_s=3.5) is not None


def test_with_decoding_requests_the_current_step_counts_as_well() -> None:
    """From when it began, with who decoded in it and in the prompt's own."""
    clock = PrefillClock()
    clock.sent("a", 1000, 400, 5.0, ConcurrentDecode(3, 9000), step_began_s=4.99)
    seen = clock.first_token("a", 5.1, ConcurrentDecode(4, 10_000))
    assert seen
    assert seen.elapsed_ms == pytest.approx(110.0)
    assert seen.features == (0, 600, 1000**2 - 400**2, 2.0, 7.0, 19_000.0)


@pytest.mark.parametrize("began_s", [-math.inf, 5.0 - LONGEST_STEP_S])
def test_half_of_a_step_with_an_unobserved_begin_counts(began_s: float) -> None:
    """On average."""
    clock = PrefillClock()
    clock.sent("a", 1000, 400, 5.0, ConcurrentDecode(3, 9000), began_s)
    seen = clock.first_token("a", 5.1, ConcurrentDecode(4, 10_000))
    assert seen
    assert seen.elapsed_ms == pytest.approx(100.0)
    assert seen.features == (0, 600, 1000**2 - 400**2, 1.5, 5.5, 14_500.0)


def test_each_step_of_a_window_counts_with_its_decoding_requests() -> None:
    """The first computed a prompt alone, the second one during that prompt's answer."""
    clock = PrefillClock()
    clock.sent("a", 1000, 0, 5.0)
    clock.sent("b", 500, 0, 5.01)
    assert clock.first_token("a", 5.1) is None
    seen = clock.first_token("b", 5.2, ConcurrentDecode(1, 1000))
    assert seen
    assert seen.features == (1, 1500, 1000**2 + 500**2, 1.0, 1.0, 1000.0)


def test_a_decode_step_is_learnt_from_prompts_that_were_computed_in_one() -> None:
    """Unknown at first, it is taken for the fixed part of a prefill."""
    calibration, random = Calibration(), Random(4)
    true = replace(TRUE, d0_ms=60.0, d1_ms_per_request=0.5, d2_ms_per_context_token=1e-4)
    prior = replace(true, d0_ms=0.0)
    for _ in range(400):
        n, _ = a_prompt(random)
        decoding = ConcurrentDecode(random.randrange(0, 60), random.randrange(0, 200_000))
        took_ms = true.fixed_ms(decoding.requests, decoding.context_tokens) + true.compute_ms(0, n)
        clock = PrefillClock()
        clock.sent("a", n, 0, 0.0)
        seen = clock.first_token("a", took_ms * math.exp(random.gauss(0, 0.05)) / 1000, decoding)
        assert seen
        calibration.observe_prefill("class", "a", prior, seen)
    found = calibration.speed("class", "a", prior)
    for requests, context_tokens in ((0, 0), (1, 1000), (30, 100_000)):
        expected_ms = true.fixed_ms(requests, context_tokens)
        assert found.fixed_ms(requests, context_tokens) == pytest.approx(expected_ms, rel=0.15)


def test_a_prompt_with_fewer_cached_tokens_than_expected_is_corrected() -> None:
    """As if the truth had been known when it was sent."""
    believing, knowing = PrefillClock(), PrefillClock()
    believing.sent("a", 1000, 800, now_s=0.0)
    knowing.sent("a", 1000, 96, now_s=0.0)
    believed, known = believing.first_token("a", now_s=0.1), knowing.first_token("a", now_s=0.1)
    assert believed and believed.corrected(800, 96) == known


@given(st.lists(st.tuples(st.integers(0, 6), st.sampled_from("sfg"), st.floats(0, 2)), max_size=60))
def test_in_any_order_of_events_windows_hold_what_ended_and_no_more_time_than_passed(
    events: list[tuple[int, str, float]],
) -> None:
    """Each prompt in one window at most."""
    clock, now_s, ended, seen = PrefillClock(), 0.0, 0, []
    waiting: set[int] = set()
    for request, kind, pause_s in events:
        now_s += pause_s
        if kind == "s" and request not in waiting:
            waiting.add(request)
            clock.sent(request, 10, 0, now_s)
        elif kind == "f":
            ended += request in waiting
            waiting.discard(request)
            seen.append(clock.first_token(request, now_s))
        elif kind == "g":
            waiting.discard(request)
            clock.gone(request)
    windows = [one for one in seen if one]
    assert sum(one.tokens for one in windows) <= 10 * ended
    assert sum(one.elapsed_ms for one in windows) <= now_s * 1000 + 1e-6
    assert all(one.starts >= 1 and one.tokens >= 10 * one.starts for one in windows)


# --- what it learns ---


@dataclass
class Learner:
    """A router in front of one pod: predicts, sends, sees first tokens, learns."""

    prior: PodSpeed
    learns: bool = True
    calibration: Calibration = field(default_factory=Calibration)
    clock: PrefillClock = field(default_factory=PrefillClock)
    waiting: dict[int, Prompt] = field(default_factory=dict)
    since_ms: float = 0.0
    """When the pod last had a first token, or began on the first of those that wait."""

    @property
    def speed(self) -> PodSpeed:
        return self.calibration.speed("class", "pod", self.prior)

    def predict_ms(self, prompt: Prompt, now_ms: float) -> float:
        """Time to first token behind everything that waits, less what is done of it."""
        queue_ms = sum(self.speed.prefill_ms(*one) for one in self.waiting.values())
        done_ms = now_ms - self.since_ms if self.waiting else 0.0
        return max(queue_ms - done_ms, 0.0) + self.speed.prefill_ms(*prompt)

    def send(self, number: int, prompt: Prompt, now_ms: float) -> None:
        if not self.waiting:
            self.since_ms = now_ms
        self.waiting[number] = prompt
        self.clock.sent(number, *prompt, now_ms / 1000)

    def first_token(self, number: int, now_ms: float) -> None:
        self.since_ms = now_ms
        del self.waiting[number]
        if (seen := self.clock.first_token(number, now_ms / 1000)) and self.learns:
            self.calibration.observe_prefill("class", "pod", self.prior, seen)


def arrivals(random: Random, speed: PodSpeed, load: float, requests: int) -> list[tuple[float, Prompt]]:
    """Poisson arrivals whose prefill keeps the pod busy for that share of the time."""
    prompts = [a_prompt(random) for _ in range(requests)]
    mean_ms = sum(speed.prefill_ms(*one) for one in prompts) / requests
    now_ms, found = 0.0, []
    for prompt in prompts:
        now_ms += random.expovariate(load / mean_ms)
        found.append((now_ms, prompt))
    return found


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
@pytest.mark.parametrize(("load", "most"), [(0.3, 0.1), (0.7, 0.1), (1.3, 0.15)])
@pytest.mark.parametrize("seed", range(3))
def test_it_learns_from_a_pod_with_a_queue(load: float, most: float, factor: float, seed: int) -> None:
    """200 requests, first come first served, one after the other, even where the queue only grows."""
    random = Random(seed)
    learner = Learner(scaled(TRUE, factor))
    free_ms = 0.0
    due: list[tuple[float, int, Prompt | None]] = []
    for number, (now_ms, prompt) in enumerate(arrivals(random, TRUE, load, 200)):
        free_ms = max(now_ms, free_ms) + TRUE.prefill_ms(*prompt) * noise(random)
        heapq.heappush(due, (now_ms, number, prompt))
        heapq.heappush(due, (free_ms, number, None))
    while due:
        now_ms, number, sent = heapq.heappop(due)
        if sent:
            learner.send(number, sent, now_ms)
        else:
            learner.first_token(number, now_ms)
    assert error(learner.speed, TRUE) < most


def drive(learner: Learner, random: Random, load: float, requests: int) -> list[tuple[float, float]]:
    """(predicted, actual) times on a pod that batches, chunks prompts and decodes in the same steps."""
    pod = VirtualPod(VirtualPodConfig(speed=LLAMA_70B, kv_tokens=2_000_000), 16)
    due = list(enumerate(arrivals(random, LLAMA_70B, load, requests)))[::-1]
    sent: dict[int, tuple[float, float]] = {}
    found = []
    while due or pod.wake_ms < math.inf:
        now_ms = pod.wake_ms
        if due and due[-1][1][0] <= now_ms:
            number, (now_ms, (n, p)) = due.pop()
            sent[number] = now_ms, learner.predict_ms((n, p), now_ms)
            learner.send(number, (n, p), now_ms)
            pod.submit(Job(number, TrafficRequest(n, random.randrange(1, 400), (), 0), p), now_ms)
            if pod.wake_ms < math.inf:
                continue
        for job in pod.advance(now_ms).started:
            learner.first_token(job.tag, now_ms)
            sent_ms, predicted_ms = sent[job.tag]
            found.append((predicted_ms, now_ms - sent_ms))
    return found


def mean_error(times: list[tuple[float, float]]) -> float:
    return sum(abs(predicted / took - 1) for predicted, took in times) / len(times)


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
@pytest.mark.parametrize("load", [0.2, 0.7])
def test_it_predicts_first_tokens_of_a_pod_that_batches_and_decodes(load: float, factor: float) -> None:
    """Better than the pod's own coefficients would, which know nothing of its neighbours in a step."""
    learner = Learner(scaled(LLAMA_70B, factor))
    learnt = mean_error(drive(learner, Random(5), load, 500)[200:])
    exact = Learner(LLAMA_70B, learns=False)
    assert learnt < 0.25
    assert learnt < mean_error(drive(exact, Random(5), load, 500)[200:])


# --- classes and pods ---


def teach(calibration: Calibration, speeds: dict[str, PodSpeed], rounds: int, random: Random) -> None:
    """Each of these pods computes that number of prompts."""
    for _ in range(rounds):
        for pod, speed in speeds.items():
            calibration.observe_prefill("class", pod, TRUE, alone(speed, random))


def own_fits(calibration: Calibration) -> set[str]:
    return {row.pod for row in calibration.rows()} - {""}


def four(**different: PodSpeed) -> dict[str, PodSpeed]:
    return dict.fromkeys("abcd", TRUE) | different


def test_a_new_pod_has_the_speed_of_its_class() -> None:
    """And one of an unknown class that of the prior."""
    calibration, random = Calibration(), Random(1)
    prior = replace(TRUE, d0_ms=7.0, d1_ms_per_request=0.1, d2_ms_per_context_token=1e-5)
    for _ in range(200):
        calibration.observe_prefill("class", "a", prior, alone(scaled(TRUE, 2), random))
    found = calibration.speed("class", "new", prior)
    assert error(found, scaled(TRUE, 2)) < 0.1
    assert calibration.speed("other", "a", prior) is prior


def test_a_pod_that_becomes_slower_leaves_its_class_and_comes_back_when_it_recovers() -> None:
    """Both within some dozens of its requests; the others' prices are not touched."""
    calibration, random = Calibration(), Random(2)
    teach(calibration, four(), 50, random)
    assert own_fits(calibration) == set()
    slow = four(d=scaled(TRUE, 2))
    teach(calibration, slow, 60, random)
    assert own_fits(calibration) == {"d"}
    assert calibration.slowdowns() == {"d": pytest.approx(2, rel=0.15)}
    for pod, speed in slow.items():
        assert error(calibration.speed("class", pod, TRUE), speed) < 0.12
    teach(calibration, four(), 60, random)
    assert own_fits(calibration) == set()
    assert error(calibration.speed("class", "d", TRUE), TRUE) < 0.12


def test_between_leaving_and_coming_back_lies_a_gap() -> None:
    """A pod that differs by 18 % stays where it is, in its class or out of it."""
    calibration, random = Calibration(), Random(3)
    teach(calibration, four(), 50, random)
    teach(calibration, four(d=scaled(TRUE, 1.18)), 60, random)
    assert own_fits(calibration) == set()
    teach(calibration, four(d=scaled(TRUE, 2)), 60, random)
    teach(calibration, four(d=scaled(TRUE, 1.18)), 60, random)
    assert own_fits(calibration) == {"d"}


@pytest.mark.parametrize("pods", [1, 2, 4])
def test_a_class_that_changes_as_a_whole_stays_one(pods: int) -> None:
    """Most pods cannot be exceptions: it learns from all of them."""
    calibration, random = Calibration(), Random(4)
    names = "abcd"[:pods]
    teach(calibration, dict.fromkeys(names, TRUE), 200 // pods, random)
    teach(calibration, dict.fromkeys(names, scaled(TRUE, 2)), 150, random)
    assert own_fits(calibration) == set()
    assert error(calibration.speed("class", "new", TRUE), scaled(TRUE, 2)) < 0.1


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
@pytest.mark.parametrize(("pods", "liars"), [("abcd", "a"), ("abcdefgh", "a"), ("abcdefgh", "abc")])
def test_pods_that_are_observed_more_often_have_one_vote_each(pods: str, liars: str, factor: float) -> None:
    """Ten times as often as the others, from the first observation on: the others keep their own speed."""
    calibration, random = Calibration(), Random(11)
    different = dict.fromkeys(liars, scaled(TRUE, factor))
    for _ in range(100):
        teach(calibration, different, 9, random)
        teach(calibration, dict.fromkeys(pods, TRUE) | different, 1, random)
    assert own_fits(calibration) == set(liars)
    assert error(calibration.speed("class", "new", TRUE), TRUE) < 0.12
    assert all(error(calibration.speed("class", pod, TRUE), TRUE) < 0.12 for pod in set(pods) - set(liars))


def test_no_pod_leaves_a_class_that_is_still_being_learnt() -> None:
    """That the prior is wrong is not the pods' difference."""
    calibration, random = Calibration(), Random(9)
    teach(calibration, dict.fromkeys("bcd", scaled(TRUE, 3)), 1, random)
    for _ in range(60):
        teach(calibration, {"a": scaled(TRUE, 3)}, 1, random)
        assert own_fits(calibration) == set()


@pytest.mark.parametrize("returns", [True, False])
def test_pods_that_returned_or_are_removed_do_not_count_as_away(returns: bool) -> None:
    """So that half of the others may leave, as soon as they differ."""
    calibration, random = Calibration(), Random(2)
    teach(calibration, four(), 50, random)
    teach(calibration, four(d=scaled(TRUE, 2)), 60, random)
    if returns:
        teach(calibration, four(), 60, random)
    else:
        calibration.forget("class", "d")
        teach(calibration, {"d": TRUE}, 1, random)
    teach(calibration, four(a=scaled(TRUE, 3), b=scaled(TRUE, 3)), 9, random)
    assert own_fits(calibration) == {"a", "b"}


def test_a_pod_that_is_gone_is_forgotten() -> None:
    """One of the same name starts in the class again."""
    calibration, random = Calibration(), Random(2)
    teach(calibration, four(), 50, random)
    teach(calibration, four(d=scaled(TRUE, 2)), 60, random)
    calibration.forget("class", "d")
    calibration.forget("class", "never there")
    calibration.forget("never there", "d")
    assert own_fits(calibration) == set()
    assert calibration.speed("class", "d", TRUE) == calibration.speed("class", "a", TRUE)


def test_another_prior_starts_anew() -> None:
    """Somebody corrected the configuration: what was learnt under the old one does not stand against it."""
    calibration, random = Calibration(), Random(1)
    teach(calibration, {"a": scaled(TRUE, 2)}, 50, random)
    corrected = scaled(TRUE, 5)
    assert calibration.speed("class", "a", corrected) is corrected
    calibration.observe_prefill("class", "a", corrected, alone(corrected, random))
    assert calibration.speed("class", "a", TRUE) is TRUE


@pytest.mark.parametrize("elapsed_ms", [0.0, -1.0, 1e-9, 1e12, math.inf, math.nan])
def test_what_cannot_be_true_is_left_out(elapsed_ms: float) -> None:
    """Times of zero or of hours, and windows without work."""
    calibration = Calibration()
    calibration.observe_prefill("class", "a", TRUE, PrefillObservation(1, 100, 10_000, elapsed_ms))
    calibration.observe_prefill("class", "a", TRUE, PrefillObservation(1, -5, 10_000, 10.0))
    calibration.observe_prefill("class", "a", TRUE, PrefillObservation(0, 0, 0, 10.0))
    calibration.observe_transfer("link", LINK, TransferObservation(1e6, 0, elapsed_ms))
    assert list(calibration.rows()) == []


def test_a_prior_of_nothing_can_still_be_learnt() -> None:
    """A coefficient that the configuration leaves at 0 counts as a very small one."""
    calibration, random, prior = Calibration(), Random(1), replace(TRUE, c0_ms=0.0, c2_ms_per_token2=0.0)
    for _ in range(300):
        calibration.observe_prefill("class", "a", prior, alone(TRUE, random))
    assert error(calibration.speed("class", "a", prior), TRUE) < 0.1


# --- links ---


@pytest.mark.parametrize(("t0", "bandwidth"), [(5.0, 1.0), (1.0, 3.0), (1.0, 1 / 3), (1 / 5, 1 / 3), (4.0, 2.0)])
def test_links_are_learnt_by_kind(t0: float, bandwidth: float) -> None:
    """Start and bandwidth, with concurrent transfers of the sender, with 10 % of noise and 3 % of outliers."""
    calibration, random = Calibration(), Random(6)
    true = replace(LINK, t0_ms=LINK.t0_ms * t0, bytes_per_ms=LINK.bytes_per_ms * bandwidth)
    for _ in range(200):
        kv_bytes, others = math.exp(random.uniform(math.log(2e7), math.log(5e9))), random.choice([0, 0, 1, 3])
        took_ms = (true.t0_ms + kv_bytes * (1 + others) / true.bytes_per_ms) * noise(random)
        calibration.observe_transfer("same_rack", LINK, TransferObservation(kv_bytes, others, took_ms))
    found = calibration.link("same_rack", LINK)
    assert found.kind == "same_rack"
    for kv_bytes in (2e7, 1e8, 1e9, 5e9):
        assert found.transfer_ms(kv_bytes) == pytest.approx(true.transfer_ms(kv_bytes), rel=0.12)
    assert calibration.link("elsewhere", LINK) is LINK


# --- kept, shared, shown ---


def known() -> Calibration:
    calibration, random = Calibration(), Random(7)
    teach(calibration, {"a": scaled(TRUE, 2)}, 30, random)
    calibration.observe_transfer("same_rack", LINK, TransferObservation(1e9, 0, 200.0))
    return calibration


def test_what_is_dumped_is_what_is_loaded() -> None:
    """Classes and links, to the last bit."""
    loaded = Calibration()
    loaded.load(known().dump())
    assert loaded.dump() == known().dump()
    assert loaded.speed("class", "a", TRUE) == known().speed("class", "a", TRUE) != TRUE
    assert loaded.link("same_rack", LINK) == known().link("same_rack", LINK) != LINK


def test_only_a_fit_that_has_seen_more_replaces_our_own() -> None:
    """Both begin with the same prior."""
    calibration, random = Calibration(), Random(8)
    teach(calibration, {"a": TRUE}, 40, random)
    ours = calibration.speed("class", "a", TRUE)
    calibration.load(known().dump())
    assert calibration.speed("class", "a", TRUE) == ours
    assert calibration.link("same_rack", LINK) != LINK
    young, other = Calibration(), Calibration()
    teach(young, {"a": TRUE}, 20, random)
    young.load(known().dump())
    assert young.speed("class", "a", TRUE) == known().speed("class", "a", TRUE)
    other.observe_prefill("class", "a", scaled(TRUE, 9), alone(TRUE, random))
    kept = other.speed("class", "a", scaled(TRUE, 9))
    other.load(known().dump())
    assert other.speed("class", "a", scaled(TRUE, 9)) == kept


def _tampered(**changes: object) -> bytes:
    state = msgspec.msgpack.decode(known().dump())
    state["classes"]["class"] |= changes
    return msgspec.msgpack.encode(state)


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xc1",
        b"garbage",
        msgspec.msgpack.encode(None),
        msgspec.msgpack.encode({"version": VERSION + 1, "classes": {}, "links": {}}),
        msgspec.msgpack.encode({"version": VERSION, "classes": {"class": 5}, "links": {}}),
        known().dump()[:-3],
        _tampered(error_after=math.nan),
        _tampered(shares=[-1.0, 1.0, 1.0]),
        _tampered(evidence=10**9),
        _tampered(prior=[0.0, 1.0, 1.0]),
        _tampered(prior=[1.0, 1.0]),
        _tampered(log_coefficients=[math.nan, 0.0, 0.0]),
        _tampered(covariance=[[-1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]),
    ],
)
def test_what_is_not_a_dump_of_this_version_is_refused_and_changes_nothing(value: bytes) -> None:
    """Always with the same error class."""
    calibration = known()
    before = calibration.dump()
    with pytest.raises(UnreadableCalibration):
        calibration.load(value)
    assert calibration.dump() == before


@given(st.binary(max_size=40), st.integers(0, 400))
def test_garbage_raises_nothing_else(patch: bytes, at: int) -> None:
    """With any bytes overwritten, the result is a speed."""
    dumped = known().dump()
    calibration = Calibration()
    try:
        calibration.load(dumped[:at] + patch + dumped[at + len(patch) :])
    except UnreadableCalibration:
        return
    assert 0 < calibration.speed("class", "a", TRUE).prefill_ms(1000) < math.inf


def test_every_coefficient_has_a_row() -> None:
    """With what metrics show of it."""
    rows = {(row.subject, row.pod, row.coefficient): row for row in known().rows()}
    speed, link = known().speed("class", "a", TRUE), known().link("same_rack", LINK)
    assert {key: row.value for key, row in rows.items()} == {
        **{("class", "", name): value for name, value in zip(asdict(speed), speed.coefficients, strict=False)},
        ("same_rack", "", "t0_ms"): link.t0_ms,
        ("same_rack", "", "bytes_per_ms"): link.bytes_per_ms,
    }
    row: CalibrationRow = rows["class", "", "c1_ms_per_token"]
    assert row.confidence > 0.8
    assert row.error_after < 0.6 * row.error_before


@pytest.mark.parametrize(("age_s", "steps", "elapsed_ms"), [(0.4, 2.0, 500.0), (0.6, 1.5, 100.0)])
def test_a_step_that_began_too_long_ago_counts_as_unobserved(age_s: float, steps: float, elapsed_ms: float) -> None:
    """The window then begins with the prompt, and half of a step counts."""
    clock, decoding = PrefillClock(), ConcurrentDecode(3, 300)
    clock.sent("a", 100, 0, 10.0, decoding, 10.0 - age_s)
    seen = clock.first_token("a", 10.1, decoding)
    assert seen is not None
    assert seen.steps == pytest.approx(steps)
    assert seen.elapsed_ms == pytest.approx(elapsed_ms)


def test_a_window_without_decodes_begins_when_its_prompt_is_sent() -> None:
    """A step that began before has ended: nobody decodes."""
    clock = PrefillClock()
    clock.sent("a", 100, 0, 5.0, ConcurrentDecode(0, 0), step_began_s=4.99)
    assert clock.first_token("a", 5.1) == PrefillObservation(1, 100, 10_000, pytest.approx(100.0))  # type: ignore[arg-type]
