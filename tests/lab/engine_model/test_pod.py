"""The token pod: which requests run in a step, how long it takes, and its results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.engine_model.pod import PodStep, SimPod, SimPodConfig, SimRequest
from loadtest.engine_model.scheduler import step_ms
from router.hashing import token_array
from router.types import BlocksRemoved, BlocksStored, PodLoad
from tests.kit.scenes import LLAMA_8B


def pod_of(num_blocks: int = 64, **limits: Any) -> SimPod:
    return SimPod(SimPodConfig(speed=LLAMA_8B, num_blocks=num_blocks, block_size_tokens=4, **limits))


def request(name: str, prompt: Sequence[int], output_tokens: int = 1) -> SimRequest:
    return SimRequest(id=name, prompt=token_array(prompt), output=[900 + i for i in range(output_tokens)])


def step_of(pod: SimPod) -> PodStep:
    assert pod.start_step() is not None
    return pod.end_step()


def drain(pod: SimPod, limit: int = 500) -> list[PodStep]:
    """Step until there is nothing left to do."""
    steps: list[PodStep] = []
    while pod.start_step() is not None:
        steps.append(pod.end_step())
        assert len(steps) < limit
    return steps


@given(st.integers(1, 300), st.integers(1, 300))
def test_a_lone_prefill_takes_exactly_prefill_ms(first_tokens: int, tokens: int) -> None:
    """T_prefill(n, p), where p tokens of the previous prompt are cached."""
    pod = pod_of(256)
    for prompt_tokens in (first_tokens, tokens):
        pod.submit(request("r", range(prompt_tokens)))
        step = step_of(pod)
        assert step.finished == ("r",)
        assert step.duration_ms == pytest.approx(LLAMA_8B.prefill_ms(prompt_tokens, step.started["r"]))


def test_a_decode_step_pays_for_its_requests_and_their_context() -> None:
    """d0 + d1 batch + d2 sum of contexts, and a chunk in the same step adds its own part without c0."""
    decodes = 6.3 + 2 * 0.01 + 300 * 4.2e-5
    assert step_ms(LLAMA_8B, 2, 300, []) == pytest.approx(decodes)
    assert step_ms(LLAMA_8B, 2, 300, [(50, 30)]) == pytest.approx(decodes + LLAMA_8B.prefill_ms(80, 50) - 0.8)


def test_a_decode_context_is_the_computed_tokens() -> None:
    """The second token of a 10-token prompt reads 10 tokens of KV."""
    pod = pod_of()
    pod.submit(request("r", range(10), 2))
    _, decode = drain(pod)
    assert decode.duration_ms == pytest.approx(6.3 + 0.01 + 10 * 4.2e-5)


def test_every_step_gives_each_decoding_request_one_token() -> None:
    """The first token comes with the prefill; the answer ends with its last token."""
    pod = pod_of()
    pod.submit(request("a", range(10), 3))
    pod.submit(request("b", range(100, 110), 2))
    steps = drain(pod)
    assert [step.emitted for step in steps] == [("a", "b"), ("a", "b"), ("a",)]
    assert [step.finished for step in steps] == [(), ("b",), ("a",)]
    assert [dict(step.started) for step in steps] == [{"a": 0, "b": 0}, {}, {}]


def test_a_prompt_beyond_the_budget_is_computed_in_chunks() -> None:
    """The budget of a step goes to decodes first; the chunk gets the rest."""
    pod = pod_of(step_budget_tokens=8)
    pod.submit(request("d", range(4), 9))
    step_of(pod)
    pod.submit(request("p", range(50, 66)))
    steps = drain(pod)
    assert [step.emitted for step in steps[:3]] == [("d",), ("d",), ("d", "p")]
    assert steps[0].duration_ms == pytest.approx(step_ms(LLAMA_8B, 1, 4, [(0, 7)]))


def test_no_request_overtakes_the_head_of_the_queue() -> None:
    """A short prompt waits behind a long one that does not fit, even if it would fit itself."""
    pod = pod_of(num_blocks=8)
    pod.submit(request("running", range(20), 4))
    pod.submit(request("long", range(100, 120)))
    pod.submit(request("short", range(200, 204)))
    step_of(pod)
    assert pod.load == PodLoad(running=1, waiting=2, kv_usage=5 / 8)
    order = [request_id for step in drain(pod) for request_id in step.started]
    assert order == ["long", "short"]


def test_max_num_seqs_limits_the_running_requests() -> None:
    """The next one starts when one has left."""
    pod = pod_of(max_num_seqs=1)
    pod.submit(request("a", range(4), 2))
    pod.submit(request("b", range(50, 54)))
    assert [step.emitted for step in drain(pod)] == [("a",), ("a",), ("b",)]


def test_when_blocks_run_out_the_youngest_is_preempted_and_recomputed() -> None:
    """No token is lost, the oldest never waits, and the preempted request is the next to run."""
    pod = pod_of(num_blocks=4)
    for name, prompt in (("old", range(7)), ("young", range(50, 57)), ("later", range(70, 77))):
        pod.submit(request(name, prompt, 6))
    steps = drain(pod)
    assert Counter(r for step in steps for r in step.emitted) == {"old": 6, "young": 6, "later": 6}
    assert [r for step in steps for r in step.finished] == ["old", "young", "later"]
    assert pod.preemptions == 1 and pod.counters.generation_tokens == 18
    assert pod.counters.prompt_tokens == 21


def test_a_step_that_preempts_admits_no_request() -> None:
    """Even if the preempted request would fit again at once, on the blocks of an equal prompt."""
    pod = pod_of(num_blocks=6)
    pod.submit(request("old", range(8), 8))
    pod.submit(request("twin", range(8), 8))
    while not pod.preemptions:
        step = step_of(pod)
    assert (step.emitted, step_of(pod).emitted) == (("old",), ("old", "twin"))


def test_blocks_are_matchable_when_their_step_ends_and_not_before() -> None:
    """Two equal prompts in one step are both computed; the next one finds their blocks."""
    pod = pod_of()
    pod.submit(request("a", range(9)))
    pod.submit(request("b", range(9)))
    pod.start_step()
    pod.submit(request("c", range(9)))
    assert dict(pod.end_step().started) == {"a": 0, "b": 0}
    assert [dict(step.started) for step in drain(pod)] == [{"c": 8}]


def test_the_next_turn_finds_the_generated_blocks() -> None:
    """All but the last token of an answer is cached: its own KV was never computed."""
    pod = pod_of()
    pod.submit(request("turn 1", range(6), 7))
    drain(pod)
    pod.submit(request("turn 2", [*range(6), *(900 + i for i in range(7)), 1, 2]))
    assert dict(drain(pod)[0].started) == {"turn 2": 12}
    assert (pod.counters.prefix_cache_hits, pod.counters.prompt_tokens) == (12, 21)


def test_a_request_cancelled_during_a_step_takes_no_part_in_it() -> None:
    """Its blocks are free at once, and the step neither emits nor stores for it."""
    pod = pod_of()
    pod.submit(request("a", range(9), 2))
    pod.start_step()
    assert pod.cancel("a") and pod.load == PodLoad()
    step = pod.end_step()
    assert (step.emitted, step.events) == ((), ())
    assert pod.start_step() is None and not pod.cancel("a")


def test_a_waiting_request_can_be_cancelled() -> None:
    """It leaves the queue, and those after it move up."""
    pod = pod_of(max_num_seqs=1)
    for name in "abc":
        pod.submit(request(name, range(4)))
    pod.cancel("b")
    assert [r for step in drain(pod) for r in step.finished] == ["a", "c"]


def test_a_request_that_could_never_run_is_refused() -> None:
    """Longer than the whole cache, or with an id in use."""
    pod = pod_of(num_blocks=2)
    with pytest.raises(ValueError, match="do not fit"):
        pod.submit(request("a", range(8)))
    pod.submit(request("a", range(7)))
    with pytest.raises(ValueError, match="already here"):
        pod.submit(request("a", range(7)))


def test_a_step_is_ended_before_the_next_one_starts() -> None:
    """Starting twice, or ending without a start, raises."""
    pod = pod_of()
    with pytest.raises(RuntimeError):
        pod.end_step()
    pod.submit(request("a", range(4)))
    pod.start_step()
    with pytest.raises(RuntimeError):
        pod.start_step()


WORKLOAD = st.lists(
    st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=12), st.integers(1, 8), st.booleans()), max_size=14
)


@given(WORKLOAD)
def test_under_any_load_answers_are_complete_and_events_match_the_cache(
    workload: list[tuple[list[int], int, bool]],
) -> None:
    """A tiny pool, a request a step, some cancelled during a step: no block leaks and no token is lost."""
    pod = SimPod(SimPodConfig(speed=LLAMA_8B, num_blocks=10, block_size_tokens=2, step_budget_tokens=8, max_num_seqs=3))
    index, emitted = Counter[int](), Counter[str]()
    wanted: dict[str, int] = {}
    pending = [(f"r{i}", *one) for i, one in enumerate(workload)]
    while pending or pod.load.running or pod.load.waiting:
        leaver = ""
        if pending:
            name, prompt, output_tokens, leaves = pending.pop(0)
            pod.submit(request(name, prompt, output_tokens))
            leaver = name if leaves else ""
            wanted |= {} if leaves else {name: output_tokens}
        assert pod.start_step() is not None
        pod.cancel(leaver)
        step = pod.end_step()
        emitted.update(step.emitted)
        for event in step.events:
            if isinstance(event, BlocksStored):
                index.update(event.block_hashes)
            elif isinstance(event, BlocksRemoved):
                index.subtract(event.block_hashes)
        assert +index == Counter(pod.cache.copies) and min(index.values(), default=0) >= 0
        assert pod.cache.free_blocks + pod.cache.used_blocks == 10
    assert emitted == wanted
    assert pod.cache.free_blocks == 10


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=16), max_size=12))
def test_cached_tokens_come_from_earlier_prompts(prompts: list[list[int]]) -> None:
    """As in a naive model: the longest common run of blocks with an earlier prompt, without the last token."""
    pod = pod_of(num_blocks=256)
    seen: set[tuple[int, ...]] = set()
    for prompt in prompts:
        naive = 0
        while naive + 4 < len(prompt) and tuple(prompt[: naive + 4]) in seen:
            naive += 4
        pod.submit(request("r", prompt))
        (step,) = drain(pod)
        assert step.started["r"] == naive
        seen |= {tuple(prompt[:end]) for end in range(4, len(prompt) + 1, 4)}


def handed(name: str, prompt: Sequence[int], loaded_tokens: int) -> SimRequest:
    return replace(request(name, prompt), loaded_tokens=loaded_tokens)


def test_transferred_kv_is_announced_and_not_computed() -> None:
    """Only the last token is computed; the full blocks belong to the pod from then on."""
    pod = pod_of()
    pod.submit(handed("a", range(10), 10))
    step = step_of(pod)
    assert step.duration_ms == pytest.approx(LLAMA_8B.prefill_ms(10, 9))
    (stored,) = step.events
    assert isinstance(stored, BlocksStored) and list(stored.tokens) == list(range(8))
    assert step.started == {"a": 0}
    assert (pod.counters.prefix_cache_hits, pod.counters.external_prefix_cache_hits) == (0, 9)
    pod.submit(request("b", range(10)))
    assert drain(pod)[0].started == {"b": 8}


def test_transferred_kv_counts_only_beyond_the_cache() -> None:
    """The pod's own blocks are used first."""
    pod = pod_of()
    for one in (request("a", range(10)), handed("b", range(20), 13), handed("c", range(10), 4)):
        pod.submit(one)
        drain(pod)
    assert (pod.counters.external_prefix_cache_hits, pod.counters.external_prefix_cache_queries) == (5, 10 + 12 + 2)


