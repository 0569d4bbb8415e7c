"""Sizes of the difference between two ladders, with intervals: Δγ, ΔE, multipliers and where laws cross."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from steepen.laws.distributions import Interval, t_quantile
from steepen.laws.fits.profile_likelihood import LeastSquaresFit, profile_intervals
from steepen.laws.fits.solver import Array, solve, unscaled_covariance
from steepen.laws.hypotheses.nested_models import (
    HYPOTHESIS_NAMES,
    DecisionRule,
    FTests,
    Hypothesis,
    LadderPair,
    NestedFits,
    f_test_hypotheses,
    paired_free_fit,
)
from steepen.laws.ladder import Ladder
from steepen.laws.verdict.compare import Comparison
from steepen.laws.verdict.evidence import Crossing, HypothesisFit, Prediction
from steepen.laws.verdict.multipliers import Multiplier
from steepen.laws.verdict.sensitivity import MAX_EXTRA_DECADES

MIN_EXPONENT = 1e-6  # below this a curve counts as not falling with compute
MAX_GROWTH_PER_DECADE = 1e6
POINTS_TO_BUDGET = 16
MAX_MULTIPLIER = 1e30  # above this (or below its inverse) a multiplier is reported as NaN


def common_span(reference: Ladder, arm: Ladder) -> tuple[float, float]:
    """The lowest and highest compute both ladders cover (the reference's, if they share no span)."""
    low, high = max(reference.flops[0], arm.flops[0]), min(reference.flops[-1], arm.flops[-1])
    return (
        (float(low), float(high)) if low < high else (float(reference.flops[0]), float(reference.flops[-1]))
    )


def growth_per_decade(
    leading: Hypothesis,
    fits: NestedFits,
    resampled: NestedFits,
    delta_gamma: float,
    interval: Interval,
    span: Array,
    confidence: float,
) -> tuple[float, Interval]:
    """Factor by which the multiplier grows per decade, the mean over `span` (log compute), and its interval.

    With one E the factor is 10^(Δγ/γ_arm) at every compute, and the interval follows from that of Δγ
    (`interval`), so that it excludes 1 exactly where the test rejects equal slopes. Otherwise the interval
    is that of the residual bootstrap.
    """
    if leading == "exponent":
        gamma = float(fits.solutions["exponent"].theta[0, 3])
        low, high = (_limit_per_decade(gamma, end) for end in interval)
        return _per_decade(gamma, delta_gamma), (low, high)
    decades = (span[1] - span[0]) / math.log(10)

    def growth(found: NestedFits) -> Array:
        log = _log_multiplier(leading, found.solutions[leading].theta, span)
        with np.errstate(invalid="ignore", over="ignore"):
            return np.exp((log[:, 1] - log[:, 0]) / decades)

    value = float(growth(fits)[0])
    # A curve that does not fall has no multiplier, and next to one that hardly falls it says nothing.
    if not 1 / MAX_GROWTH_PER_DECADE < value < MAX_GROWTH_PER_DECADE:
        return math.nan, (math.nan, math.nan)
    drawn = growth(resampled)
    drawn = drawn[np.isfinite(drawn)]
    if not len(drawn):
        return math.nan, (math.nan, math.nan)
    tail = (1 - confidence) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail])
    return value, (float(low), float(high))


def _per_decade(gamma: float, delta: float) -> float:
    """10^(Δγ/γ_arm); NaN if a curve does not fall."""
    return math.nan if min(gamma, gamma + delta) < MIN_EXPONENT else 10 ** (delta / (gamma + delta))


def _limit_per_decade(gamma: float, delta: float) -> float:
    """The same at an end of Δγ's interval: 0 if the arm's curve does not fall there, 10 for Δγ = ∞."""
    if gamma >= MIN_EXPONENT and gamma + delta < MIN_EXPONENT:
        return 0.0
    return 10.0 if delta == math.inf else _per_decade(gamma, delta)


