"""A pod whose layers do not all need every earlier token caches what an engine caches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.simulator.layered_pod import new_pod
from loadtest.simulator.traffic import TrafficRequest
from loadtest.simulator.virtual_job import Job
from loadtest.simulator.virtual_pod import VirtualPod, VirtualPodConfig
from router.hashing import generation_seed, hash_blocks, token_array
from router.types import AttentionKind, BlockChange, Generation, LayerType
from tests.index.recorded_sessions import SESSIONS, Sent, requests
from tests.lab.simulator.test_virtual_pod import BLOCK, SPEED, ask, drive_virtual


def window(tokens: int) -> LayerType:
    return LayerType(AttentionKind.WINDOW, 0, tokens)


FULL, STATE = LayerType(AttentionKind.FULL, 0), LayerType(AttentionKind.STATE, 0)
MODELS = {
    "gpt-oss": (window(9), FULL),
    "gemma": (*[window(14)] * 3, FULL),
    "qwen3-next": (STATE, STATE, FULL),
    "full first": (FULL, window(5)),
    "two windows": (window(6), FULL, window(17)),
}
models = st.sampled_from(sorted(MODELS))


def layered(
    groups: tuple[LayerType, ...], kv_tokens: int = 100_000, block: int = BLOCK, budget: int = 32
) -> VirtualPod:
    config = VirtualPodConfig(
        speed=SPEED, kv_tokens=kv_tokens, engine_block_tokens=block, step_budget_tokens=budget, kv_groups=groups
    )
    return new_pod(config, block)


# --- recorded on engines ---

RECORDED = {
    "gemma3: 5 window groups of 128, 1 full": ((*[window(128)] * 5, FULL), 32, 10_000),
    "gpt-oss: window 128, full; turns, shared prefix, cuts": ((window(128), FULL), 32, 10_000),
    "gpt-oss, pool of 75 blocks: eviction": ((window(128), FULL), 32, 75),
    "qwen3-next: 3 mamba groups, full": ((STATE, STATE, STATE, FULL), 128, 10_000),
}


def recorded_request(sent: Sent, output: Sequence[int], block: int) -> TrafficRequest:
    seed = generation_seed(Generation(model="m", block_size_tokens=block, salt=sent.salt))
    hashes = hash_blocks(token_array(sent.prompt + list(output[:-1])), block, seed)
    return TrafficRequest(len(sent.prompt), len(output), hashes, len(sent.prompt) // block)


@pytest.mark.parametrize("session", [one for one in SESSIONS if one["name"] in RECORDED], ids=lambda one: one["name"])
def test_a_recorded_session_caches_what_the_engine_cached(session: dict[str, Any]) -> None:
    groups, block, blocks = RECORDED[session["name"]]
    pod = layered(groups, blocks * block, block, budget=8192)
    asked = [
        recorded_request(sent, step["output"], block)
        for sent, step in zip(requests(session), session["steps"], strict=True)
    ]
    cached = [drive_virtual(pod, [(at * 1e6, one)])[0][2] for at, one in enumerate(asked)]
    assert cached == [step["cached_tokens"] for step in session["steps"]]


Asked = tuple[int | None, int, int, int]
"""A prompt: the request that it begins like, the number of these tokens, more tokens, and tokens of the answer."""

# Computed by the cache manager of vLLM 0.32 (tests/live/manager_histories.py), with blocks of 16 tokens.
SMALL_POOLS: list[tuple[tuple[LayerType, ...], int, list[Asked], list[int]]] = [
    ((FULL, window(40)), 25, [(None, 0, 78, 2), (0, 60, 20, 20), (1, 85, 77, 20), (0, 71, 6, 2)], [0, 0, 64, 0]),
    ((FULL, window(40)), 17, [(None, 0, 86, 10), (0, 37, 39, 2), (0, 79, 0, 40)], [0, 0, 32]),
    ((*[window(64)] * 3, FULL), 33, [(None, 0, 59, 40), (None, 0, 64, 10), (0, 72, 1, 2)], [0, 0, 0]),
    ((window(48), FULL, window(160)), 32, [(None, 0, 73, 20), (0, 19, 78, 40), (0, 65, 28, 10)], [0, 0, 16]),
    ((window(128), FULL), 14, [(None, 0, 69, 10), (None, 0, 44, 40), (0, 18, 1, 40)], [0, 0, 0]),
    ((window(128), FULL), 25, [(None, 0, 77, 10), (None, 0, 111, 20), (0, 55, 4, 10)], [0, 0, 32]),
    (
        (*[window(64)] * 3, FULL),
        55,
        [(None, 0, 58, 10), (None, 0, 103, 10), (None, 0, 84, 10), (0, 62, 68, 2)],
        [0, 0, 0, 32],
    ),
    (
        (window(48), FULL, window(160)),
        34,
        [(None, 0, 59, 10), (None, 0, 92, 40), (0, 57, 30, 40), (2, 70, 19, 20)],
        [0, 0, 0, 64],
    ),
    (
        (STATE, STATE, STATE, FULL),
        34,
        [(None, 0, 69, 20), (0, 67, 38, 2), (None, 0, 86, 10), (2, 33, 18, 40), (0, 65, 1, 40)],
        [0, 64, 0, 0, 0],
    ),
    ((FULL, window(40)), 35, [(None, 0, 116, 40), (0, 49, 50, 40), (None, 0, 50, 20), (0, 156, 46, 2)], [0, 0, 0, 48]),
    (  # the last token of an answer begins a block
        (window(128), FULL),
        19,
        [(None, 0, 80, 1), (None, 0, 132, 8), (1, 7, 0, 7), (1, 57, 33, 8), (1, 89, 0, 8)],
        [0, 0, 0, 48, 48],
    ),
]


@pytest.mark.parametrize(("groups", "blocks", "asked", "cached"), SMALL_POOLS)
def test_a_pool_that_is_too_small_evicts_what_the_engine_evicts(
    groups: tuple[LayerType, ...], blocks: int, asked: list[Asked], cached: list[int]
) -> None:
    """Blocks that are computed again are kept twice. An answer leaves blocks of a window behind and needs new ones."""
    pod, known, found = layered(groups, blocks * 16, 16, budget=8192), list[list[int]](), list[int]()
    for at, (source, kept, more, answer) in enumerate(asked):
        start = known[source][:kept] if source is not None else []
        prompt, output = start + [1000 * at + one for one in range(more)], [1000 * at + 500] * answer
        known.append(prompt + output)
        request = recorded_request(Sent(prompt, "", 0, []), output, 16)
        found.append(drive_virtual(pod, [(at * 1e6, request)])[0][2])
    assert found == cached


# --- a naive model ---


def needed_blocks(group: LayerType) -> int:
    """The blocks of a window or a state that a hit needs at its end."""
    return 1 if group.kind is AttentionKind.STATE else math.ceil((group.span_tokens - 1) / BLOCK)


@dataclass
class NaiveCache:
    """The blocks that an engine holds, by group. It never evicts."""

    groups: tuple[LayerType, ...]
    held: list[set[int]]

    def can_end(self, at: int, blocks: Sequence[int]) -> bool:
        firsts = (0 if group == FULL else max(at - needed_blocks(group), 0) for group in self.groups)
        return all(held.issuperset(blocks[first:at]) for first, held in zip(firsts, self.held, strict=True))

    def hit_blocks(self, request: TrafficRequest) -> int:
        most = (request.prompt_tokens - 1) // BLOCK
        return max(at for at in range(most + 1) if self.can_end(at, request.blocks))

    def full_blocks(self, request: TrafficRequest) -> int:
        held, most = self.held[self.groups.index(FULL)], (request.prompt_tokens - 1) // BLOCK
        return max(at for at in range(most + 1) if held.issuperset(request.blocks[:at]))

    def serve(self, request: TrafficRequest) -> int:
        """Returns the cached tokens. The last token of an answer is never computed."""
        hit, junction = self.hit_blocks(request), self.full_blocks(request)
        for group, held in zip(self.groups, self.held, strict=True):
            for end in {(request.prompt_tokens - 1) // BLOCK, junction} if group != FULL else ():
                held.update(request.blocks[max(end - needed_blocks(group), hit, 0) : end])
            if group == FULL:
                held.update(request.blocks[: (request.prompt_tokens + request.output_tokens - 1) // BLOCK])
        return hit * BLOCK


prompts = st.tuples(st.integers(1, 2), st.integers(1, 60), st.integers(1, 60), st.integers(0, 2)).map(
    lambda shape: [shape[0]] * shape[1] + [10 * shape[0] + shape[3]] * shape[2]
)
turns = st.tuples(prompts, st.integers(1, 20), st.booleans())


def sent(history: list[tuple[list[int], int, bool]]) -> list[TrafficRequest]:
    """Shared starts, resends and cuts; some requests are the next turn of the one before."""
    asked: list[TrafficRequest] = []
    before: list[int] = []
    for prompt, output, is_next in history:
        prompt = [*before, *prompt[-20:]] if is_next and len(before) < 120 else prompt
        asked.append(ask(prompt, output))
        before = [*prompt, *range(-output, 0)]
    return asked


histories = st.lists(turns, min_size=1, max_size=14).map(sent)


@given(models, histories)
def test_a_pod_that_never_evicts_caches_what_the_naive_rule_says(model: str, history: list[TrafficRequest]) -> None:
    """Each answer is complete before the next prompt."""
    pod, naive = layered(MODELS[model]), NaiveCache(MODELS[model], [set() for _ in MODELS[model]])
    for at, asked in enumerate(history):
        assert drive_virtual(pod, [(at * 1e6, asked)])[0][2] == naive.serve(asked)


def apply(changes: Sequence[BlockChange], held: Sequence[set[int]]) -> None:
    for change in changes:
        (held[change.layer].update if change.held else held[change.layer].difference_update)(change.blocks)


def drive(pod: VirtualPod, arrivals: Sequence[tuple[float, Job]], held: Sequence[set[int]], kv_tokens: int) -> int:
    """Send jobs, and apply the pod's changes to `held`, by type. Returns the jobs that ended."""
    due, ended = list(arrivals), 0
    while due or pod.wake_ms < math.inf:
        now_ms = min(pod.wake_ms, due[0][0] if due else math.inf)
        while due and due[0][0] <= now_ms:
            pod.submit(due.pop(0)[1], now_ms)
        progress = pod.advance(now_ms)
        apply(progress.block_changes, held)
        ended += len(progress.finished)
        assert 0 <= pod.cache.available_tokens <= kv_tokens
    return ended