def test_a_preempted_request_loses_transferred_kv() -> None:
    """It computes its prompt and its five emitted tokens, none of which are cached any more."""
    pod = pod_of(num_blocks=6)
    pod.submit(request("a", range(8), 14))
    pod.submit(replace(handed("b", range(100, 108), 8), output=list(range(12))))
    steps = drain(pod)
    assert pod.preemptions == 1
    alone = next(at for at, step in enumerate(steps) if "a" in step.finished) + 1
    assert steps[alone].duration_ms == pytest.approx(LLAMA_8B.prefill_ms(8 + 5))
    assert pod.counters.external_prefix_cache_hits == 7


def test_pinned_blocks_stay_in_use_until_they_are_released() -> None:
    """By `detach` and `release`, or by `cancel`; the request itself has finished."""
    pod = pod_of()
    for name in "ab":
        pod.submit(replace(request(name, range(10)), pinned=True))
    drain(pod)
    assert (pod.load.running, pod.cache.used_blocks) == (0, 6)
    table = pod.detach("a")
    assert table.computed_tokens == 10 and pod.cache.used_blocks == 6
    assert not pod.cancel("a")
    pod.cache.release(table)
    assert pod.cancel("b") and not pod.cancel("b")
    assert pod.cache.used_blocks == 0
