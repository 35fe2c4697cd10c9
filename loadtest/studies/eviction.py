"""How much of the gap between LRU and the offline optimum do hints about reuse close?

    python -m loadtest.studies.eviction --trace conversation_trace.jsonl --seeds 2,3

One cache tier in front of a whole trace at its own pace, in blocks of 512 tokens. Only whole blocks of prompts are
cached. `optimum` is Belady's MIN with bypass: no order of evictions saves more tokens. `--trace` may also name recorded
sessions of agents, which start at random. Prompts before `--from` of the time warm up. All but `optimum` learn online.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from typing import Annotated

import typer

from loadtest.simulator.agent_sessions import agent_traffic, read_agent_sessions
from loadtest.simulator.traffic import MOONCAKE_BLOCK_TOKENS as BLOCK_TOKENS
from loadtest.simulator.traffic import mooncake_traffic, read_mooncake
from loadtest.studies.cache_tier import CacheTier, Prompt, Segment, Values, by_recency
from loadtest.studies.reuse_value import ReuseValue
from router.cost_model import PodSpeed

AGENTS_S = 14_400.0
ANSWER_TOKEN_S = 0.03
"""Time of a token of an agent's answer."""
NEVER = 1 << 60
SPEED = PodSpeed(c0_ms=3.8, c1_ms_per_token=0.0618, c2_ms_per_token2=5e-7)
"""Llama-3.1-70B on four H100. Source: config/models/llama-3.1-70b.yaml."""


@dataclass(frozen=True, slots=True)
class Saved:
    """What a policy saved after the warm-up."""

    hit_share: float
    """A share of the prompt tokens."""
    prefill_s: float


Serve = Callable[[Sequence[Prompt], int], Iterator[int]]
"""A policy: cached leading blocks of each prompt, with a capacity in blocks."""


# --- policies ---


def value_per_s(reuse: ReuseValue, *, in_ms: bool) -> Values:
    """Expected uses of a block per second kept, or milliseconds that they save."""

    def values(segments: Sequence[Segment], now_s: float) -> list[float]:
        ages_s = [one.age_s(now_s) for one in segments]
        rates = reuse.per_s([one.cls for one in segments], ages_s)
        weights = map(_block_ms, segments) if in_ms else [1.0] * len(segments)
        return [rate * weight for rate, weight in zip(rates.tolist(), weights, strict=True)]

    return values


def _block_ms(one: Segment) -> float:
    """Mean time to compute a block of a segment."""
    return SPEED.compute_ms(one.first * BLOCK_TOKENS, one.end * BLOCK_TOKENS) / (one.end - one.first)


def hints(prompts: Sequence[Prompt], capacity_blocks: int) -> Iterator[int]:
    """Least milliseconds per second first: session, turn and interval."""
    reuse = ReuseValue()
    return map(CacheTier(capacity_blocks, value_per_s(reuse, in_ms=True), reuse).serve, prompts)


def token_hints(prompts: Sequence[Prompt], capacity_blocks: int) -> Iterator[int]:
    """Least expected uses per second first."""
    reuse = ReuseValue()
    return map(CacheTier(capacity_blocks, value_per_s(reuse, in_ms=False), reuse).serve, prompts)


def ordered_hints(prompts: Sequence[Prompt], capacity_blocks: int) -> Iterator[int]:
    """An LRU tier that is ordered to delete what is worth least: every second until 2 % are free."""
    reuse = ReuseValue()
    values = value_per_s(reuse, in_ms=True)
    return map(CacheTier(capacity_blocks, values, reuse, order_s=1.0, headroom=0.02).serve, prompts)


def by_age(prompts: Sequence[Prompt], capacity_blocks: int) -> Iterator[int]:
    """Hit density by age alone: what a tier can learn without sessions and turns."""
    reuse = ReuseValue()
    tier = CacheTier(capacity_blocks, value_per_s(reuse, in_ms=True), reuse, class_of=lambda *_: 0)
    return map(tier.serve, prompts)


