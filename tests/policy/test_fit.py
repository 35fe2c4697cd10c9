"""A few coefficients are found in noisy sums of them, and kept in their bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policy.fit import MAX_EVIDENCE, MAX_LOG_DISTANCE, Fit, FitState, Vector

TRUE = (20.0, 0.05, 8e-7)
SHAPE_SD = (1.5, 0.7, 0.7)


def features(random: Random) -> Vector:
    """Draws a prompt of 100 to 32,000 tokens, cached to some part or not at all."""
    n = int(math.exp(random.uniform(math.log(100), math.log(32_000))))
    p = int(n * random.choice([0, 0, 0.3, 0.5, 0.9]))
    return 1.0, float(n - p), float(n * n - p * p)


def time_ms(coefficients: Vector, of: Vector) -> float:
    return sum(c * x for c, x in zip(coefficients, of, strict=True))


@dataclass
class Noise:
    """10 % of lognormal noise, and in `outliers` of the cases a factor between `worst` and its inverse, or just it."""

    random: Random
    outliers: float = 0.03
    worst: tuple[float, ...] = (5.0, 0.2)
    sd: float = 0.1

    def __call__(self, ms: float) -> float:
        ms *= math.exp(self.random.gauss(0, self.sd))
        return ms * self.random.choice(self.worst) if self.random.random() < self.outliers else ms


@dataclass
class Lesson:
    """A fit that observes the truth through noise."""

    fit: Fit
    random: Random
    truth: Vector = TRUE
    noise: Noise = field(init=False)

    def __post_init__(self) -> None:
        self.noise = Noise(self.random)

    def go_on(self, observations: int) -> Lesson:
        for _ in range(observations):
            x = features(self.random)
            self.fit.observe(x, self.noise(time_ms(self.truth, x)))
        return self

    @property
    def error(self) -> float:
        """Mean absolute relative one of what is predicted of 300 prompts."""
        random = Random(1)
        prompts = [features(random) for _ in range(300)]
        return sum(abs(time_ms(self.fit.coefficients, x) / time_ms(self.truth, x) - 1) for x in prompts) / 300


def lesson(factors: Vector = (1, 1, 1), seed: int = 0) -> Lesson:
    """From a prior that is off by these factors."""
    prior = tuple(c * factor for c, factor in zip(TRUE, factors, strict=True))
    return Lesson(Fit(prior, SHAPE_SD), Random(seed))


WRONG = [
    tuple(factor if i in which else 1.0 for i in range(3))
    for factor in (3.0, 1 / 3)
    for which in ((0, 1, 2), (0,), (1,), (2,), (0, 2))
]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("factors", WRONG)
def test_a_prior_that_is_wrong_by_three_is_right_after_200_observations(factors: Vector, seed: int) -> None:
    """In all terms or in single ones, with 10 % of noise and 3 % of outliers."""
    assert lesson(factors, seed).go_on(200).error < 0.08


def test_the_prior_is_uncertain_about_the_common_factor_and_about_each_coefficient() -> None:
    """Variances: 1.2 squared for the factor, and the square of each coefficient's own deviation."""
    first, second = Fit((1.0, 2.0), (0.5, 1.5)).state().covariance
    assert first == pytest.approx((1.44 + 0.25, 1.44))
    assert second == pytest.approx((1.44, 1.44 + 2.25))


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
def test_a_factor_common_to_all_is_found_first(factor: float) -> None:
    """Within a dozen observations most of it is gone, before anything is known of the shape."""
    learner = lesson((factor,) * 3, seed=2)
    learner.noise.outliers = 0.0
    assert learner.go_on(12).error < 0.15


def test_equal_prompts_move_the_scale_and_hardly_the_shape() -> None:
    """One kind of prompt that takes three times as long says that all of them may."""
    fit = Fit(TRUE, SHAPE_SD)
    long = (1.0, 8000.0, 8000.0**2)
    for _ in range(20):
        fit.observe(long, 3 * time_ms(TRUE, long))
    c0, c1, c2 = (c / true for c, true in zip(fit.coefficients, TRUE, strict=True))
    assert 2.5 < c1 < 3.5
    assert c2 == pytest.approx(c1, rel=0.25)
    assert 1.5 < c0 < c1


@pytest.mark.parametrize("factor", [2.0, 0.5])
@pytest.mark.parametrize("seed", range(4))
def test_a_drift_is_followed_within_150_observations(factor: float, seed: int) -> None:
    """Once converged, a fit is not stubborn."""
    learner = lesson(seed=seed).go_on(300)
    learner.truth = tuple(factor * c for c in TRUE)
    assert learner.error > 0.4
    assert learner.go_on(150).error < 0.1


@pytest.mark.parametrize("worst", [(3.0,), (10.0, 30.0, 100.0), (0.01, 0.1, 10.0, 100.0)])
@pytest.mark.parametrize("seed", range(4))
def test_a_burst_of_garbage_does_not_throw_it_off(worst: tuple[float, ...], seed: int) -> None:
    """60 observations of which 30 % are wrong, even if all of them are so in the same way; then it heals."""
    learner = lesson(seed=seed).go_on(200)
    learner.noise.outliers, learner.noise.worst = 0.3, worst
    assert learner.go_on(60).error < 0.16
    learner.noise.outliers = 0.0
    assert learner.go_on(60).error < 0.06