def delta_gamma_interval(
    hypothesis: Hypothesis,
    index: int,
    fits: NestedFits,
    y: Array,
    confidence: float,
    rule: DecisionRule,
) -> Interval:
    """Profile-likelihood interval of Δγ (`index` in θ): all other parameters are refitted.

    For paired ladders it is the t-interval of the tests on differences.
    """
    if fits.pair.partners is not None and hypothesis == "exponent":
        tests = f_test_hypotheses(fits, rule)
        reach = float(
            t_quantile((1 + confidence) / 2, tests.degrees_of_freedom)[0] * tests.delta_gamma_error[0]
        )
        return float(tests.delta_gamma[0]) - reach, float(tests.delta_gamma[0]) + reach
    if fits.pair.partners is not None:
        return _paired_free_interval(2, fits, confidence, rule)
    design, theta = fits.designs[hypothesis], fits.solutions[hypothesis].theta[0]
    weights = fits.weights[0]
    fit = LeastSquaresFit(
        design, fits.pair.x, y, weights, theta, float(fits.rss(hypothesis)[0]),
        float(fits.variance(hypothesis, rule)[0]), rule.log,
    )  # fmt: skip
    df = np.array(math.inf if rule.noise else float(fits.degrees_of_freedom(hypothesis)[0]))
    covariance = unscaled_covariance(design, fits.pair.x, theta, weights=weights, log=rule.log)[0]
    quantile = float(t_quantile((1 + confidence) / 2, df))
    return profile_intervals(fit, [index], covariance, quantile)[0]


def _paired_free_interval(index: int, fits: NestedFits, confidence: float, rule: DecisionRule) -> Interval:
    """The t-interval of ΔE (0) or Δγ (2) in the free model of the differences of partners."""
    values, errors, _, freedom = paired_free_fit(fits, rule)
    reach = float(t_quantile((1 + confidence) / 2, freedom)[0] * errors[0, index])
    return float(values[0, index]) - reach, float(values[0, index]) + reach


def equivalence_interval(tests: FTests, rule: DecisionRule) -> Interval:
    """Interval of Δγ that must lie inside the margin for a constant gain (by t, as in the test)."""
    freedom = np.full(1, np.inf) if rule.noise is not None else tests.degrees_of_freedom[:1]
    reach = float(t_quantile(1 - rule.level, freedom)[0] * tests.delta_gamma_error[0])
    return float(tests.delta_gamma[0]) - reach, float(tests.delta_gamma[0]) + reach


def delta_e_interval(fits: NestedFits, y: Array, confidence: float, rule: DecisionRule) -> Interval:
    """Profile interval of the free model's ΔE: shifts of the arm's losses that leave one E tenable.

    A ΔE of δ is the exponent hypothesis on data whose arm is lower by δ, so the interval contains zero
    exactly where the exponent hypothesis is not rejected at 1 − confidence. Infinite where it is not reached
    within the loss itself. For paired ladders it is the t-interval of the differences.
    """
    if fits.pair.partners is not None:
        return _paired_free_interval(0, fits, confidence, rule)
    arm = fits.pair.arm
    df = math.inf if rule.noise else float(fits.degrees_of_freedom("free")[0])
    limit = float(t_quantile((1 + confidence) / 2, np.array(df))) ** 2
    variance, rss = float(fits.variance("free", rule)[0]), float(fits.rss("free")[0])
    centre = float(fits.solutions["free"].theta[0, 1] - fits.solutions["free"].theta[0, 0])
    start = fits.solutions["free"].theta[:, [0, 2, 3, 4, 5]]
    ends: list[float] = []
    for side in (-1.0, 1.0):
        near, far = 0.0, 0.9 * float(y.min())
        for points in (np.geomspace(1e-7, far, 40), None):
            steps = np.linspace(near, far, 24) if points is None else points
            data = y[None] - (centre + side * steps)[:, None] * arm
            usable = np.min(data, axis=1) > 0
            found = solve(
                fits.designs["exponent"], fits.pair.x, np.maximum(data, 1e-9), start,
                weights=fits.weights, log=rule.log, iterations=120,
            )  # fmt: skip
            outside = ((found.objective - rss) / variance >= limit) | ~usable
            if not outside.any():
                near = math.inf
                break
            first = int(np.argmax(outside))
            if not usable[first]:
                near = math.inf
                break
            near, far = (float(steps[first - 1]) if first else 0.0), float(steps[first])
        ends.append(side * math.inf if math.isinf(near) else centre + side * 0.5 * (near + far))
    return ends[0], ends[1]


