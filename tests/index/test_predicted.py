"""Dispatched prompts as a cache, compared with a plain list."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.index import predicted
from router.index.predicted import Checkpoints, PredictedIndex, Prediction
from router.types import BlockChange, PodId, Tier
from tests.index.dispatches import record

TTL_S = 10.0


def blocks(index: PredictedIndex, hashes: list[int], now_s: float = 0.0) -> dict[PodId, int]:
    """Matched blocks by pod."""
    return {pod: tiers[0] for pod, tiers in index.match(hashes, now_s).items()}


def recorded(*prompts: list[int], capacity_blocks: int | None = None) -> PredictedIndex:
    index = PredictedIndex()
    for at_s, prompt in enumerate(prompts):
        record(index, "a", prompt, float(at_s), ttl_s=TTL_S, capacity_blocks=capacity_blocks)
    return index


def test_a_dispatched_prompt_matches_until_it_expires() -> None:
    """In the GPU tier of its pod."""
    index = recorded([1, 2, 3])
    assert index.match([1, 2, 9], 9.9) == {"a": (2, 0, 0, 0)}
    assert blocks(index, [1, 2, 3], 10.0) == {} and len(index) == 0


def test_a_dispatch_renews_only_its_own_blocks() -> None:
    index = recorded([1, 2, 3], [1, 2, 4])
    assert blocks(index, [1, 2, 3], 10.5) == {"a": 2}


def test_a_match_renews_nothing() -> None:
    index = recorded([1, 2], [3])
    index.match([1, 2], 9.0)
    assert blocks(index, [1, 2], 10.0) == {}


def test_a_full_cache_evicts_the_least_recently_used() -> None:
    """Blocks of one prompt go from its end."""
    index = recorded([1, 2, 3], [4, 5], capacity_blocks=3)
    assert blocks(index, [1, 2, 3], 1.0) == {"a": 1}
    assert blocks(index, [4, 5], 1.0) == {"a": 2}


def test_a_prompt_longer_than_the_cache_keeps_its_first_blocks() -> None:
    assert blocks(recorded([1, 2, 3, 4], capacity_blocks=2), [1, 2, 3, 4]) == {"a": 2}


def test_a_forgotten_pod_has_no_blocks() -> None:
    """Other pods keep theirs."""
    index = recorded([1, 2])
    record(index, "b", [1], 0.0, ttl_s=TTL_S)
    index.forget("a")
    index.forget("nobody")
    assert blocks(index, [1, 2]) == {"b": 1}
    record(index, "a", [1, 2], 0.0, ttl_s=TTL_S)
    assert blocks(index, [1, 2]) == {"a": 2, "b": 1}


def test_a_new_ttl_applies_to_all_blocks_of_a_pod() -> None:
    """A pod that starts to publish events needs a short one."""
    index = recorded([1], capacity_blocks=9)
    record(index, "a", [2], 0.0, ttl_s=1.0)
    assert blocks(index, [1], 0.5) == {"a": 1}
    assert blocks(index, [1], 1.0) == {}


@pytest.mark.parametrize("capacity_blocks", [None, 1_000])
def test_what_a_burst_has_sent_expires_over_several_matches(capacity_blocks: int | None) -> None:
    """One match after a silence would hold the event loop."""
    count = predicted.MAX_EXPIRED + 1
    index = recorded(*([number] for number in range(count)), capacity_blocks=capacity_blocks)
    after_s, last = count + TTL_S, [count - 1]
    assert blocks(index, [0], after_s) == {} and index.match(last) == {"a": (1, 0, 0, 0)}
    assert blocks(index, last, after_s) == {} and len(index) == 0


def test_repeated_dispatches_are_stored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stale dispatches are removed from the queue."""
    monkeypatch.setattr(predicted, "MAX_STALE_DISPATCHES", 0)
    index = recorded([1], *[[5, 6]] * 20, capacity_blocks=9)
    assert len(index._pods["a"].queue) <= 5
    assert blocks(index, [1], 20.0) == {}
    assert blocks(index, [5, 6], 29.9) == {"a": 2}
    assert blocks(index, [5, 6], 30.0) == {} and len(index) == 0


