"""Would a verdict hold if the noise were not independent, equal and as large as stated?

The F-tests assume independent errors of equal variance (times known weights). Three checks on every pair of
ladders, vectorised over data sets:

    trend        the standard deviation changes along the ladder by a constant factor per unit of log compute
    correlation  errors of neighbouring rungs of a ladder are correlated (an AR(1) process along the ladder)
    scatter      the residual scatter exceeds a stated noise (chi-square)

For trend and correlation, the tests are repeated by generalised least squares under a grid of noise models,
linearised at the fit, and their p-values averaged with weights from the restricted likelihood: of laws with
one E where it is tenable, else of separate laws, which absorb more of a slow error and tell less about it. A
short ladder says little about its own noise: with eight rungs per arm these weights are nearly flat in the
correlation, so the average mostly asks whether the claim survives noise that the data cannot exclude.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import special

from steepen.laws.distributions import f_p_value
from steepen.laws.fits.solver import Array, Mask, jacobian
from steepen.laws.hypotheses.nested_models import (
    Answers,
    DecisionRule,
    FTests,
    NestedFits,
    answer_questions,
    f_test_hypotheses,
    fit_hypotheses,
)

NoiseKind = Literal["trend", "correlation"]
NOISE_KINDS: tuple[NoiseKind, ...] = ("trend", "correlation")
# Ratio of the standard deviations at the lowest and the highest compute; 1 is equal noise.
TREND_RATIOS = (1.0, 2.0, 4.0, 8.0, 16.0, 0.5, 0.25, 0.125)
CORRELATIONS = (0.0, 0.3, 0.6, 0.8, 0.9)
CHECK_LEVEL = 0.05
HUBER_WIDTH = 1.345  # in standard deviations: 95% efficient for normal noise
MAX_POINTS_CHECKED = 200  # the noise models are dense matrices


@dataclass(frozen=True, eq=False)
class NoiseCheck:
    """One departure from independent, equal noise, one value per data set.

    `p_value` is that of the likelihood-ratio test of equal, independent noise; `estimate` the most likely
    value (SD at the lowest over SD at the highest compute, or the correlation of neighbouring rungs).
    `p_difference`, `p_slope` and `p_shift` are the tests' p-values averaged over the noise models.
    """

    p_value: Array
    estimate: Array
    p_difference: Array
    p_slope: Array
    p_shift: Array

    def holds(self, answers: Answers, level: float = CHECK_LEVEL) -> Mask:
        """Whether each answer to the first question is also reached with the averaged p-values.

        Also where several arms share a level, the averaged p-values are held against that of a single arm.
        """
        sloped = np.isin(answers.growth, ["grows", "shrinks"])
        level_shift = np.isin(answers.growth, ["constant", "worse"])
        decided = np.where(sloped, self.p_slope, np.where(level_shift, self.p_shift, 0.0))
        return (answers.growth == "undecided") | ((self.p_difference < level) & (decided < level))

    def failed(self, answers: Answers) -> Mask:
        """Whether equal, independent noise is rejected and the answer does not hold without it."""
        return (self.p_value < CHECK_LEVEL) & ~self.holds(answers)


def check_noise(fits: NestedFits, y: Array, rule: DecisionRule) -> dict[NoiseKind, NoiseCheck]:
    """Trend and correlation of the noise, and the tests averaged over them; empty for too few or many points.

    `y` is (data sets, points). Paired ladders are checked by the differences of partners.
    """
    points, parameters = len(fits.pair.x), fits.designs["free"].n_parameters
    if points > MAX_POINTS_CHECKED or points - parameters < 2 or (fits.weights <= 0).any():
        return {}
    model = _linear_model(fits, y, rule)
    x, ladder = fits.pair.x, fits.pair.arm.astype(int)
    if fits.pair.partners is not None:
        x, ladder = x[fits.pair.partners[1]], np.zeros(len(fits.pair.partners[1]), int)
    weights = np.sqrt(model.weights)
    position = (x - x.min()) / max(float(np.ptp(x)), 1e-12)
    whiteners: dict[NoiseKind, list[Array]] = {
        "trend": [np.diag(weights * ratio**position) for ratio in TREND_RATIOS],
        "correlation": [_decorrelate(x, ladder, rho) * weights for rho in CORRELATIONS],
    }
    values: dict[NoiseKind, tuple[float, ...]] = {"trend": TREND_RATIOS, "correlation": CORRELATIONS}
    return {kind: _average(model, whiteners[kind], np.array(values[kind])) for kind in NOISE_KINDS}


def judge_checked(
    tests: FTests, checks: dict[NoiseKind, NoiseCheck], rule: DecisionRule
) -> tuple[Answers, Mask]:
    """The answers after the noise checks, and which of them are fragile.

    An answer whose check failed becomes *undecided*. It is fragile where equal and independent noise is not
    rejected but the answer needs it.
    """
    answers = answer_questions(tests, rule)
    failed = np.zeros(len(answers.growth), bool)
    holds = np.ones(len(answers.growth), bool)
    for check in checks.values():
        failed |= check.failed(answers)
        holds &= check.holds(answers)
    growth = np.where(failed, "undecided", answers.growth)
    return Answers(growth, np.where(failed, "", answers.by_what)), ~failed & ~holds


def scatter_p_value(fits: NestedFits, rule: DecisionRule) -> Array:
    """p-value of a scatter as large as the residuals' if the noise is as stated; 1 without a stated noise."""
    if rule.noise is None:
        return np.ones(len(fits.scale))
    noise = rule.noise / (fits.scale if rule.log else 1.0)
    df = np.maximum(fits.degrees_of_freedom("free"), 1e-9)
    return np.where(fits.degrees_of_freedom("free") > 0, special.chdtrc(df, fits.rss("free") / noise**2), 1.0)