def free_crossing(fits: NestedFits, resampled: NestedFits, c0: float, confidence: float) -> Crossing:
    """The first compute above the ladders at which the free model's two laws cross."""
    top = float(fits.pair.x.max())
    line = np.linspace(top, top + MAX_EXTRA_DECADES * math.log(10), 400)

    def crossings(found: NestedFits) -> Array:
        first = _first_crossing(found.solutions["free"].theta, line)
        return np.where(first < len(line), c0 * np.exp(line[np.minimum(first, len(line) - 1)]), np.inf)

    tail = (1 - confidence) / 2
    low, high = np.quantile(crossings(resampled), [tail, 1 - tail], method="nearest")
    return Crossing(float(crossings(fits)[0]), (float(low), float(high)))


def _first_crossing(theta: Array, line: Array) -> NDArray[np.intp]:
    """Index of the first of the points `line` at which the gap between the free model's laws changes sign.

    `len(line)` where it does not. The gap falls and rises at most once, so it is monotone up to the point
    before its extremum and from the point after it, and bisection finds a change of sign.
    """
    e, arm_e, log_a, delta_log_a, gamma, delta_gamma = theta.T

    def sign(index: NDArray[np.intp]) -> Array:
        x = line[index]
        arm = np.exp(log_a + delta_log_a - (gamma + delta_gamma) * x)
        return np.sign(arm_e - e + arm - np.exp(log_a - gamma * x))

    last = len(line) - 1
    with np.errstate(divide="ignore", invalid="ignore"):
        extremum = (delta_log_a + np.log((gamma + delta_gamma) / gamma)) / delta_gamma
    place = np.searchsorted(line, np.where(np.isnan(extremum), np.inf, extremum), side="right") - 1
    before = np.clip(place, 0, last)
    after = np.minimum(before + 1, last)
    begin = sign(np.zeros_like(before))
    differs = [sign(end) != begin for end in (before, after, np.full_like(before, last))]
    low = np.where(differs[0], 0, np.where(differs[1], before, after))
    high = np.where(differs[0], before, np.where(differs[1], after, last))
    while (high - low > 1).any():
        middle = (low + high) // 2
        changed = sign(middle) != begin
        low, high = np.where(changed, low, middle), np.where(changed, middle, high)
    return np.where(differs[0] | differs[1] | differs[2], high, len(line))


def leading_multipliers(
    leading: Hypothesis,
    comparison: Comparison,
    resampled: NestedFits,
    confidence: float,
    budget: float | None,
) -> tuple[Multiplier, ...]:
    """Multipliers of the leading hypothesis at the reference's rungs and at the budget, with bands.

    With separate E the curve bends, so there are points on the way to a budget beyond the ladder.
    """
    reference, arm, c0 = comparison.reference, comparison.arm, comparison.c0
    flops = reference.flops
    if budget is not None:
        beyond = np.geomspace(flops[-1], budget, POINTS_TO_BUDGET + 1)[1:]
        flops = np.append(flops, beyond if budget > flops[-1] else [budget])
    x = np.log(flops / c0)
    value = multipliers_at(leading, comparison.fits, x)
    low, high = _multiplier_bands(leading, resampled, x, confidence)
    found: list[Multiplier] = []
    for i, at in enumerate(flops):
        if not math.isfinite(value[i]):
            continue
        needed = at / value[i]
        inside = at <= reference.flops[-1] and arm.flops[0] <= needed <= arm.flops[-1]
        found.append(
            Multiplier(
                f"fitted ({HYPOTHESIS_NAMES[leading]})",
                float(at),
                float(value[i]),
                float(low[i]),
                float(high[i]),
                not inside,
                leads=True,
            )
        )
    return tuple(found)