def naive_of(groups: tuple[LayerType, ...], held: Sequence[set[int]]) -> NaiveCache:
    """`held` by type, full attention first."""
    types = list(dict.fromkeys(sorted(groups, key=lambda group: group != FULL)))
    return NaiveCache(groups, [held[types.index(group)] for group in groups])


@given(models, histories, st.integers(700, 1200))
def test_a_pod_that_evicts_hits_what_it_has_published(
    model: str, history: list[TrafficRequest], kv_tokens: int
) -> None:
    groups = MODELS[model]
    pod = layered(groups, kv_tokens)
    held: list[set[int]] = [set() for _ in groups]
    for at, asked in enumerate(history):
        expected = naive_of(groups, held).hit_blocks(asked) * BLOCK
        job = Job(None, asked)
        drive(pod, [(at * 1e6, job)], held, kv_tokens)
        assert job.cached_tokens == expected


jobs = st.lists(st.tuples(st.floats(0, 300), prompts, st.integers(1, 30)), min_size=1, max_size=12)


@given(models, jobs, st.integers(700, 1000))
def test_every_job_ends_and_no_memory_is_lost(
    model: str, arrivals: list[tuple[float, list[int], int]], kv_tokens: int
) -> None:
    """With concurrent jobs, preemption and eviction. At the end the pod holds what it has published."""
    pod, groups = layered(MODELS[model], kv_tokens), MODELS[model]
    held: list[set[int]] = [set() for _ in groups]
    arrivals.sort(key=lambda one: one[0])
    due = [(at_ms, Job(None, ask(prompt, output))) for at_ms, prompt, output in arrivals]
    assert drive(pod, due, held, kv_tokens) == len(due)
    assert pod.cache.available_tokens == kv_tokens
    published = pod.held_blocks()
    assert [set(change.blocks) for change in published] == held[: len(published)]


def after_one_eviction(groups: tuple[LayerType, ...]) -> tuple[int, int]:
    """A pod has computed a prompt of 11 blocks and evicts one block. Returns the type that loses it, and the tokens
    that the prompt hits then."""
    pod, asked = layered(groups), ask([1] * 45)
    drive_virtual(pod, [(0.0, asked)])
    pod.cache.allocate(pod.cache.unused_tokens + 1)
    [lost] = pod.advance(1e6).block_changes
    return lost.layer, pod.held_tokens(asked)


def test_groups_are_evicted_in_their_order_from_their_ends() -> None:
    assert after_one_eviction((window(9), FULL)) == (1, 0)
    assert after_one_eviction((FULL, window(9))) == (0, 0)
    assert after_one_eviction((FULL,)) == (0, 40)


def test_a_checkpoint_needs_all_groups_of_a_type() -> None:
    """The others still hold the block that one has evicted."""
    assert after_one_eviction(MODELS["gemma"]) == (1, 0)
    assert after_one_eviction(MODELS["qwen3-next"]) == (1, 0)