@dataclass
class NaivePod:
    """Blocks with their times, least recent first. Without a capacity, prompts that the pod announces."""

    ttl_s: float = 0.0
    entries: list[tuple[int, float]] = field(default_factory=list)
    pending: list[list[int]] = field(default_factory=list)
    """Prompts of predictions that are neither confirmed nor withdrawn."""
    announced: list[list[int]] = field(default_factory=list)
    """Those of them that the pod has announced."""
    late: list[tuple[list[int], float]] = field(default_factory=list)
    """Computed prompts that it has not announced, and until when they count."""

    def record(self, prompt: list[int], now_s: float, ttl_s: float, capacity: int | None) -> None:
        if any(prompt is one for one in self.announced):
            return
        self.ttl_s = ttl_s
        if capacity is None:
            self.late.append((prompt, now_s + ttl_s))
            return
        self.entries = [entry for entry in self.entries if entry[0] not in prompt]
        self.entries += [(block, now_s) for block in reversed(prompt)]
        self.entries = self.entries[max(0, len(self.entries) - capacity) :]

    def apply(self, blocks: list[int], *, held: bool) -> None:
        if held:
            self.announced += [prompt for prompt in self.pending if prompt[-1] in blocks]
        self.late = [(prompt, until_s) for prompt, until_s in self.late if prompt[-1] not in blocks]

    def match(self, prompt: list[int], now_s: float) -> int:
        self.entries = [(block, at_s) for block, at_s in self.entries if at_s + self.ttl_s > now_s]
        self.late = [(late, until_s) for late, until_s in self.late if until_s > now_s]
        pending = [one for one in self.pending if not any(one is announced for announced in self.announced)]
        alive = {block for block, _ in self.entries}.union(*pending, *(late for late, _ in self.late))
        run = 0
        while run < len(prompt) and prompt[run] in alive:
            run += 1
        return run


def chained(tokens: list[int]) -> list[int]:
    """Chain hashes: each identifies everything before it."""
    return list(accumulate(tokens, lambda before, token: before * 4 + token))


prompts = st.lists(st.integers(1, 3), max_size=6).map(chained)
dispatches = st.tuples(
    st.sampled_from(["a", "b"]),
    prompts,
    st.integers(0, 4),
    st.sampled_from([1.0, 3.0, 8.0]),
    st.sampled_from([None, 2, 6]),
)


@given(st.lists(dispatches, max_size=25), prompts)
def test_it_matches_as_a_plain_list_does(
    steps: list[tuple[PodId, list[int], int, float, int | None]], asked: list[int]
) -> None:
    """For any dispatches, pauses, TTLs and capacities; an empty prompt stands for a removed pod."""
    index, naive, now_s = PredictedIndex(), dict[PodId, NaivePod](), 0.0
    for pod, prompt, pause_s, ttl_s, capacity in steps:
        now_s += pause_s
        if prompt:
            record(index, pod, prompt, now_s, ttl_s=ttl_s, capacity_blocks=capacity)
            naive.setdefault(pod, NaivePod()).record(prompt, now_s, ttl_s, capacity)
        else:
            index.forget(pod)
            naive.pop(pod, None)
        for question in (asked, prompt):
            expected = {name: run for name, model in naive.items() if (run := model.match(question, now_s))}
            assert blocks(index, question, now_s) == expected


def test_a_prediction_counts_until_it_is_withdrawn() -> None:
    """A withdrawn one leaves what was there before, and what other requests predict."""
    index = recorded([1, 2])
    first, second = (index.begin("a", [1, 2, 3, end], ttl_s=TTL_S) for end in (4, 5))
    assert (blocks(index, [1, 2, 3, 4]), blocks(index, [1, 2, 3, 5])) == ({"a": 4}, {"a": 4})
    index.withdraw(first)
    assert (blocks(index, [1, 2, 3, 4]), blocks(index, [1, 2, 3, 5])) == ({"a": 3}, {"a": 4})
    index.withdraw(second)
    assert blocks(index, [1, 2, 3, 4]) == {"a": 2}


def test_a_withdrawn_prediction_renews_nothing() -> None:
    """Failing requests keep no block alive."""
    index = recorded([1, 2])
    index.withdraw(index.begin("a", [1, 2], ttl_s=TTL_S))
    assert blocks(index, [1, 2], TTL_S) == {}


def test_a_confirmed_prediction_expires_like_any_other() -> None:
    """From its confirmation on; confirming or withdrawing it again changes nothing."""
    index = PredictedIndex()
    prediction = index.begin("a", [1, 2], ttl_s=TTL_S)
    assert blocks(index, [1, 2], 100.0) == {"a": 2}
    index.confirm(prediction, 100.0)
    index.confirm(prediction, 105.0)
    index.withdraw(prediction)
    assert blocks(index, [1, 2], 109.9) == {"a": 2}
    assert blocks(index, [1, 2], 110.0) == {} and len(index) == 0


def test_what_a_pod_computes_are_the_blocks_of_pending_prompts() -> None:
    index = PredictedIndex()
    one = index.begin("a", [1, 2, 3], ttl_s=TTL_S, capacity_blocks=9)
    asked = [1, 2, 3, 4], [1, 2, 3], [1, 9], [9]
    assert [index.computing("a", hashes) for hashes in asked] == [3, 3, 1, 0]
    assert index.computing("b", [1, 2, 3]) == 0
    index.confirm(one, 0.0)
    assert index.computing("a", [1, 2, 3]) == 0


