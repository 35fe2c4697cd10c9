"""Fits a few coefficients to noisy times that are their weighted sums.

    time = c[0] x[0] + c[1] x[1] + ...        c unknown and above 0, x known

A recursive fit (an extended Kalman filter) of the *logarithms* of the coefficients to the logarithm of the time. So
errors count relatively, and no coefficient can become negative. The prior is most uncertain about a factor common to
all coefficients: this factor is found first, and the ratios follow with more evidence. Outliers get low (Cauchy)
weights. Pure arithmetic, O(1) per observation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import mul
from typing import Annotated, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta

Vector: TypeAlias = tuple[float, ...]

SCALE_SD = 1.2
"""Prior uncertainty of the common factor, as a natural logarithm: one sigma is a factor of 3.3."""
RELAX = 1e-5
"""Share by which each observation moves the uncertainty back to the prior's, so that a fit follows a drift: about the
last hundred observations count, and a drift by a factor of 2 takes about as many."""
NOISE = 0.12
EARLY_NOISE = 60
EARLY = 20
"""Assumed relative noise of observation k: NOISE (1 + EARLY_NOISE / (EARLY + k)). It falls from 0.5 to 0.15, so that an
early outlier has little effect; fitting the noise as well brought no gain at a true noise of 5 to 25 %."""
OUTLIER_SCALE = 2.4
"""Scale of the Cauchy weight, in standard deviations: 95 % efficient without outliers."""
MAX_LOG_DISTANCE = math.log(100)
"""Maximum distance of a coefficient from its prior."""
MEMORY = 50
"""Observations in the running means of term shares and errors."""
MAX_ERROR = 3.0
"""Maximum error of one observation in the running mean."""
MAX_EVIDENCE = 200
"""Maximum count of observations: a fit forgets older ones."""

_FiniteVector: TypeAlias = tuple[Annotated[float, Meta(ge=-1e9, le=1e9)], ...]
_Error: TypeAlias = Annotated[float, Meta(ge=0, le=MAX_ERROR)]


class FitState(msgspec.Struct, frozen=True):
    """A serialized fit: one value per coefficient; `covariance` by row."""

    prior: tuple[Annotated[float, Meta(gt=0, le=1e9)], ...]
    log_coefficients: _FiniteVector
    covariance: tuple[_FiniteVector, ...]
    shares: tuple[Annotated[float, Meta(ge=0, le=1)], ...]
    evidence: Annotated[int, Meta(ge=0, le=MAX_EVIDENCE)]
    error_before: _Error
    error_after: _Error


class Fit:
    """`prior` and `shape_sd` have one value above 0 for each coefficient; `shape_sd` is its uncertainty beyond the
    common factor, as a natural logarithm. `evidence` counts observations; `confidence` is 0 to 1; the errors are mean
    absolute relative errors of the prior (`error_before`) and of the coefficients at the time (`error_after`)."""

    def __init__(self, prior: Vector, shape_sd: Vector) -> None:
        self.prior = prior
        self.coefficients = prior
        """Between the prior and the fitted coefficients, by confidence."""
        self.confidence = 0.0
        self.evidence = 0
        self.error_before = self.error_after = 0.0
        self._prior_log = [math.log(value) for value in prior]
        self._prior_covariance = [
            [SCALE_SD**2 + (sd**2 if row == column else 0.0) for column in range(len(prior))]
            for row, sd in enumerate(shape_sd)
        ]
        self._log = self._prior_log
        self._covariance = self._prior_covariance
        self._shares = [1 / len(prior)] * len(prior)

    def residual(self, features: Vector, observed: float) -> float:
        """Natural logarithm of observed over expected time."""
        return math.log(observed) - math.log(_dot(self.coefficients, features))

    def observe(self, features: Vector, observed: float) -> None:
        """Update the fit. `observed` and at least one feature are above 0."""
        self._count_errors(features, observed)
        terms = list(map(mul, map(math.exp, self._log), features))
        expected = sum(terms)
        shares = [term / expected for term in terms]
        self._update(math.log(observed) - math.log(expected), shares)
        rate = 1 / min(self.evidence, MEMORY)
        self._shares = [old + (new - old) * rate for old, new in zip(self._shares, shares, strict=True)]
        self._update_confidence()

    def _update(self, error: float, shares: list[float]) -> None:
        """One step of the filter. The derivative of the log time by a log coefficient is its term's share."""
        side = [_dot(row, shares) for row in self._covariance]
        known = _dot(side, shares)
        noise = (NOISE * (1 + EARLY_NOISE / (EARLY + self.evidence))) ** 2
        noise *= 1 + error * error / (OUTLIER_SCALE**2 * (noise + known))
        gain = [value / (noise + known) for value in side]
        self._move([step * error for step in gain])
        self._covariance = [
            [old - step * other + RELAX * (prior - old) for old, other, prior in zip(row, side, priors, strict=True)]
            for row, step, priors in zip(self._covariance, gain, self._prior_covariance, strict=True)
        ]

    def _move(self, steps: Iterable[float]) -> None:
        self._log = [
            min(max(log + step, prior - MAX_LOG_DISTANCE), prior + MAX_LOG_DISTANCE)
            for log, step, prior in zip(self._log, steps, self._prior_log, strict=True)
        ]

    def shift(self, log_factor: float) -> None:
        """Multiply all coefficients."""
        self._move([log_factor] * len(self._log))
        self._update_confidence()

    def _update_confidence(self) -> None:
        """Update confidence: the remaining uncertainty of a typical time relative to the prior's."""
        uncertainty = _square(self._covariance, self._shares) / _square(self._prior_covariance, self._shares)
        trust = self.confidence = 1 - math.sqrt(min(max(uncertainty, 0.0), 1.0))
        self.coefficients = tuple(
            [math.exp(prior + trust * (log - prior)) for log, prior in zip(self._log, self._prior_log, strict=True)]
        )

    def _count_errors(self, features: Vector, observed: float) -> None:
        self.evidence = min(self.evidence + 1, MAX_EVIDENCE)
        rate = 1 / min(self.evidence, MEMORY)
        self.error_before += (_error(self.prior, features, observed) - self.error_before) * rate
        self.error_after += (_error(self.coefficients, features, observed) - self.error_after) * rate

    # --- serialization ---

    def state(self) -> FitState:
        return FitState(
            prior=self.prior,
            log_coefficients=tuple(self._log),
            covariance=tuple(tuple(row) for row in self._covariance),
            shares=tuple(self._shares),
            evidence=self.evidence,
            error_before=self.error_before,
            error_after=self.error_after,
        )

    @classmethod
    def restored(cls, state: FitState, shape_sd: Vector) -> Fit:
        """The fit of that state. Raises `ValueError` for an impossible state."""
        sizes = {len(state.prior), len(state.log_coefficients), len(state.shares), len(state.covariance)}
        if sizes | {len(row) for row in state.covariance} != {len(shape_sd)}:
            raise ValueError(f"not a fit of {len(shape_sd)} coefficients")
        fit = cls(state.prior, shape_sd)
        fit._log, fit._covariance = list(state.log_coefficients), [list(row) for row in state.covariance]
        fit._shares, fit.evidence = list(state.shares), state.evidence
        fit.error_before, fit.error_after = state.error_before, state.error_after
        if any(abs(log - prior) > 1.01 * MAX_LOG_DISTANCE for log, prior in zip(fit._log, fit._prior_log, strict=True)):
            raise ValueError("coefficients out of bounds")
        if not sum(fit._shares) or not _is_covariance(fit._covariance):
            raise ValueError("invalid covariance")
        if any(row[i] > 1.01 * fit._prior_covariance[i][i] for i, row in enumerate(fit._covariance)):
            raise ValueError("covariance wider than the prior's")
        fit._update_confidence()
        return fit


def _dot(one: Iterable[float], other: Sequence[float]) -> float:
    total: float = sum(map(mul, one, other))
    return total


def _square(matrix: Iterable[Iterable[float]], vector: Sequence[float]) -> float:
    return _dot([_dot(row, vector) for row in matrix], vector)


def _error(coefficients: Vector, features: Vector, observed: float) -> float:
    return min(abs(_dot(coefficients, features) / observed - 1), MAX_ERROR)


def _is_covariance(matrix: Sequence[Sequence[float]]) -> bool:
    """Whether it is symmetric and positive definite."""
    values = np.array(matrix)
    return bool(np.allclose(values, values.T, rtol=0, atol=1e-9) and (np.linalg.eigvalsh(values) > 0).all())
