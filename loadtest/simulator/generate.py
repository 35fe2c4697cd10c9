"""Generates seeded traffic with patterns that the public traces lack.

System prompts and documents that many requests share, agents whose context grows in fast loops, few-shot examples,
one-off prompts, and bursts. Sessions are generated when they are needed.
"""

from __future__ import annotations

from array import array
from bisect import bisect
from collections.abc import Iterator, Sequence
from itertools import accumulate, count
from random import Random
from typing import Annotated, TypeAlias

from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from loadtest.simulator.scenario import StrictSpec
from loadtest.simulator.traffic import Session, Traffic, TrafficRequest
from router.types import BlockHash


def _ordered(span: tuple[int, int]) -> tuple[int, int]:
    if span[0] > span[1]:
        raise ValueError("expected [min, max] with min <= max")
    return span


_Span: TypeAlias = Annotated[tuple[NonNegativeInt, NonNegativeInt], AfterValidator(_ordered)]
_Seconds: TypeAlias = tuple[NonNegativeFloat, NonNegativeFloat]


class Kind(StrictSpec):
    """One kind of session. `share` is its weight. Each session starts with one of `prefixes` shared prefixes of
    `prefix_tokens`, drawn by Zipf's law with exponent `zipf`; with 0 prefixes, sessions share nothing."""

    share: PositiveFloat = 1.0
    prefixes: NonNegativeInt = 0
    prefix_tokens: _Span = (0, 0)
    zipf: NonNegativeFloat = 1.0
    turns: _Span = (1, 1)
    first_tokens: _Span = (100, 500)
    next_tokens: _Span = (50, 200)
    output_tokens: _Span = (50, 300)
    think_s: _Seconds = (0.0, 0.0)


class Bursts(StrictSpec):
    """For `length_s` of every `every_s`, sessions arrive `factor` times as often."""

    every_s: PositiveFloat
    length_s: PositiveFloat
    factor: PositiveFloat


class TrafficMix(StrictSpec):
    """A traffic file: kinds of sessions, their rate and the duration."""

    about: str = ""
    sessions_per_s: PositiveFloat
    duration_s: PositiveFloat
    kinds: Annotated[dict[str, Kind], Field(min_length=1)]
    bursts: Bursts | None = None
    block_size_tokens: PositiveInt = 128

    def traffic(self, *, speedup: float = 1.0, seed: int = 0) -> Traffic:
        """`speedup` divides the time between the same sessions; the times inside a session stay."""
        return Traffic(self.block_size_tokens, _sessions(self, speedup, seed))


def _sessions(mix: TrafficMix, speedup: float, seed: int) -> Iterator[Session]:
    random, ids = Random(seed), _BlockIds(seed)
    makers = {
        name: _SessionMaker(kind, mix.block_size_tokens, Random(f"{seed} {name}"), ids)
        for name, kind in mix.kinds.items()
    }
    names, weights = list(makers), [kind.share for kind in mix.kinds.values()]
    for start_s in _arrivals(mix, random):
        name = random.choices(names, weights)[0]
        yield Session(start_s / speedup, tuple(makers[name].requests()), name)


def _arrivals(mix: TrafficMix, random: Random) -> Iterator[float]:
    """A Poisson process with bursts: arrivals at the highest rate, thinned to the current rate."""
    bursts = mix.bursts
    highest = mix.sessions_per_s * max(1.0, bursts.factor if bursts else 1.0)
    at_s = random.expovariate(highest)
    while at_s < mix.duration_s:
        rate = mix.sessions_per_s
        if bursts and at_s % bursts.every_s < bursts.length_s:
            rate *= bursts.factor
        if random.random() * highest < rate:
            yield at_s
        at_s += random.expovariate(highest)


class _BlockIds:
    """Unique block ids: ranges of a counter, far apart between seeds."""

    def __init__(self, seed: int) -> None:
        self._next = count(((seed & 0xFFFF) + 1) << 44, 1 << 14)

    def take(self, blocks: int) -> int:
        """The first of at least `blocks` consecutive ids."""
        first = next(self._next)
        for _ in range(blocks >> 14):
            next(self._next)
        return first


class _SessionMaker:
    """Generates the sessions of one kind, after its shared prefixes."""

    def __init__(self, kind: Kind, block_size_tokens: int, random: Random, ids: _BlockIds) -> None:
        self._kind = kind
        self._block = block_size_tokens
        self._random = random
        self._ids = ids
        self._prefixes: list[tuple[int, range]] = []
        self._weights = list(accumulate(1 / rank**kind.zipf for rank in range(1, kind.prefixes + 1)))
        for _ in range(kind.prefixes):
            tokens = random.randint(*kind.prefix_tokens)
            first = ids.take(tokens // block_size_tokens)
            self._prefixes.append((tokens, range(first, first + tokens // block_size_tokens)))

    def _prefix(self) -> tuple[int, Sequence[BlockHash]]:
        if not self._prefixes:
            return 0, ()
        return self._prefixes[bisect(self._weights, self._random.random() * self._weights[-1])]

    def requests(self) -> Iterator[TrafficRequest]:
        """One session. Each prompt is the whole conversation so far and new tokens. Blocks after the shared prefix
        belong to this session; their position gives their id."""
        kind, random, own = self._kind, self._random, 0
        tokens, shared = self._prefix()
        for turn in range(random.randint(*kind.turns)):
            tokens += max(random.randint(*(kind.next_tokens if turn else kind.first_tokens)), 1)
            output_tokens = max(random.randint(*kind.output_tokens), 1)
            total = (tokens + output_tokens - 1) // self._block
            own = own or self._ids.take(1 << 14)
            blocks = array("Q", shared)
            blocks.extend(range(own + len(shared), own + total))
            think_s = random.uniform(*kind.think_s) if turn else 0.0
            yield TrafficRequest(tokens, output_tokens, blocks, tokens // self._block, think_s)
            tokens += output_tokens
