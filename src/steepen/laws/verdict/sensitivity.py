"""Sensitivity of a verdict: what would separate the two hypotheses, and what error would change it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from steepen.laws.distributions import required_noncentrality
from steepen.laws.fits.solver import Array, Design, Mask, best_of, solve, solve_multistart
from steepen.laws.hypotheses.nested_models import (
    DecisionRule,
    LadderPair,
    NestedFits,
    f_test_hypotheses,
    fit_hypotheses,
    paired_free_fit,
    verdict_words,
)

DriftShape = Literal["top rung", "linear", "quadratic"]
DRIFT_SHAPES: tuple[DriftShape, ...] = get_args(DriftShape)
MAX_EXTRA_DECADES = 12.0
MAX_LOSS_PENALTY = 0.03
MAX_RUNS_FACTOR = 100
DENSITY_PROBE = 4  # evaluate the noncentrality at 4× the rungs and extrapolate to other multiples


@dataclass(frozen=True)
class Separation:
    """What separates the exponent from the irreducible-loss hypothesis with 90% power, each change alone.

    `seeds_factor`: times the seeds, which narrow every rung's mean but add no degrees of freedom.
    `rungs_factor`: times the rungs in the same span (None from MAX_RUNS_FACTOR). `top_flops`: extend both
    ladders to this compute at the present spacing (None beyond MAX_EXTRA_DECADES), with `extra_rungs` rungs
    and `extra_runs` runs in total. `three_sigma_flops`: where the gaps between the arms that the two
    hypotheses predict differ by three standard deviations of one run.
    """

    seeds_factor: float
    rungs_factor: int | None
    top_flops: float | None
    extra_decades: float | None
    extra_rungs: int | None
    extra_runs: int | None
    three_sigma_flops: float | None


@dataclass(frozen=True)
class MistuningTolerance:
    """The smallest loss penalty of a ladder's recipe that would change the outcome; None above 3%.

    `shape` is how the penalty is distributed: at the top rung alone, or growing from zero at the lowest rung
    linearly or quadratically in log compute, as that of a rule that scales a hyperparameter wrongly does.
    Penalties are those at the top rung. A mistuned learning rate can only raise a loss, so the penalty is
    subtracted from the measured losses. `penalty_explaining_slope` is the penalty without which Δγ would be
    zero. It is computed only where `could_explain_slope`: Δγ is resolved, and the ladder is the reference
    (for Δγ > 0) or the arm (Δγ < 0). The `lr_factor_…` are the errors of the learning rate that cost so much,
    where the loss penalty of a factor of 2 is known (`lr_regret`).
    """

    ladder: str
    flops: float
    shape: DriftShape
    could_explain_slope: bool
    penalty_explaining_slope: float | None
    penalty_changing_verdict: float | None
    changed_verdict: str | None
    lr_factor_explaining_slope: float | None = None
    lr_factor_changing_verdict: float | None = None


def drift_profile(x: Array, shape: DriftShape) -> Array:
    """The penalty at each rung of a ladder (log compute `x`) relative to the one at its top rung."""
    if shape == "top rung":
        return (np.arange(len(x)) == np.argmax(x)).astype(float)
    place = (x - x.min()) / max(float(np.ptp(x)), 1e-12)
    return place if shape == "linear" else place**2


def lr_factor(penalty: float | None, lr_regret: float | None) -> float | None:
    """The factor by which a learning rate is off if it costs `penalty`: the loss is a parabola in log rate.

    `lr_regret` is the penalty of a factor of 2.
    """
    if penalty is None or lr_regret is None:
        return None
    return 2 ** math.sqrt(penalty / lr_regret)


def alternative_rss(
    truth: Design, theta: Array, alternative: Design, start: Array, pair: LadderPair, *, log: bool = False
) -> float:
    """RSS of the alternative model fitted to noise-free losses of the true model at θ."""
    y = truth.predict(theta, pair.x)
    found = solve(
        alternative, pair.x, y[None], start[None], weights=pair.weights[None], log=log, iterations=100
    )
    if not found.converged[0]:
        found = best_of(
            found, solve_multistart(alternative, pair.x, y[None], weights=pair.weights[None], log=log)
        )
    return float(found.objective[0])


def extend(pair: LadderPair, decades: float) -> LadderPair:
    """Both ladders extended to `decades` above the higher of their tops, each at its mean spacing."""
    x, arm, weights = [pair.x], [pair.arm], [pair.weights]
    for flag in (False, True):
        own = np.sort(pair.x[pair.arm == flag])
        step = max((own[-1] - own[0]) / (len(own) - 1), 1e-3)
        reach = pair.x.max() + decades * math.log(10) - own[-1]
        more = own[-1] + step * np.arange(1, int(reach / step + 1e-9) + 1)
        x.append(more)
        arm.append(np.full(len(more), flag))
        weights.append(np.full(len(more), float(np.median(pair.weights[pair.arm == flag]))))
    return LadderPair(np.concatenate(x), np.concatenate(arm), np.concatenate(weights))


def densify(pair: LadderPair, factor: int) -> LadderPair:
    """Both ladders with `factor` times the rungs over the same span."""
    x, arm, weights = list[Array](), list[Mask](), list[Array]()
    for flag in (False, True):
        own = pair.x[pair.arm == flag]
        count = len(own) * factor
        x.append(np.interp(np.linspace(0, len(own) - 1, count), np.arange(len(own)), np.sort(own)))
        arm.append(np.full(count, flag))
        weights.append(np.full(count, float(pair.weights[pair.arm == flag].mean())))
    return LadderPair(np.concatenate(x), np.concatenate(arm), np.concatenate(weights))


def separate_hypotheses(
    fits: NestedFits, rule: DecisionRule, c0: float, seeds: tuple[float, float] = (1.0, 1.0)
) -> Separation:
    """What would separate the two hypotheses; the worse case of either being true.

    `seeds` are the runs of a rung of the reference and of the arm, of which further rungs have as many.
    """
    pair = fits.pair
    variance = float(fits.variance("free", rule)[0])
    # Tests of paired ladders have the noise that partners do not share, and half as many points.
    paired = pair.partners is not None
    tested_variance = float(paired_free_fit(fits, rule)[2][0]) if paired else variance
    exponent, irreducible = (fits.solutions[name].theta[0] for name in ("exponent", "irreducible"))

    def noncentrality(points: LadderPair) -> float:
        designs = points.designs()
        first = alternative_rss(
            designs["exponent"], exponent, designs["irreducible"], irreducible, points, log=rule.log
        )
        second = alternative_rss(
            designs["irreducible"], irreducible, designs["exponent"], exponent, points, log=rule.log
        )
        return min(first, second) / max(tested_variance, 1e-300)

    def required(points: int) -> float:
        freedom = (points - 6.0) / (2 if paired else 1)
        return required_noncentrality(math.inf if rule.noise else freedom, rule.level)

    def separates(points: LadderPair) -> bool:
        return noncentrality(points) >= required(len(points.x))

    more_seeds = required(len(pair.x)) / max(noncentrality(pair), 1e-12)
    per_rung = noncentrality(densify(pair, DENSITY_PROBE)) / DENSITY_PROBE
    rungs_factors = (k for k in range(1, MAX_RUNS_FACTOR) if k * per_rung >= required(len(pair.x) * k))
    top = float(pair.x.max())
    spacing = max(
        np.ptp(pair.x[pair.arm == flag]) / (int((pair.arm == flag).sum()) - 1) for flag in (False, True)
    )

    def separates_with(extra_rungs: int) -> bool:
        return separates(extend(pair, extra_rungs * spacing * 1.001 / math.log(10)))

    # Noncentrality grows with the ladder, so bisection finds the shortest extension.
    low, high = -1, int(MAX_EXTRA_DECADES * math.log(10) / spacing)
    decades, rungs, runs = None, None, None
    if separates_with(high):
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if separates_with(middle) else (middle, high)
        decades = float(high * spacing / math.log(10))
        longer = extend(pair, decades * 1.001)
        rungs = len(longer.x) - len(pair.x)
        runs = round(float(np.where(longer.arm[len(pair.x) :], seeds[1], seeds[0]).sum()))

    # On a fine grid of compute: how much do the predicted gaps between the arms differ?
    line = np.linspace(top, top + MAX_EXTRA_DECADES * math.log(10), 1200)
    both = LadderPair(np.tile(line, 2), np.repeat([False, True], len(line)), np.ones(2 * len(line)))
    gaps = [
        np.diff(design.predict(theta, both.x).reshape(2, -1), axis=0)[0]
        for design, theta in (
            (both.designs()["exponent"], exponent),
            (both.designs()["irreducible"], irreducible),
        )
    ]
    noise = math.sqrt(variance) * (float(fits.scale[0]) if rule.log else 1.0)
    far = np.flatnonzero(np.abs(gaps[0] - gaps[1]) >= 3 * noise)
    return Separation(
        seeds_factor=max(1.0, more_seeds),
        rungs_factor=next(rungs_factors, None),
        top_flops=None if decades is None else float(c0 * math.exp(top) * 10**decades),
        extra_decades=decades,
        extra_rungs=rungs,
        extra_runs=runs,
        three_sigma_flops=c0 * math.exp(float(line[far[0]])) if len(far) else None,
    )


def mistuning_tolerance(
    fits: NestedFits,
    y: Array,
    rule: DecisionRule,
    names: tuple[str, str],
    c0: float,
    lr_regret: float | None = None,
) -> tuple[MistuningTolerance, ...]:
    """For each ladder and shape, the penalty that would explain the slope or change the verdict."""
    cases: list[tuple[str, bool, int, DriftShape]] = []
    profiles: list[Array] = []
    for name, flag in zip(names, (False, True), strict=True):
        own = np.flatnonzero(fits.pair.arm == flag)
        for shape in DRIFT_SHAPES:
            profile = np.zeros(len(y))
            profile[own] = drift_profile(fits.pair.x[own], shape)
            profiles.append(profile)
            cases.append((name, flag, int(own[np.argmax(fits.pair.x[own])]), shape))
    largest = np.array([MAX_LOSS_PENALTY * float(y[top]) for _, _, top, _ in cases])

    def tests_without(penalties: Array) -> tuple[Array, NDArray[np.str_]]:
        """Δγ and verdicts without penalties (cases × grid), all cases in one batch."""
        data = y - penalties[:, :, None] * np.stack(profiles)[:, None, :]
        tests = f_test_hypotheses(
            fit_hypotheses(fits.pair, data.reshape(-1, len(y)), rule, warm_start=fits), rule
        )
        return tests.delta_gamma.reshape(penalties.shape), verdict_words(tests, rule).reshape(penalties.shape)

    measured = f_test_hypotheses(fits, rule)
    sign, resolved = float(np.sign(measured.delta_gamma[0])), bool(measured.p_slope[0] < rule.level)
    grid = largest[:, None] * np.concatenate([[0.0], np.geomspace(3e-4, 1.0, 24)])
    slopes, words = tests_without(grid)
    changed = [_first(row != row[0]) for row in words]
    zeroed = [_first(row * sign <= 0) for row in slopes]
    # Refine between the last penalty with the same outcome and the first with another.
    finer = np.concatenate([_between(grid, changed), _between(grid, zeroed)], axis=1)
    finer_slopes, finer_words = tests_without(finer)
    half = finer.shape[1] // 2
    found: list[MistuningTolerance] = []
    for i, (name, flag, top, shape) in enumerate(cases):
        penalty, then, zero = None, None, None
        if changed[i] is not None:
            first = _first(finer_words[i, :half] != words[i, 0])
            at = half - 1 if first is None else first
            penalty, then = (
                float(finer[i, at]),
                str(words[i, changed[i]] if first is None else finer_words[i, at]),
            )
        # Lowering the reference's losses reduces Δγ > 0; lowering the arm's reduces Δγ < 0.
        may = resolved and (sign > 0) != flag
        if may and zeroed[i] is not None:
            zero = _root(finer[i, half:], finer_slopes[i, half:] * sign)
        found.append(
            MistuningTolerance(
                ladder=name,
                flops=c0 * math.exp(float(fits.pair.x[top])),
                shape=shape,
                could_explain_slope=may,
                penalty_explaining_slope=zero,
                penalty_changing_verdict=penalty,
                changed_verdict=then,
                lr_factor_explaining_slope=lr_factor(zero, lr_regret),
                lr_factor_changing_verdict=lr_factor(penalty, lr_regret),
            )
        )
    return tuple(found)


def _between(grid: Array, index: list[int | None]) -> Array:
    """21 values of each row from before `index` to it; zeros if there is none: (rows, 21)."""
    rows = [
        np.zeros(21) if k is None else np.linspace(row[max(k - 1, 0)], row[k], 21)
        for row, k in zip(grid, index, strict=True)
    ]
    return np.stack(rows)


def _root(x: Array, y: Array) -> float:
    """Where `y`, which falls from above zero, crosses zero, by linear interpolation."""
    k = _first(y <= 0)
    if k is None or k == 0:
        return float(x[-1] if k is None else x[0])
    return float(x[k - 1] + (x[k] - x[k - 1]) * y[k - 1] / (y[k - 1] - y[k]))


def _first(mask: Mask) -> int | None:
    """Index of the first true element; None if there is none."""
    return int(np.argmax(mask)) if mask.any() else None
