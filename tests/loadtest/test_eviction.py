"""Policies of a cache tier against each other, on small traces."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.studies.cache_tier import CacheTier, Prompt, by_recency
from loadtest.studies.eviction import POLICIES, measure, prompts_of
from loadtest.studies.reuse_value import ReuseValue

BLOCK_TOKENS = 512


@st.composite
def traces(draw: st.DrawFn) -> list[Prompt]:
    """Conversations that continue or fork from any prefix of an earlier prompt."""
    new = count()
    prompts = [Prompt(0.0, [next(new)], BLOCK_TOKENS)]
    for _ in range(draw(st.integers(1, 40))):
        base = prompts[draw(st.integers(0, len(prompts) - 1))].blocks
        kept = base[: draw(st.integers(0, len(base)))]
        blocks = [*kept, *(next(new) for _ in range(draw(st.integers(1, 4))))]
        at_s = prompts[-1].at_s + draw(st.integers(0, 40))
        prompts.append(Prompt(at_s, blocks, len(blocks) * BLOCK_TOKENS))
    return prompts


def _lru(prompts: list[Prompt], capacity_blocks: int) -> Iterator[int]:
    """LRU in the obvious way."""
    cached: dict[int, None] = {}
    for prompt in prompts:
        yield next((at for at, block in enumerate(prompt.blocks) if block not in cached), len(prompt.blocks))
        for block in reversed(prompt.blocks):
            cached.pop(block, None)
            cached[block] = None
        while len(cached) > capacity_blocks:
            del cached[next(iter(cached))]


@settings(max_examples=30)
@given(traces(), st.integers(1, 40))
def test_a_tier_that_evicts_by_recency_is_lru(prompts: list[Prompt], capacity_blocks: int) -> None:
    assert [*POLICIES["lru"](prompts, capacity_blocks)] == [*_lru(prompts, capacity_blocks)]


@settings(max_examples=20)
@pytest.mark.parametrize("name", [name for name in POLICIES if name != "optimum"])
@given(prompts=traces(), capacity_blocks=st.integers(1, 40))
def test_no_policy_saves_more_tokens_than_the_optimum(name: str, prompts: list[Prompt], capacity_blocks: int) -> None:
    found = measure(POLICIES[name], prompts, capacity_blocks, 0.0)
    assert found.hit_share <= measure(POLICIES["optimum"], prompts, capacity_blocks, 0.0).hit_share + 1e-12


@settings(max_examples=20)
@pytest.mark.parametrize("name", POLICIES)
@given(prompts=traces())
def test_all_policies_keep_everything_that_fits(name: str, prompts: list[Prompt]) -> None:
    blocks = 100 * len({block for prompt in prompts for block in prompt.blocks})
    found = measure(POLICIES[name], prompts, blocks, 0.0)
    assert found == measure(POLICIES["optimum"], prompts, blocks, 0.0)


@settings(max_examples=30)
@given(traces(), st.integers(1, 40), st.sampled_from([0.0, 0.5]))
def test_a_tier_never_exceeds_its_capacity(prompts: list[Prompt], capacity_blocks: int, order_s: float) -> None:
    tier = CacheTier(capacity_blocks, by_recency, ReuseValue(), order_s=order_s, headroom=0.1)
    for prompt in prompts:
        tier.serve(prompt)
        assert 0 <= tier.used_blocks <= capacity_blocks


def test_hints_close_most_of_the_gap_when_one_class_comes_back_and_another_does_not() -> None:
    random, new = Random(0), count()
    prompts = []
    for start_s in range(0, 6000, 6):
        first = [next(new) for _ in range(4)]
        prompts.append(Prompt(start_s, first, 2048))
        if random.random() < 0.2:
            # A second turn, and then a third: who has come back once comes back again.
            second = [*first, next(new)]
            prompts.append(Prompt(start_s + 300.0, second, 2560))
            prompts.append(Prompt(start_s + 500.0, [*second, next(new)], 3072))
    prompts.sort(key=lambda prompt: prompt.at_s)
    lru, hints, most = (measure(POLICIES[name], prompts, 120, 3000.0) for name in ("lru", "hints", "optimum"))
    assert lru.hit_share < hints.hit_share < most.hit_share


def test_sessions_of_agents_are_read_in_blocks_of_512_tokens(tmp_path: Path) -> None:
    trace = tmp_path / "agents.jsonl"
    requests = [
        {"t": 0, "prompt_tokens": 1100, "output_tokens": 100},
        {"t": 20, "prompt_tokens": 2100, "output_tokens": 1, "think_s": 7, "base": 0, "keep_blocks": 17},
    ]
    trace.write_bytes(msgspec.json.encode({"block_tokens": 64, "tool_tokens": 600, "requests": requests}))
    prompts = prompts_of(trace, 0)
    first = prompts[0]
    second = next(prompt for prompt in prompts if len(prompt.blocks) == 4 and prompt.blocks[1] == first.blocks[1])
    assert [*second.blocks[:2]] == [*first.blocks]
    assert second.at_s - first.at_s == pytest.approx(10.0)