def robust_tests(fits: NestedFits, y: Array, rule: DecisionRule) -> FTests:
    """Tests with Huber weights: points off the free law count less, however far off they are."""
    design, x = fits.designs["free"], fits.pair.x
    found, weights = fits, fits.weights
    spare = np.maximum(fits.degrees_of_freedom("free"), 1.0)
    for _ in range(4):
        predicted = design.predict(found.solutions["free"].theta, x)
        size = np.abs(_residual(y, predicted, log=rule.log)) * np.sqrt(fits.weights)
        scale = 1.4826 * np.median(size, axis=1) * np.sqrt(len(x) / spare)
        width = HUBER_WIDTH * np.maximum(scale, 1e-12)[:, None]
        weights = fits.weights * np.minimum(1.0, width / np.maximum(size, 1e-300))
        found = fit_hypotheses(fits.pair, y, rule, weights=weights, warm_start=found)
    return f_test_hypotheses(found, rule)


def _residual(y: Array, predicted: Array, *, log: bool) -> Array:
    return np.log(y) - np.log(np.maximum(predicted, 1e-300)) if log else y - predicted


@dataclass(frozen=True, eq=False)
class _LinearModel:
    """The exponent hypothesis and the free model, linearised at their fits: (sets, points, columns).

    `common` are the columns of the reference's law, `shift` and `slope` those of Δ log A and Δγ; `data` are
    the losses less the law without a difference between the arms. `one_e` marks data sets in which one E for
    both arms is tenable.
    """

    weights: Array
    common: Array
    shift: Array
    slope: Array
    data: Array
    free: Array
    free_residual: Array
    one_e: Mask


def _linear_model(fits: NestedFits, y: Array, rule: DecisionRule) -> _LinearModel:
    log = rule.log
    one_e = f_test_hypotheses(fits, rule).p_exponent_hypothesis >= CHECK_LEVEL
    free, theta = fits.solutions["free"].theta, fits.solutions["exponent"].theta
    x, designs = fits.pair.x, fits.designs
    predicted = designs["exponent"].predict(theta, x)
    j = jacobian(designs["exponent"], x, theta, log)  # E, log A, Δ log A, γ, Δγ
    data = _residual(y, predicted, log=log) + j[:, :, 2] * theta[:, 2:3] + j[:, :, 4] * theta[:, 4:5]
    if fits.pair.partners is None:
        return _LinearModel(
            fits.weights[0], j[:, :, [0, 1, 3]], j[:, :, 2:3], j[:, :, 4:5], data,
            jacobian(designs["free"], x, free, log),
            _residual(y, designs["free"].predict(free, x), log=log), one_e,
        )  # fmt: skip
    first, second = fits.pair.partners
    difference = data[:, second] - data[:, first]
    offset = 1 / np.maximum(predicted[:, second], 1e-300) if log else np.ones_like(difference)
    shift, slope = j[:, second, 2:3], j[:, second, 4:5]
    weights = 1 / (1 / fits.weights[0, first] + 1 / fits.weights[0, second])
    every = np.concatenate([offset[:, :, None], shift, slope], axis=2)
    return _LinearModel(weights, shift[:, :, :0], shift, slope, difference, every, difference, one_e)


