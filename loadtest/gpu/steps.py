"""Measures the steps of one idle pod: prefills, decode steps, and steps that do both.

Prefills are single prompts of n tokens, of which p are in the cache. Decode steps are those of b concurrent responses
behind different prompts of the same length, whose blocks are in the cache. Each function returns records for JSON with
the measurements of all repeats; means and fits are for `fit.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from random import Random
from statistics import median
from typing import Any

from loadtest.gpu.streams import PodClient, Streamed, made_up, mean_between

KNOWN_SHARES = (0.0, 0.5, 0.9)
"""The shares of a prompt that are in the cache."""
PREFILL_OUTPUT_TOKENS = 4
"""More than one: an idle pod reports its only token sooner than the first of many."""
DECODE_OUTPUT_TOKENS = 96
SKIPPED_TOKENS = 8
"""At the beginning of responses that begin together: some wait for the prompts of the others."""
INTERFERED_OUTPUT_TOKENS = 240
INTERFERED_AFTER_S = 0.5
"""When the prompt is sent; `was_decoding` says whether that was in the middle."""
KV_SHARE = 0.8
"""The share of a pod's KV cache that a measurement may fill."""


@dataclass(frozen=True, slots=True)
class Grid:
    """What to measure."""

    prompts_tokens: Sequence[int]
    repeats: int
    decodes: Sequence[tuple[int, int]]
    """Concurrent responses, and tokens before each."""
    chunks_tokens: Sequence[int]
    """Prompts that arrive while others decode."""


FULL = Grid(
    (256, 512, 1024, 2048, 4096, 8192, 16384, 32768),
    3,
    ((1, 512), (8, 512), (32, 512), (96, 512), (1, 4096), (8, 4096), (24, 4096), (1, 16384), (6, 16384)),
    (1024, 4096, 8000),
)
REHEARSAL = Grid((128, 512, 1024), 2, ((1, 128), (4, 128), (1, 1024), (4, 1024)), (512,))


