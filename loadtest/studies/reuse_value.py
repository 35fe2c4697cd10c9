"""What is a cached prompt worth: milliseconds of prefill that keeping it saves, for each second that it is kept.

    value(class, age) = max over T of  P(used again within T) * ms per token / E[seconds kept until then, at most T]

This is the Gittins index of a prompt that was not used for `age`. The probabilities are hazards of reuse by age, learnt
for each class of prompts: turn of the conversation, and interval since the turn before. A class with little data takes
the hazard of all classes, and those the prior: `PRIOR_REUSE` of the prompts are used again, after `PRIOR_AGE_S` on
average. Nothing looks ahead. The caller bounds the number of prompts that it follows.

Source: hit density by age and class as in LHD (Beckmann, Chen, Cidon 2018), with the best horizon instead of the mean.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

AGES_S = (0, 4, 8, 15, 22, 30, 40, 50, 60, 75, 90, 110, 135, 165, 200, 240, 290, 350, 430, 520, 640, 800, 1000, 1300)
"""Lower bounds of the age buckets; the last one ends at `LAST_AGE_S`."""
LAST_AGE_S = 1700.0
TURNS = (1, 2, 4)
INTERVALS_S = (15.0, 60.0, 240.0)
CLASSES = (len(TURNS) + 1) * (len(INTERVALS_S) + 1)
PRIOR_REUSE = 0.3
PRIOR_AGE_S = 150.0
PRIOR_PROMPTS = 4.0
"""Weight of the hazard of all classes in that of one, and of the prior in that of all, in prompts."""
MAX_HAZARD = 0.95


def class_of(turn: int, interval_s: float) -> int:
    """Class of a prompt, from 0 to `CLASSES` - 1. The first turn is 0 and has interval 0."""
    return bisect_right(TURNS, turn) * (len(INTERVALS_S) + 1) + bisect_right(INTERVALS_S, interval_s)


def age_bucket(age_s: float) -> int:
    """Bucket of an age; the last one if it is older."""
    return bisect_right(AGES_S, age_s) - 1


class ReuseValue:
    """Hazards of reuse, and the values that follow from them. Counts are in prompts; a part of a prompt counts as its
    share."""

    def __init__(self, classes: int = CLASSES) -> None:
        shape = classes, len(AGES_S)
        self._used = np.zeros(shape)
        """Prompts used again at each age."""
        self._reached = np.zeros(shape)
        """Prompts that came to each age unused."""
        edges = np.array([*AGES_S, LAST_AGE_S])
        self._width_s = np.diff(edges)
        unused = 1 - PRIOR_REUSE * (1 - np.exp(-edges / PRIOR_AGE_S))
        self._prior = 1 - unused[1:] / unused[:-1]
        self.learn()

    def reached(self, cls: int, first: int, end: int, share: float) -> None:
        """A prompt of `cls`, of which `share` is still unused, came to the ages of buckets [first, end)."""
        self._reached[cls, first:end] += share

    def used(self, cls: int, bucket: int, share: float) -> None:
        """A prompt was used again."""
        self._used[cls, bucket] += share

    def learn(self) -> None:
        """Compute values from the counts. O(classes x ages^2): about a millisecond."""
        weight = PRIOR_PROMPTS
        pooled = (self._used.sum(0) + weight * self._prior) / (self._reached.sum(0) + weight)
        hazard = np.minimum((self._used + weight * pooled) / (self._reached + weight), MAX_HAZARD)
        self._per_s = np.column_stack([self._best_rate(hazard, age) for age in range(len(AGES_S))])

    def per_s(self, classes: Sequence[int], ages_s: Sequence[float]) -> NDArray[np.float64]:
        """Expected uses per second kept of prompts with these classes and ages."""
        buckets = np.searchsorted(AGES_S, ages_s, side="right") - 1
        return np.asarray(self._per_s[np.asarray(classes, dtype=int), buckets])

    def _best_rate(self, hazard: NDArray[np.float64], age: int) -> NDArray[np.float64]:
        """By class, the largest ratio of reuse to seconds kept over all horizons that begin with bucket `age`."""
        ahead = hazard[:, age:]
        unused = np.cumprod(1 - ahead, axis=1)
        before = np.column_stack([np.ones(len(hazard)), unused[:, :-1]])
        kept_s = np.cumsum(before * self._width_s[age:] * (1 - ahead / 2), axis=1)
        return np.asarray((np.cumsum(before * ahead, axis=1) / kept_s).max(axis=1))
