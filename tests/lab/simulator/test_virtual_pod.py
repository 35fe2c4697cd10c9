"""The virtual pod gives the same times as the token pod."""

from __future__ import annotations

import math
from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.engine_model.pod import SimPod, SimPodConfig, SimRequest
from loadtest.simulator.traffic import TrafficRequest
from loadtest.simulator.virtual_job import Job
from loadtest.simulator.virtual_pod import VirtualPod, VirtualPodConfig
from router.types import BlockHash, PodSpeed, Tier

SPEED = PodSpeed(2.0, 0.5, 1e-3, 6.0, 0.1, 4e-3)
BLOCK = 4


def ask(prompt: list[int], output_tokens: int = 1) -> TrafficRequest:
    """A block is identified by all tokens up to its end."""
    tokens = [*prompt, *range(-output_tokens, 0)]
    blocks = [hash(tuple(tokens[: end + BLOCK])) & 2**63 - 1 for end in range(0, len(tokens) - BLOCK + 1, BLOCK)]
    return TrafficRequest(len(prompt), output_tokens, blocks, len(prompt) // BLOCK)


def virtual(kv_tokens: int = 10_000, budget: int = 32, seats: int = 4, cpu_kv_tokens: int = 0) -> VirtualPod:
    config = VirtualPodConfig(
        speed=SPEED,
        kv_tokens=kv_tokens,
        cpu_kv_tokens=cpu_kv_tokens,
        engine_block_tokens=BLOCK,
        step_budget_tokens=budget,
        max_num_seqs=seats,
    )
    return VirtualPod(config, BLOCK)


Times = dict[int, tuple[float, float, int]]
"""By job: the time of its first token, the time of its last, and its cached tokens."""


def drive_virtual(pod: VirtualPod, arrivals: list[tuple[float, TrafficRequest]]) -> Times:
    times: Times = {}
    first_ms: dict[int, float] = {}
    due = list(enumerate(arrivals))
    while due or pod.wake_ms < math.inf:
        if due and due[0][1][0] <= pod.wake_ms:
            number, (now_ms, asked) = due.pop(0)
            pod.submit(Job(number, asked), now_ms)
            if pod.wake_ms < math.inf or (due and due[0][1][0] == now_ms):
                continue
        else:
            now_ms = pod.wake_ms
        progress = pod.advance(now_ms)
        first_ms |= {job.tag: now_ms for job in progress.started}
        for job in progress.finished:
            times[job.tag] = (first_ms[job.tag], now_ms, job.cached_tokens or 0)
    return times


def drive_stepwise(arrivals: list[tuple[float, list[int], int]]) -> Times:
    """Step by step. A request that arrives exactly at the end of a step takes part in the next."""
    config = SimPodConfig(speed=SPEED, num_blocks=2500, block_size_tokens=BLOCK, step_budget_tokens=32, max_num_seqs=4)
    pod = SimPod(config)
    firsts: dict[int, tuple[float, int]] = {}
    times: Times = {}
    due, now_ms = list(enumerate(arrivals)), 0.0
    while True:
        while due and due[0][1][0] <= now_ms:
            number, (_, prompt, output) = due.pop(0)
            pod.submit(SimRequest(id=str(number), prompt=array("I", prompt), output=list(range(output))))
        if pod.start_step() is None:
            if not due:
                return times
            now_ms = due[0][1][0]
            continue
        step = pod.end_step()
        now_ms += step.duration_ms
        for name, cached in step.started.items():
            firsts[int(name)] = (now_ms, cached)
        for name in step.finished:
            times[int(name)] = (firsts[int(name)][0], now_ms, firsts[int(name)][1])


prompts = st.tuples(st.integers(1, 3), st.integers(1, 60), st.integers(0, 5)).map(
    lambda shape: [shape[0]] * min(shape[1], 30) + [shape[0] * 10 + shape[2]] * max(shape[1] - 30, 0)
)
jobs = st.lists(st.tuples(st.floats(0, 300), prompts, st.integers(1, 30)), min_size=1, max_size=12)


@given(jobs)
def test_it_gives_the_same_times_as_the_token_pod(arrivals: list[tuple[float, list[int], int]]) -> None:
    """First tokens, last tokens and cached tokens, to the microsecond, with enough memory."""
    arrivals = sorted(arrivals, key=lambda one: one[0])
    stepwise = drive_stepwise(arrivals)
    skipping = drive_virtual(virtual(), [(at_ms, ask(prompt, output)) for at_ms, prompt, output in arrivals])
    assert skipping.keys() == stepwise.keys() == set(range(len(arrivals)))
    for number, (first_ms, last_ms, cached) in stepwise.items():
        assert skipping[number] == pytest.approx((first_ms, last_ms, cached), abs=1e-3)


@given(jobs, st.integers(100, 200), st.sampled_from([0, 60]))
def test_every_job_ends_and_no_memory_is_lost_with_little_memory(
    arrivals: list[tuple[float, list[int], int]], kv_tokens: int, cpu_kv_tokens: int
) -> None:
    """With preemption, with a CPU tier, and with a backlog."""
    arrivals = sorted(arrivals, key=lambda one: one[0])
    pod = virtual(kv_tokens, cpu_kv_tokens=cpu_kv_tokens)
    held: dict[Tier, set[BlockHash]] = {Tier.GPU: set(), Tier.CPU: set()}
    due, ended = [(at_ms, ask(prompt, output)) for at_ms, prompt, output in arrivals], 0
    now_ms = 0.0
    while due or pod.wake_ms < math.inf:
        if due and due[0][0] <= pod.wake_ms:
            now_ms, asked = due.pop(0)
            pod.submit(Job(None, asked), now_ms)
            if pod.wake_ms < math.inf:
                continue
        else:
            now_ms = pod.wake_ms
        progress = pod.advance(now_ms)
        while True:
            for change in progress.block_changes:
                known, blocks = held[change.tier], change.blocks
                assert known.isdisjoint(blocks) if change.held else known >= set(blocks)
                (known.update if change.held else known.difference_update)(blocks)
            ended += len(progress.finished)
            assert 0 <= pod.cache.available_tokens <= kv_tokens
            for job, _ in progress.loading:
                pod.finish_load(job, now_ms)
            if not progress.loading or pod.wake_ms < math.inf:
                break
            progress = pod.advance(now_ms)
    assert ended == len(arrivals)
    assert pod.cache.available_tokens == kv_tokens
    assert set(pod.cache.blocks) == held[Tier.GPU]


def test_a_pod_without_memory_preempts_the_youngest_job() -> None:
    """Its time to first token stays, and its answer ends later."""
    pod = virtual(kv_tokens=64)
    times = drive_virtual(pod, [(0.0, ask([1] * 24, 20)), (0.0, ask([2] * 24, 10))])
    assert pod.preemptions >= 1
    assert times[1][0] < times[0][1] and set(times) == {0, 1}


def test_a_cpu_tier_returns_evicted_blocks() -> None:
    """After a load, which takes time."""
    pod = virtual(kv_tokens=64, cpu_kv_tokens=400)
    drive_virtual(pod, [(0.0, ask([1] * 40, 1)), (100.0, ask([2] * 60, 1))])
    pod.submit(Job("again", ask([1] * 40, 1)), 200.0)
    progress = pod.advance(200.0)
    ((job, tokens),) = progress.loading
    assert (tokens, pod.load.waiting) == (32, 1)  # one block of the 9 was never evicted
    pod.finish_load(job, 250.0)
    assert pod.advance(250.0).finished == []
    end_ms = pod.wake_ms
    (done,) = pod.advance(end_ms).finished
    assert done.cached_tokens == 36
    assert end_ms == pytest.approx(250.0 + SPEED.prefill_ms(40, 36))


def test_transferred_kv_is_not_computed_and_stays() -> None:
    """After a pull or a handoff, the next request with that prefix finds it."""
    pod = virtual()
    pod.submit(Job("pulled", ask([1] * 40, 1), arrived_tokens=36), 0.0)
    pod.advance(0.0)
    end_ms = pod.wake_ms
    assert len(pod.advance(end_ms).finished) == 1
    assert end_ms == pytest.approx(SPEED.prefill_ms(40, 36))
    assert pod.held_tokens(ask([1] * 60, 1)) == 40


def test_the_blocks_of_an_answer_are_found_by_the_next_turn() -> None:
    """All but its last token, which was never computed."""
    pod = virtual()
    first = ask([1] * 10, 7)
    drive_virtual(pod, [(0.0, first)])
    follow = TrafficRequest(24, 1, [*first.blocks[:4], 77, 78], 6)
    assert pod.held_tokens(follow) == 16


def test_a_job_that_can_never_fit_is_refused() -> None:
    """Instead of waiting forever."""
    with pytest.raises(ValueError, match="do not fit"):
        virtual(kv_tokens=20).submit(Job(None, ask([1] * 20, 1)), 0.0)


def test_a_first_token_is_read_after_the_launch_of_the_next_step() -> None:
    """Where both steps take as long as their launch: the second prompt's step ends at 40, which is when the first
    prompt's token is sent. Its own token has no launch to wait for."""
    pod = virtual()
    pod.config = replace(pod.config, speed=replace(SPEED, launch_ms=20.0, graph_tokens=2))
    times = drive_virtual(pod, [(0.0, ask([1, 2, 3, 4, 5], 9)), (1.0, ask([6, 7, 8, 9], 9))])
    assert [times[number][0] for number in (0, 1)] == [40.0, 40.0]
    many = virtual(seats=16)
    many.config = pod.config
    arrivals = [(15.0 * number, ask(list(range(10 * number, 10 * number + 5)), 9)) for number in range(6)]
    first_ms = [times[0] for _, times in sorted(drive_virtual(many, arrivals).items())]
    assert max(first - arrived for first, (arrived, _) in zip(first_ms, arrivals, strict=True)) <= 60.0
    short = virtual()
    short.config = replace(pod.config, speed=replace(SPEED, launch_ms=20.0, replay_ms=12.0, graph_tokens=512))
    assert drive_virtual(short, [(0.0, ask([1, 2, 3, 4, 5], 9))])[0][0] == 12.0