def _decorrelate(x: Array, ladder: NDArray[np.intp], rho: float) -> Array:
    """The matrix that makes AR(1) errors along each ladder independent: (points, points)."""
    matrix = np.eye(len(x))
    for one in np.unique(ladder):
        own = np.flatnonzero(ladder == one)
        order = own[np.argsort(x[own])]
        matrix[order[1:], order[1:]] = 1 / np.sqrt(1 - rho**2)
        matrix[order[1:], order[:-1]] = -rho / np.sqrt(1 - rho**2)
    return matrix


def _average(model: _LinearModel, whiteners: list[Array], values: Array) -> NoiseCheck:
    """Tests averaged over noise models by restricted likelihood; the first is equal, independent noise."""
    sets, points = model.data.shape
    shifted = np.concatenate([model.common, model.shift], axis=2)
    full = np.concatenate([shifted, model.slope], axis=2)
    likelihood, p_difference, p_slope, p_shift = (np.empty((sets, len(whiteners))) for _ in range(4))
    for k, whitener in enumerate(whiteners):
        # A noise model other than the first has a parameter of its own.
        freedom = points - full.shape[2] - (k > 0)
        data = model.data @ whitener.T
        likelihood[:, k] = np.linalg.slogdet(whitener)[1] + np.where(
            model.one_e,
            _log_restricted(whitener @ full, data),
            _log_restricted(whitener @ model.free, model.free_residual @ whitener.T),
        )
        none, one, two = (_least_squares(whitener @ part, data)[0] for part in (model.common, shifted, full))
        p_difference[:, k] = _p(none, two, 2.0, freedom)
        p_slope[:, k] = _p(one, two, 1.0, freedom)
        p_shift[:, k] = _p(none, one, 1.0, freedom + 1)
    best = likelihood.max(axis=1, keepdims=True)
    weight = np.exp(likelihood - best)
    weight /= weight.sum(axis=1, keepdims=True)
    ratio = 2 * (best[:, 0] - likelihood[:, 0])
    return NoiseCheck(
        p_value=special.chdtrc(1.0, np.maximum(ratio, 0.0)),
        estimate=values[likelihood.argmax(axis=1)],
        p_difference=(weight * p_difference).sum(axis=1),
        p_slope=(weight * p_slope).sum(axis=1),
        p_shift=(weight * p_shift).sum(axis=1),
    )


def _log_restricted(design: Array, y: Array) -> Array:
    """Log restricted likelihood of independent, equal noise of unknown size, up to a constant."""
    rest, log_determinant = _least_squares(design, y)
    spare = design.shape[1] - design.shape[2]
    return -0.5 * (log_determinant + spare * np.log(np.maximum(rest, 1e-300)))


def _p(small: Array, large: Array, extra: float, df: int) -> Array:
    return f_p_value(
        (small - large) / extra / np.maximum(large / max(df, 1), 1e-300), extra, np.array(float(df))
    )


def _least_squares(design: Array, y: Array) -> tuple[Array, Array]:
    """RSS and log |XᵀX| of a linear fit to each data set: (sets, points, parameters), (sets, points)."""
    if not design.shape[2]:
        return (y * y).sum(axis=1), np.zeros(len(y))
    scale = np.sqrt((design * design).sum(axis=1)) + 1e-300
    scaled = design / scale[:, None, :]
    normal: NDArray[np.float64] = np.swapaxes(scaled, 1, 2) @ scaled
    normal = normal + 1e-13 * np.eye(normal.shape[1])
    right = np.einsum("bni,bn->bi", scaled, y)
    found = np.linalg.solve(normal, right[:, :, None])[:, :, 0]
    rest = y - np.einsum("bni,bi->bn", scaled, found)
    return (rest * rest).sum(axis=1), np.linalg.slogdet(normal)[1] + 2 * np.log(scale).sum(axis=1)
