"""Fits the coefficients of the cost model to a measured pod, and judges them on points that were not fitted. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any, TypeAlias

import numpy as np

from loadtest.gpu.engines import GRAPH_SIZES
from router.types import PodSpeed

Record: TypeAlias = Mapping[str, Any]
"""One model of `measured.json`."""
COMPUTED_FROM = 1.1
"""Times beyond this multiple of the launch time are computing time."""
MIN_COMPUTED = 5


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """A prompt of n tokens, p of them cached, and its median time to first token over all repeats."""

    n: int
    p: int
    ms: float


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """`batch` responses with `context` tokens each, and the mean time of a step."""

    batch: int
    context: float
    ms: float


def prefill_points(models: Iterable[Record], of: str = "ttft_ms") -> list[PrefillPoint]:
    """Points of one or more runs of a model, by n and p. `of`: also `prefill_ms`, the time in the engine alone."""
    found: dict[tuple[int, int], list[float]] = {}
    for model in models:
        for point in model["prefill"]:
            times = [one[of] for one in point["times"] if one[of] is not None]
            found.setdefault((point["n"], point["p"]), []).extend(times)
    return [PrefillPoint(n, p, median(times)) for (n, p), times in sorted(found.items()) if times]


def decode_points(models: Iterable[Record]) -> list[DecodePoint]:
    """Points of one or more runs of a model, by batch and context."""
    found: dict[tuple[int, float], list[float]] = {}
    for model in models:
        for point in model["decode"]:
            times = [one for one in point["pod_itl_ms"] if one is not None] or point["gap_ms"]
            found.setdefault((point["batch"], point["context"]), []).extend(times)
    return [DecodePoint(batch, context, median(times)) for (batch, context), times in sorted(found.items())]


def fit(prefills: Sequence[PrefillPoint], decodes: Sequence[DecodePoint] = ()) -> PodSpeed:
    """Least squares of the relative error, with non-negative coefficients."""
    c0, c1, c2 = _coefficients([((1, one.n - one.p, one.n**2 - one.p**2), one.ms) for one in prefills])
    if not decodes:
        return PodSpeed(c0, c1, c2)
    steps = [((1, one.batch, one.batch * one.context), one.ms) for one in decodes]
    return PodSpeed(c0, c1, c2, *_coefficients(steps))


def fit_launched(prefills: Sequence[PrefillPoint], decodes: Sequence[DecodePoint] = ()) -> PodSpeed:
    """The same with `launch_ms`: of all times that were measured, that which leaves the smallest error. `replay_ms` is
    the median time of prompts that replay CUDA graphs. With too few longer prompts, as `fit`."""
    points = launched(prefills)
    replayed_ms = [one.ms for one in prefills if one not in points]
    replay_ms = median(replayed_ms or [0.0])
    found = []
    for launch_ms in (0.0, *(one.ms for one in points)):
        computed = [one for one in points if one.ms > COMPUTED_FROM * launch_ms]
        if len(computed) >= MIN_COMPUTED:
            speed = replace(_at_most(replay_ms, computed, decodes), launch_ms=launch_ms, replay_ms=replay_ms)
            found.append(replace(speed, graph_tokens=GRAPH_SIZES[-1]))
    return min(found, key=lambda speed: error(speed, prefills), default=fit(prefills, decodes))


def _at_most(c0_ms: float, prefills: Sequence[PrefillPoint], decodes: Sequence[DecodePoint]) -> PodSpeed:
    """As `fit`: the fixed part of long prompts cannot exceed the time of the shortest."""
    speed = fit(prefills, decodes)
    if speed.c0_ms <= c0_ms:
        return speed
    rest = [((one.n - one.p, one.n**2 - one.p**2), one.ms - c0_ms) for one in prefills]
    c1, c2 = _coefficients(rest)
    return replace(speed, c0_ms=c0_ms, c1_ms_per_token=c1, c2_ms_per_token2=c2)


def launched(prefills: Iterable[PrefillPoint]) -> list[PrefillPoint]:
    """Prompts whose kernels are launched one by one: they are longer than the captured CUDA graphs."""
    return [one for one in prefills if one.n - one.p > GRAPH_SIZES[-1]]


def halves(points: Sequence[PrefillPoint]) -> tuple[list[PrefillPoint], list[PrefillPoint]]:
    """Every second point, and the others: both have all lengths and cached shares."""
    return list(points[::2]), list(points[1::2])


def error(speed: PodSpeed, prefills: Sequence[PrefillPoint]) -> float:
    """Mean absolute relative error of expected prefill times, with the launch if it is known."""
    return fmean(abs(expected_ms(speed, one) / one.ms - 1) for one in prefills)


def expected_ms(speed: PodSpeed, prompt: PrefillPoint) -> float:
    """As the simulator expects it on an idle pod."""
    return max(speed.prefill_ms(prompt.n, prompt.p), speed.least_ms(prompt.n - prompt.p))


def decode_error(speed: PodSpeed, decodes: Sequence[DecodePoint]) -> float:
    """Mean absolute relative error of expected decode steps."""
    return fmean(abs(speed.step_ms(one.batch, one.batch * one.context) / one.ms - 1) for one in decodes)


def _coefficients(measured: Sequence[tuple[tuple[float, ...], float]]) -> list[float]:
    """Without terms whose coefficient would be negative: noise can make a small one so."""
    terms = np.array([row for row, _ in measured], dtype=float)
    ms = np.array([value for _, value in measured])
    weighted = terms / ms[:, None]
    kept = list(range(terms.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(weighted[:, kept], np.ones(len(ms)), rcond=None)
        negative = [term for term, value in zip(kept, found, strict=True) if value < 0]
        if not negative:
            break
        kept.remove(negative[0])
    result = [0.0] * terms.shape[1]
    for term, value in zip(kept, found, strict=True):
        result[term] = float(value)
    return result