def test_the_checkpoints_of_a_prediction_end_with_it() -> None:
    index = PredictedIndex()
    one = index.begin("a", [1, 2, 3], ttl_s=TTL_S, ends=[2])
    assert index.checkpoints.match([1, 2, 3]) == {"a": (2, 0, 0, 0)}
    index.withdraw(one)
    assert not index.checkpoints.match([1, 2, 3]) and not len(index.checkpoints)


def test_a_checkpoint_is_kept_until_the_last_prompt_that_has_it_ends() -> None:
    """Or until the pod announces it."""
    kept = Checkpoints()
    for pod in "aab":
        kept.begin(pod, [2])
    kept.withdraw("a", [2])
    assert set(kept.match([1, 2, 3])) == {"a", "b"}
    kept.withdraw("a", [2])
    assert kept.match([1, 2, 3]) == {"b": (2, 0, 0, 0)}
    kept.announced("b", [2])
    assert not kept.match([1, 2, 3])
    kept.withdraw("b", [2])
    assert not len(kept)


def test_a_prediction_of_a_forgotten_pod_has_no_effect() -> None:
    """It was sent to an earlier epoch of the cache."""
    index = PredictedIndex()
    prediction = index.begin("a", [1, 2], ttl_s=TTL_S)
    index.forget("a")
    again = index.begin("a", [1], ttl_s=TTL_S)
    index.confirm(prediction, 0.0)
    assert blocks(index, [1, 2]) == {"a": 1}
    index.withdraw(again)
    assert not index._runs


operations = st.one_of(
    st.tuples(st.just("begin"), st.sampled_from(["a", "b"]), prompts.filter(bool), st.sampled_from([1.0, 3.0, 8.0])),
    st.tuples(st.sampled_from(["confirm", "withdraw"]), st.integers(0, 30)),
    st.tuples(st.just("event"), st.sampled_from(["a", "b"]), prompts, st.booleans()),
    st.tuples(st.just("forget"), st.sampled_from(["a", "b"])),
)


@given(st.lists(st.tuples(operations, st.integers(0, 2)), max_size=40), st.sampled_from([None, 2, 6]), prompts)
def test_any_order_of_predictions_matches_as_plain_lists_do(
    steps: list[tuple[tuple[Any, ...], int]], capacity: int | None, asked: list[int]
) -> None:
    """Begun, confirmed, withdrawn, announced, evicted and forgotten in any order: a pod has what was confirmed, not
    evicted and not expired, and what is pending, but for what it has announced."""
    index, naive, now_s = PredictedIndex(), {"a": NaivePod(), "b": NaivePod()}, 0.0
    begun: list[tuple[Prediction, list[int]]] = []
    for (what, *facts), pause_s in steps:
        now_s += pause_s
        if what == "begin":
            pod, prompt, ttl_s = facts[0], [*facts[1]], facts[2]
            begun.append((index.begin(pod, prompt, ttl_s=ttl_s, capacity_blocks=capacity), prompt))
            naive[pod].pending.append(prompt)
        elif what == "forget":
            index.forget(facts[0])
            naive[facts[0]] = NaivePod()
        elif what == "event":
            pod, changed, is_held = facts
            index.apply(pod, BlockChange(Tier.GPU, is_held, changed))
            naive[pod].apply(changed, held=is_held)
        elif begun:
            prediction, prompt = begun[facts[0] % len(begun)]
            model = naive[prediction.pod]
            if any(prompt is one for one in model.pending):
                model.pending = [one for one in model.pending if one is not prompt]
                if what == "confirm":
                    model.record(prompt, now_s, prediction.ttl_s, capacity)
            getattr(index, what)(prediction, *([now_s] if what == "confirm" else []))
        for question in (asked, *(prompt for _, prompt in begun)):
            expected = {name: run for name, model in naive.items() if (run := model.match(question, now_s))}
            assert blocks(index, question, now_s) == expected
    for prediction, _ in begun:
        index.withdraw(prediction)
    assert len(index) == sum(len(model.entries) for model in naive.values())
    for pod in naive:
        index.forget(pod)
    assert not index._runs


def test_a_prompt_that_is_sent_again_and_again_is_remembered_once() -> None:
    """A pod that has all of it announces nothing."""
    index, prompt = PredictedIndex(), list(range(1, 100))
    for number in range(50):
        index.confirm(index.begin("a", prompt, ttl_s=TTL_S), float(number) / 10)
    assert [len(alike) for alike in index._pods["a"].open.values()] == [1]
    assert blocks(index, prompt, 14.8) == {"a": 99}
    assert blocks(index, prompt, 14.9) == {}