def lru(prompts: Sequence[Prompt], capacity_blocks: int) -> Iterator[int]:
    """Least recently used first."""
    return map(CacheTier(capacity_blocks, by_recency, ReuseValue()).serve, prompts)


def lfu(prompts: Sequence[Prompt], capacity_blocks: int) -> Iterator[int]:
    """Least often used first, then least recently."""
    return map(CacheTier(capacity_blocks, _by_uses, ReuseValue()).serve, prompts)


def gdsf(prompts: Sequence[Prompt], capacity_blocks: int) -> Iterator[int]:
    """Greedy dual size frequency (Cherkasova 1998): least of `L + uses x ms per block`, L the value last evicted."""
    last = 0.0

    def values(segments: Sequence[Segment], _now_s: float) -> list[float]:
        for one in segments:
            one.value = one.value or last + one.uses * _block_ms(one)
        return [one.value for one in segments]

    def evicted(value: float) -> None:
        nonlocal last
        last = max(last, value)

    return map(CacheTier(capacity_blocks, values, ReuseValue(), evicted=evicted).serve, prompts)


def _by_uses(segments: Sequence[Segment], _now_s: float) -> list[float]:
    """Uses of the conversation, then recency."""
    return [one.uses * 1e6 + one.prompt.at_s for one in segments]


def s3_fifo(prompts: Sequence[Prompt], capacity_blocks: int) -> Iterator[int]:
    """S3-FIFO (Yang et al. 2023), a tenth small queue, moved to the main queue after one more use."""
    small: OrderedDict[int, None] = OrderedDict()
    main: OrderedDict[int, None] = OrderedDict()
    ghost: OrderedDict[int, None] = OrderedDict()
    uses: dict[int, int] = {}
    for prompt in prompts:
        yield _leading(prompt.blocks, uses)
        # From the end, so that the beginning of a prompt is evicted last.
        for block in reversed(prompt.blocks):
            if block in uses:
                uses[block] = min(uses[block] + 1, 3)
                continue
            uses[block] = 0
            known = block in ghost
            ghost.pop(block, None)
            (main if known else small)[block] = None
        while len(uses) > capacity_blocks:
            if len(small) > capacity_blocks // 10 or not main:
                block = small.popitem(last=False)[0]
                if uses[block]:
                    uses[block], main[block] = 0, None
                else:
                    del uses[block]
                    ghost[block] = None
                    if len(ghost) > capacity_blocks:
                        ghost.popitem(last=False)
            else:
                block = main.popitem(last=False)[0]
                if uses[block]:
                    uses[block], main[block] = uses[block] - 1, None
                else:
                    del uses[block]


def optimum(prompts: Sequence[Prompt], capacity_blocks: int) -> Iterator[int]:
    """Belady's MIN with bypass: evicts what is used last, and keeps nothing that is not used again."""
    following: list[list[int]] = []
    latest: dict[int, int] = {}
    for number, prompt in reversed([*enumerate(prompts)]):
        following.append([latest.get(block, NEVER) for block in prompt.blocks])
        latest.update(dict.fromkeys(prompt.blocks, number))
    cached: dict[int, int] = {}
    queue: list[tuple[int, int, int]] = []
    for prompt, uses in zip(prompts, reversed(following), strict=True):
        yield _leading(prompt.blocks, cached)
        for depth, (block, at) in enumerate(zip(prompt.blocks, uses, strict=True)):
            cached[block] = at
            heappush(queue, (-at, -depth, block))
        while len(cached) > capacity_blocks or (queue and queue[0][0] == -NEVER):
            at, _, block = heappop(queue)
            if cached.get(block) == -at:
                del cached[block]


def _leading(blocks: Sequence[int], cached: Iterable[int] | dict[int, int]) -> int:
    return next((at for at, block in enumerate(blocks) if block not in cached), len(blocks))


POLICIES: dict[str, Serve] = {
    "lru": lru,
    "lfu": lfu,
    "gdsf": gdsf,
    "s3_fifo": s3_fifo,
    "by_age": by_age,
    "token_hints": token_hints,
    "hints": hints,
    "ordered_hints": ordered_hints,
    "optimum": optimum,
}


