"""Measures the speed of a real pod in the simulator's terms.

Single prompts of many lengths, new, half cached and cached, give the terms of a prefill; few and many concurrent
responses, after short and long prompts, give those of a decode step. The terms are a least-squares fit of the relative
error over medians. The pod must be idle; CPU time that other programs take from its core is measured as well.
"""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import numpy as np

from loadtest.traffic.load_driver import LoadDriver, RequestResult
from router.types import Endpoint, PodSpeed
from tests.live.engines import EngineProcess

LENGTHS_TOKENS = (128, 512, 1024, 2000)
BATCHES = ((1, 96), (5, 96), (1, 2000), (5, 2000))
"""Concurrent responses, and tokens of the prompt before each."""
ANSWER_TOKENS = 32
SHORT_ANSWER_TOKENS = 4
"""More than one: an idle pod reports its token sooner than one that already runs the next step."""
REPEATS = 3
TOKENS = range(1_000, 100_000)
"""Alphabet of the prompts."""
ANSWER_TOKEN = 67
"""The only allowed output token: the response is known in advance and decodes to text at once."""

Medians = Mapping[tuple[int, ...], float]
"""Measured ms by (prompt tokens, cached tokens), or by (concurrent responses, tokens of each)."""

ThreadTimes = Mapping[int, tuple[int, int]]
"""By thread: run time and time waiting for a core, in ns."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """A pod's step times, and the overhead of HTTP and queues before its first token.

    `slowness` is the elapsed time relative to the run time of its computing thread.
    """

    speed: PodSpeed
    overhead_ms: float
    slowness: float = 1.0

    def at(self, slowness: float) -> Calibration:
        """The same pod when other programs take more, or less, of its core."""
        factor = slowness / self.slowness
        return Calibration(self.speed.scaled(factor), factor * self.overhead_ms, slowness)


def made_up(random: Random, tokens: int) -> list[int]:
    """Tokens that no other prompt has."""
    return random.choices(TOKENS, k=tokens)


def asked(prompt: Sequence[int], output_tokens: int) -> dict[str, Any]:
    """A completion of exactly that many tokens."""
    exactly = {"max_tokens": output_tokens, "ignore_eos": True, "allowed_token_ids": [ANSWER_TOKEN]}
    return {"model": "tiny", "prompt": prompt, "temperature": 0, **exactly}


async def calibrate(pod: EngineProcess, random: Random) -> Calibration:
    """Measure an idle pod, in about 20 s. The first responses are a warm-up."""
    driver = LoadDriver([pod.url], lambda _: None)
    try:
        for _ in range(4):
            await _ask(driver, made_up(random, 64))
        before = thread_times(pod)
        prefills, gaps = await _prefills(driver, random), await _gaps(driver, random)
        return replace(fitted(prefills, gaps), slowness=slowness(before, thread_times(pod)))
    finally:
        driver.close()


def thread_times(pod: EngineProcess) -> ThreadTimes:
    """Times of all threads of the pod's processes. Source: the kernel's Documentation/scheduler/sched-stats."""
    found: dict[int, tuple[int, int]] = {}
    for task in Path("/proc").glob("[0-9]*/task/*"):
        try:
            if os.getpgid(int(task.parts[2])) == pod.process.pid:
                ran, waited, _ = (task / "schedstat").read_text().split()
                found[int(task.name)] = int(ran), int(waited)
        except (ProcessLookupError, FileNotFoundError):
            pass  # it has ended meanwhile
    return found


def slowness(before: ThreadTimes, after: ThreadTimes) -> float:
    """Elapsed time of the busiest thread relative to its run time: 1 with a core of its own, 2 with half of one."""
    spent = [(ran - before.get(thread, (0, 0))[0], thread) for thread, (ran, _) in after.items()]
    ran, thread = max(spent)
    return 1 + (after[thread][1] - before.get(thread, (0, 0))[1]) / ran


def fitted(prefills_ms: Medians, gaps_ms: Medians) -> Calibration:
    """The terms of `PodSpeed`. A prefill step has the cost of a decode step of one; the rest of the constant is
    overhead."""
    around_ms, c1, c2 = _least_squares({(1, n - p, n * n - p * p): ms for (n, p), ms in prefills_ms.items()})
    d0, d1, d2 = _least_squares({(1, batch, batch * tokens): ms for (batch, tokens), ms in gaps_ms.items()})
    c0 = min(d0 + d1, around_ms)
    return Calibration(PodSpeed(c0, c1, c2, d0, d1, d2), around_ms - c0)


def _least_squares(measured_ms: Medians) -> list[float]:
    """Non-negative coefficients: noise can make a small one negative."""
    ms = np.array(list(measured_ms.values()))
    terms = np.array(list(measured_ms), dtype=float)
    found, *_ = np.linalg.lstsq(terms / ms[:, None], np.ones(len(ms)), rcond=None)
    return [max(float(one), 0.0) for one in found]


async def _prefills(driver: LoadDriver, random: Random) -> Medians:
    """TTFT by (prompt tokens, cached tokens)."""
    found: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for _ in range(REPEATS):
        for tokens in LENGTHS_TOKENS:
            new = made_up(random, tokens)
            half_known = new[: tokens // 2] + made_up(random, tokens - tokens // 2)
            for prompt in (new, half_known, new):
                one = await _ask(driver, prompt, SHORT_ANSWER_TOKENS)
                assert one.ttft_s is not None
                found[tokens, one.cached_tokens].append(one.ttft_s * 1000)
    return {key: median(ms) for key, ms in found.items()}


async def _gaps(driver: LoadDriver, random: Random) -> Medians:
    """ITL by (concurrent responses, tokens of each, at half of its response)."""
    found: dict[tuple[int, ...], float] = {}
    for batch, tokens in BATCHES:
        prompt = made_up(random, tokens)
        await _ask(driver, prompt)
        gaps: list[float] = []
        for _ in range(REPEATS):
            answers = await asyncio.gather(*(_ask(driver, prompt, ANSWER_TOKENS) for _ in range(batch)))
            gaps += [(one.e2e_s - (one.ttft_s or 0.0)) * 1000 / (ANSWER_TOKENS - 1) for one in answers]
        found[batch, tokens + ANSWER_TOKENS // 2] = median(gaps)
    return found


async def _ask(driver: LoadDriver, prompt: Sequence[int], output_tokens: int = 1) -> RequestResult:
    one = await driver.send(Endpoint.COMPLETIONS, asked(prompt, output_tokens), "calibration")
    assert not one.error, one.error
    return one