def test_confidence_grows_and_what_is_given_out_moves_from_the_prior_with_it() -> None:
    """Nothing seen: the prior. Ten prompts: most of the way."""
    learner = lesson((3.0, 3.0, 3.0))
    assert learner.fit.confidence == 0
    assert learner.fit.coefficients == learner.fit.prior
    steps = [learner.go_on(1).fit.confidence for _ in range(30)]
    assert 0.3 < steps[0] < 0.8
    assert 0.85 < steps[-1] <= 1
    assert learner.fit.error_after < 0.5 * learner.fit.error_before


def test_one_observation_changes_a_fit_only_in_part() -> None:
    """Neither by the fit nor by what it gives out, which stays between it and the prior."""
    fit, some = Fit(TRUE, SHAPE_SD), (1.0, 2000.0, 2000.0**2)
    fit.observe(some, 3 * time_ms(TRUE, some))
    given, fitted = fit.coefficients, [math.exp(log) for log in fit.state().log_coefficients]
    for prior, moved, all_the_way in zip(TRUE, given, fitted, strict=True):
        assert prior < 1.1 * prior < moved < 0.95 * all_the_way < 3 * prior
    assert time_ms(given, some) < 2.3 * time_ms(TRUE, some)


def test_sameness_makes_nothing_unstable() -> None:
    """Thousands of equal prompts say nothing of the shape: it stays near the prior's."""
    fit, random = Fit(TRUE, SHAPE_SD), Random(3)
    noise = Noise(random)
    alike = (1.0, 500.0, 500.0**2)
    for _ in range(5000):
        fit.observe(alike, noise(2 * time_ms(TRUE, alike)))
    assert time_ms(fit.coefficients, alike) == pytest.approx(2 * time_ms(TRUE, alike), rel=0.1)
    other = (1.0, 32_000.0, 32_000.0**2)
    assert 0.3 < time_ms(fit.coefficients, other) / time_ms(TRUE, other) < 4


@given(
    st.lists(
        st.tuples(st.integers(1, 100), st.floats(0, 1e7), st.floats(0, 1e14), st.floats(0.01, 3.6e6)),
        min_size=1,
        max_size=60,
    )
)
def test_whatever_is_observed_coefficients_stay_in_bounds(seen: list[tuple[int, float, float, float]]) -> None:
    """Above 0, within a factor of 100 of the prior, and what is kept of them can be restored."""
    fit = Fit(TRUE, SHAPE_SD)
    for starts, tokens, tokens2, ms in seen:
        fit.observe((float(starts), tokens, tokens2), ms)
        assert 0 <= fit.confidence <= 1
        for c, prior in zip(fit.coefficients, TRUE, strict=True):
            assert abs(math.log(c / prior)) <= MAX_LOG_DISTANCE * (1 + 1e-9)
    assert Fit.restored(fit.state(), SHAPE_SD).coefficients == fit.coefficients


def test_a_restored_fit_goes_on_as_the_one_that_was_kept() -> None:
    """To the last bit."""
    one = lesson((3.0, 1.0, 1.0)).go_on(30)
    other = Lesson(Fit.restored(one.fit.state(), SHAPE_SD), Random(8))
    one = Lesson(one.fit, Random(8))
    assert one.go_on(5).fit.state() == other.go_on(5).fit.state()


def test_evidence_stops_growing_where_more_makes_no_better_fit() -> None:
    """So that an old fit and a very old one are equals."""
    assert lesson().go_on(MAX_EVIDENCE + 20).fit.evidence == MAX_EVIDENCE


GOOD = lesson().go_on(10).fit.state()


@pytest.mark.parametrize(
    "state",
    [
        msgspec.structs.replace(GOOD, prior=(1.0, 1.0)),
        msgspec.structs.replace(GOOD, covariance=GOOD.covariance[:2]),
        msgspec.structs.replace(GOOD, covariance=((1.0, 2.0, 0.0), (2.0, 1.0, 0.0), (0.0, 0.0, 1.0))),
        msgspec.structs.replace(GOOD, covariance=((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 0.0))),
        msgspec.structs.replace(GOOD, covariance=((1.0, 0.5, 0.0), (0.4, 1.0, 0.0), (0.0, 0.0, 1.0))),
        msgspec.structs.replace(GOOD, covariance=((99.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))),
        msgspec.structs.replace(GOOD, shares=(0.0, 0.0, 0.0)),
        msgspec.structs.replace(GOOD, log_coefficients=(300.0, 0.0, 0.0)),
    ],
)
def test_what_no_fit_can_have_been_is_not_restored(state: FitState) -> None:
    """Wrong sizes, matrices that are no covariance, coefficients out of bounds."""
    with pytest.raises(ValueError, match=r"coefficients|covariance"):
        Fit.restored(state, SHAPE_SD)