# --- traces ---


def prompts_of(trace: Path, seed: int) -> list[Prompt]:
    """A Mooncake trace with arrivals spread over 3 s, or sessions of agents that start at random."""
    with trace.open("rb") as lines:
        sessions = b'"block_tokens"' in lines.readline()
    found = _of_agents(trace, seed) if sessions else _of_mooncake(trace, seed)
    return sorted(found, key=lambda prompt: prompt.at_s)


def _of_mooncake(trace: Path, seed: int) -> Iterator[Prompt]:
    for session in mooncake_traffic(read_mooncake(trace), jitter_s=3.0, seed=seed).sessions:
        (one,) = session.requests
        whole = one.prompt_tokens // BLOCK_TOKENS
        yield Prompt(session.start_s, one.blocks[:whole], one.prompt_tokens)


def _of_agents(trace: Path, seed: int) -> Iterator[Prompt]:
    """With the recorded pauses and no time to compute, so that all policies see the same arrivals."""
    traffic = agent_traffic(read_agent_sessions(trace), seed=seed, duration_s=AGENTS_S)
    step = BLOCK_TOKENS // traffic.block_size_tokens
    for session in traffic.sessions:
        at_s = session.start_s
        for one in session.requests:
            at_s += one.think_s
            if at_s < AGENTS_S:
                # The last of these hashes identifies them all.
                yield Prompt(at_s, one.prompt_hashes[step - 1 :: step], one.prompt_tokens)
            at_s += one.output_tokens * ANSWER_TOKEN_S


# --- results ---


def measure(serve: Serve, prompts: Sequence[Prompt], capacity_blocks: int, from_s: float) -> Saved:
    """What a policy saves of the prompts from `from_s`."""
    hit = saved_ms = 0.0
    for prompt, blocks in zip(prompts, serve(prompts, capacity_blocks), strict=True):
        if prompt.at_s >= from_s:
            hit += blocks * BLOCK_TOKENS
            saved_ms += SPEED.compute_ms(0, blocks * BLOCK_TOKENS)
    asked = sum(prompt.tokens for prompt in prompts if prompt.at_s >= from_s)
    return Saved(hit / asked, saved_ms / 1000)


def row(name: str, found: Saved, least: Saved, most: Saved) -> str:
    """A row of the table. `least` of LRU, `most` of the optimum."""
    tokens = (found.hit_share - least.hit_share) / max(most.hit_share - least.hit_share, 1e-9)
    prefill = (found.prefill_s - least.prefill_s) / max(most.prefill_s - least.prefill_s, 1e-9)
    return f"| {name} | {found.hit_share:.1%} | {found.prefill_s:,.0f} s | {tokens:.0%} | {prefill:.0%} |"


def main(
    trace: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="Mooncake trace or sessions of agents.")],
    pools: Annotated[str, typer.Option(help="Capacities in million tokens.")] = "2,4,8",
    seeds: Annotated[str, typer.Option(help="Seeds of arrivals.")] = "1,2",
    policies: Annotated[str, typer.Option(help="Policies besides lru and optimum.")] = ",".join(POLICIES),
    start: Annotated[float, typer.Option("--from", min=0, max=0.99, help="Share of the time that warms up.")] = 0.6,
) -> None:
    """Print a table for each pool and seed."""
    for seed in map(int, seeds.split(",")):
        prompts = prompts_of(trace, seed)
        from_s = start * prompts[-1].at_s
        for pool in map(float, pools.split(",")):
            blocks = int(pool * 1e6) // BLOCK_TOKENS
            least, most = (measure(POLICIES[name], prompts, blocks, from_s) for name in ("lru", "optimum"))
            print(f"\n{trace.name}, {pool:g}M tokens, seed {seed}, {len(prompts):,} requests\n")
            print("| policy | cached | prefill saved | gap closed: tokens | prefill |\n|---|---|---|---|---|")
            for name in policies.split(","):
                print(row(name, measure(POLICIES[name], prompts, blocks, from_s), least, most), flush=True)


if __name__ == "__main__":
    typer.run(main)