def fit_of_hypothesis(
    name: Hypothesis,
    fits: NestedFits,
    resampled: NestedFits,
    tests: FTests,
    *,
    prediction_points: list[tuple[str, float]],
    c0: float,
    confidence: float,
) -> HypothesisFit:
    """Parameters of one hypothesis and its predictions, with bands from the residual bootstrap."""
    design, theta = fits.designs[name], fits.solutions[name].theta
    irreducible, constant, exponent = (part[0] for part in design.split(theta))
    x = np.log(np.array([flops for _, flops in prediction_points]) / c0)
    pair = LadderPair(np.tile(x, 2), np.repeat([False, True], len(x)), np.ones(2 * len(x)))
    losses = pair.designs()[name].predict(theta[0], pair.x).reshape(2, -1)
    value = multipliers_at(name, fits, x)
    low, high = _multiplier_bands(name, resampled, x, confidence)
    p = {"exponent": tests.p_exponent_hypothesis, "irreducible": tests.p_irreducible_hypothesis}.get(name)
    return HypothesisFit(
        hypothesis=name,
        gamma=(float(exponent[0]), float(exponent.sum())),
        log_a=(float(constant[0]), float(constant.sum())),
        e=(float(irreducible[0]), float(irreducible[-1])),
        rss=float(fits.rss(name)[0]),
        p_against_free=None if p is None else float(p[0]),
        predictions=tuple(
            Prediction(
                label,
                flops,
                float(losses[0, i]),
                float(losses[1, i]),
                float(value[i]),
                (float(low[i]), float(high[i])),
            )
            for i, (label, flops) in enumerate(prediction_points)
        ),
    )


def _log_multiplier(hypothesis: Hypothesis, theta: Array, x: Array) -> Array:
    """log(C / C_arm) at the reference's log compute x: (data sets, parameters) θ → (data sets, len(x))."""
    pair = LadderPair(np.tile(x, 2), np.repeat([False, True], len(x)), np.ones(2 * len(x)))
    design = pair.designs()[hypothesis]
    irreducible, constant, exponent = design.split(theta)
    reducible = design.predict(theta, pair.x)[:, : len(x)] - irreducible[:, -1:]
    gamma_arm = exponent.sum(axis=1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        log_ratio = constant.sum(axis=1, keepdims=True) - np.log(reducible)
        # A flat arm is above the reference's loss at every compute, or below it at every compute.
        log = np.where(
            gamma_arm > MIN_EXPONENT, x - log_ratio / gamma_arm, np.where(log_ratio > 0, -np.inf, np.inf)
        )
    # The arm never reaches a loss at or below its irreducible loss.
    return np.where(reducible > 0, log, -np.inf)


def multipliers_at(hypothesis: Hypothesis, fits: NestedFits, x: Array) -> Array:
    """Multipliers of the first data set at the reference's log compute x: (len(x),).

    NaN beyond MAX_MULTIPLIER, where one of the curves does not fall.
    """
    log = _log_multiplier(hypothesis, fits.solutions[hypothesis].theta, x)[0]
    return np.exp(np.where(np.abs(log) < math.log(MAX_MULTIPLIER), log, np.nan))


def _multiplier_bands(
    hypothesis: Hypothesis, resampled: NestedFits, x: Array, confidence: float
) -> tuple[Array, Array]:
    """Lower and upper ends of the multipliers of resampled ladders at log compute x."""
    with np.errstate(over="ignore"):
        drawn = np.exp(_log_multiplier(hypothesis, resampled.solutions[hypothesis].theta, x))
    tail = (1 - confidence) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail], axis=0, method="nearest")
    return low, high