@dataclass(slots=True)
class StepMeasurement:
    """Measures one pod until `deadline_s` of `time.monotonic`; what is missing then is left out."""

    pod: PodClient
    grid: Grid
    kv_tokens: int
    deadline_s: float
    random: Random

    async def parts(self) -> AsyncIterator[tuple[str, Any]]:
        """Names and records of what was measured, one after the other."""
        await self._warm_up()
        measurements: dict[str, Callable[[], Awaitable[Any]]] = {
            "prefill": self._prefills,
            "decode": self._decodes,
            "interference": self._interference,
        }
        for name, measure in measurements.items():
            began_s = time.monotonic()
            yield name, await measure()
            print(f"  {name}: {time.monotonic() - began_s:.1f} s", flush=True)

    @property
    def _is_late(self) -> bool:
        return time.monotonic() > self.deadline_s

    async def _warm_up(self) -> None:
        """The first step of each size compiles kernels."""
        await self._prefills_once()
        batch = max(batch for batch, _ in self.grid.decodes)
        await asyncio.gather(*(self.pod.stream(made_up(self.random, 64), 16) for _ in range(batch)))

    async def _prefills(self) -> list[dict[str, Any]]:
        found: dict[tuple[int, int], list[dict[str, float | None]]] = defaultdict(list)
        for _ in range(self.grid.repeats):
            for n, p, times in await self._prefills_once():
                found[n, p].append(times)
        return [{"n": n, "p": p, "times": times} for (n, p), times in found.items()]

    async def _prefills_once(self) -> list[tuple[int, int, dict[str, float | None]]]:
        """Each length new, then with a part of the prompt before it."""
        found: list[tuple[int, int, dict[str, float | None]]] = []
        for tokens in self.grid.prompts_tokens:
            prompt = made_up(self.random, tokens)
            for share in KNOWN_SHARES:
                if self._is_late:
                    return found
                known = int(tokens * share)
                prompt = prompt[:known] + made_up(self.random, tokens - known)
                one, times = await self._prefill(prompt)
                found.append((tokens, one.cached_tokens, times))
        return found

    async def _prefill(self, prompt: Sequence[int]) -> tuple[Streamed, dict[str, float | None]]:
        """One response; TTFT as its client sees it, and the time that the pod says the prompt took."""
        before = await self.pod.counters()
        one = await self.pod.stream(prompt, PREFILL_OUTPUT_TOKENS)
        after = await self.pod.counters()
        pod_ms = {name: mean_between(before, after, name) for name in ("prefill_ms", "queue_ms")}
        return one, {"ttft_ms": one.ttft_ms, **pod_ms}

    async def _decodes(self) -> list[dict[str, Any]]:
        """Longer contexts first need room, so blocks are dropped before each length."""
        found = []
        lengths = sorted({context for _, context in self.grid.decodes})
        for context in lengths:
            batches = [batch for batch, tokens in self.grid.decodes if tokens == context]
            batches = [batch for batch in batches if self._fits(batch * (context + DECODE_OUTPUT_TOKENS))]
            if not batches or self._is_late:
                continue
            await self.pod.forget()
            prompts = [made_up(self.random, context) for _ in range(max(batches))]
            for prompt in prompts:
                await self.pod.stream(prompt, 1)
            found += [await self._decode(prompts[:batch], context) for batch in batches]
        return found

    async def _decode(self, prompts: Sequence[Sequence[int]], context: int) -> dict[str, Any]:
        """Times of a step, by the clients' clocks and by the pod's, with the mean tokens of a context meanwhile."""
        gaps_ms, pod_ms = [], []
        for _ in range(max(1, self.grid.repeats - 1)):
            before = await self.pod.counters()
            responses = await asyncio.gather(*(self.pod.stream(prompt, DECODE_OUTPUT_TOKENS) for prompt in prompts))
            after = await self.pod.counters()
            late = [one.gaps_ms(SKIPPED_TOKENS) for one in responses]
            gaps_ms.append(sum(map(sum, late)) / max(1, sum(map(len, late))))
            pod_ms.append(mean_between(before, after, "itl_ms"))
        mean_context = context + DECODE_OUTPUT_TOKENS / 2
        return {"batch": len(prompts), "context": mean_context, "gap_ms": gaps_ms, "pod_itl_ms": pod_ms}

    async def _interference(self) -> list[dict[str, Any]]:
        """The longest gap of responses in whose middle a prompt arrives."""
        found = []
        for batch, context in ((1, 512), (16, 1024)):
            for tokens in self.grid.chunks_tokens:
                if self._is_late or not self._fits(batch * context + tokens):
                    continue
                repeats = 1 if batch == 1 else self.grid.repeats - 1
                found += [await self._interfered(batch, context, tokens) for _ in range(repeats)]
        return found

    async def _interfered(self, batch: int, context: int, tokens: int) -> dict[str, Any]:
        prompts = [made_up(self.random, context) for _ in range(batch)]
        for prompt in prompts:
            await self.pod.stream(prompt, 1)
        running = [asyncio.create_task(self.pod.stream(prompt, INTERFERED_OUTPUT_TOKENS)) for prompt in prompts]
        await asyncio.sleep(INTERFERED_AFTER_S)
        other = await self.pod.stream(made_up(self.random, tokens), 1)
        responses = await asyncio.gather(*running)
        return {
            "batch": batch,
            "context": context,
            "prompt_tokens": tokens,
            "prompt_ttft_ms": other.ttft_ms,
            "longest_gap_ms": median(max(one.gaps_ms(SKIPPED_TOKENS)) for one in responses),
            "usual_gap_ms": median(median(one.gaps_ms(SKIPPED_TOKENS)) for one in responses),
            "was_decoding": sum(one.tokens_s[-1] > other.tokens_s[0] for one in responses),
        }

    def _fits(self, tokens: int) -> bool:
        return tokens <= self.kv_tokens * KV_SHARE
