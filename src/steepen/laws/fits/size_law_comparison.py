"""Compare two arms' laws L(N, D), with one E, A, B, α and β for both, and runs of equal N and D paired.

The arm follows the reference's law with m times fewer N·D, where log m is linear in log(N·D) and log(D/N):
m at the mean of the runs says whether it is better, its slope in compute whether the gain grows. One E, and
one α and β, are tested. Runs of the two arms with equal N and D share what the law misses there, so their
difference is known better than either loss: the residuals of such a pair are split into sum and difference,
each with its own variance. Multipliers are in FLOPs, of each arm's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from steepen.errors import UsageError
from steepen.laws.distributions import ROUNDING_ERROR, Difference, Interval, f_p_value, standard_error
from steepen.laws.fits.chinchilla import FIXED_SD, ChinchillaFit, ChinchillaLoss, FlopsLaw, build_problem
from steepen.laws.fits.size_law_solver import (
    KINDS,
    IntArray,
    Kind,
    ModelSize,
    SizeLawProblem,
    scaled_inverse,
    solve,
)
from steepen.utils.arrays import Array

Noise = tuple[Array, float]  # a whitening matrix, and the degrees of freedom it was estimated with
MIN_SPARE_PAIRS = 3  # pairs beyond the constants of one law, to estimate the noise of differences


@dataclass(frozen=True, eq=False)
class ArmRuns:
    """The fitted runs of one arm and their law; one row per cell (N, D), repeats averaged."""

    parameters: Array
    tokens: Array
    loss: Array
    flops: Array
    fit: ChinchillaFit

    def cells(self) -> ArmRuns:
        """The runs, repeated cells as one with the mean loss."""
        keys, place = np.unique(np.stack([self.parameters, self.tokens]), axis=1, return_inverse=True)
        place = place.ravel()
        mean = [np.bincount(place, part) / np.bincount(place) for part in (self.loss, self.flops)]
        return replace(self, parameters=keys[0], tokens=keys[1], loss=mean[0], flops=mean[1])


@dataclass(frozen=True)
class Multiplier:
    """How many times less compute the arm needs for the reference's loss at `flops`; `p` tests one."""

    flops: float
    value: float
    interval: Interval
    p: float


@dataclass(frozen=True)
class LawComparison:
    """An arm's law against the reference's, at the mean D/N of the runs.

    `multiplier` is in the middle of the common range of compute, `multipliers` are at its ends (and a
    budget). `growth` is the factor by which the multiplier changes per decade of compute, `ratio_effect` that
    per tenfold D/N, each with a p-value for a factor of one. `p_exponents` tests one α and β for both arms,
    `p_irreducible` one E. `pairs` is the number of cells (N, D) that both arms have and that were compared
    one by one; 0: too few. `overlap`: the arms' ranges of compute overlap; else the range is the reference's.
    """

    multiplier: Multiplier
    multipliers: tuple[Multiplier, ...]
    growth: float
    growth_interval: Interval
    p_growth: float
    ratio_effect: float
    ratio_effect_interval: Interval
    p_ratio_effect: float
    p_exponents: float
    p_irreducible: float
    pairs: int
    cells: int
    overlap: bool


def compare_laws(reference: ArmRuns, arm: ArmRuns, budget: float | None = None) -> LawComparison:
    """Compare an arm with the reference, by least squares of log losses (of losses, for `mse`)."""
    reference, arm = reference.cells(), arm.cells()
    first, second = _equal_cells(reference, arm)
    free = _PairFit.of(reference, arm, ("a", "b", "alpha", "beta", "e"))
    # A few pairs among many other cells would leave too few degrees of freedom.
    needed = max(len(set(free.problem.kinds)) + MIN_SPARE_PAIRS, min(len(reference.loss), len(arm.loss)) / 2)
    paired = len(first) >= needed
    noise = free.whiten_pairs(first, second) if paired else free.whiten()
    fit = _PairFit.of(reference, arm, ("level", "growth", "ratio"), noise)
    exponents = _PairFit.of(reference, arm, ("a", "b", "alpha", "beta"), noise)
    irreducible = _PairFit.of(reference, arm, ("a", "b", "e"), noise)
    low = max(float(reference.flops.min()), float(arm.flops.min()))
    high = min(float(reference.flops.max()), float(arm.flops.max()))
    overlap = low < high
    if not overlap:
        low, high = float(reference.flops.min()), float(reference.flops.max())
    decades = math.log10(high / low)

    def per_decade(theta: Array) -> float:
        return (fit.log_multiplier(theta, high) - fit.log_multiplier(theta, low)) / decades

    growth = fit.factor(per_decade)
    ratio = fit.factor(lambda theta: math.log(10) * theta[-1])
    return LawComparison(
        multiplier=fit.multiplier(math.sqrt(low * high)),
        multipliers=tuple(fit.multiplier(c) for c in (low, high, *([] if budget is None else [budget]))),
        growth=growth.value, growth_interval=growth.interval, p_growth=growth.p,
        ratio_effect=ratio.value, ratio_effect_interval=ratio.interval, p_ratio_effect=ratio.p,
        p_exponents=exponents.p_equal(("alpha", "beta")), p_irreducible=irreducible.p_equal(("e",)),
        pairs=len(first) if paired else 0, cells=len(reference.loss) + len(arm.loss), overlap=overlap,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _PairFit:
    """One fit to the cells of both arms; after whitening, residuals have variance one."""

    problem: SizeLawProblem
    theta: Array
    covariance: Array
    df: float
    arms: tuple[ArmRuns, ArmRuns]
    means: tuple[float, float]  # of log(N·D) and log(D/N)

    @classmethod
    def of(
        cls, reference: ArmRuns, arm: ArmRuns, own: Sequence[Kind], noise: Noise | None = None
    ) -> _PairFit:
        """Fit both arms, where `own` are the constants that the arm does not share with the reference."""
        whitening, df = noise or (None, 0.0)
        problem, means = _joint_problem(reference, arm, own)
        problem = replace(problem, whitening=whitening)
        prior = reference.fit.settings.irreducible_loss
        weight = 1 / FIXED_SD**2 if problem.fixed_e is not None else 0.0  # of what is known of E
        if prior is not None and prior.sd is not None:
            sd = reference.fit.log_residual_sd if problem.log else reference.fit.residual_sd
            weight = (1.0 if noise else sd) ** 2 / prior.sd**2
            problem = replace(problem, e_penalty=(prior.mean, weight))
        laws = ((reference.fit, arm.fit), (reference.fit, reference.fit), (arm.fit, arm.fit))
        theta, _, _ = solve(problem, np.array([_start(problem, pair) for pair in laws]))
        j = problem.jacobian(theta[None])[0]
        covariance = scaled_inverse(j @ j.T + np.diag(problem.is_e * weight))
        return cls(problem, theta, covariance, df, (reference, arm), means)

    def _residuals(self) -> tuple[Array, float]:
        _, residual, _ = self.problem.evaluate(self.theta[None], self.problem.weights[None])
        return residual[0], ROUNDING_ERROR * (1.0 if self.problem.log else float(self.problem.y.mean()))

    def whiten(self) -> Noise:
        """Scale residuals by their standard deviation; degrees of freedom of that."""
        residual, rounding = self._residuals()
        df = len(residual) - len(self.theta)
        if df < 1:
            raise UsageError(f"the arms have {len(residual)} cells (N, D), too few to compare their laws.")
        return np.eye(len(residual)) / max(math.sqrt(float(residual @ residual) / df), rounding), df

    def whiten_pairs(self, first: IntArray, second: IntArray) -> Noise:
        """Turn pairs of residuals into sum and difference, each scaled by its own standard deviation.

        The noise of differences has as many degrees of freedom as there are pairs beyond one law's constants.
        """
        residual, rounding = self._residuals()
        second = second + len(self.arms[0].loss)
        df = len(first) - len(set(self.problem.kinds))
        turned = np.eye(len(residual))
        turned[first, first] = turned[first, second] = turned[second, second] = math.sqrt(0.5)
        turned[second, first] = -math.sqrt(0.5)
        values = turned @ residual
        parts = [math.sqrt(float(values[rows] @ values[rows]) / df) for rows in (first, second)]
        deviation = np.full(len(residual), max(math.hypot(*parts) * math.sqrt(0.5), rounding))
        deviation[first], deviation[second] = (max(part, rounding) for part in parts)
        return turned / deviation[:, None], df

    def p_equal(self, kinds: tuple[Kind, ...]) -> float:
        """p-value of equal constants of both arms."""
        rows = [KINDS.index(kind) for kind in kinds if kind in self.problem.kinds]
        change = np.subtract(*(np.eye(len(self.theta))[self.problem.index[rows, place]] for place in (-1, 0)))
        if not change.any():
            return 1.0  # a fixed E, which is equal by definition
        delta, covariance = change @ self.theta, change @ self.covariance @ change.T
        statistic = float(delta @ np.linalg.solve(covariance, delta)) / len(rows)
        return float(f_p_value(np.array(statistic), len(rows), np.array(self.df)))

    def log_multiplier(self, theta: Array, flops: float) -> float:
        """Logarithm of the multiplier at a compute of the reference and the mean D/N."""
        level, growth, _ = theta[-3:]
        own, other = (one.fit.flops_law for one in self.arms)

        def log_nd(law: FlopsLaw, log_flops: float) -> float:
            # C = k·N^p·D with D = R·N.
            log_n = (log_flops - math.log(law.coefficient) - self.means[1]) / (1 + law.exponent)
            return 2 * log_n + self.means[1]

        # x of the arm counts as x + level + growth·(x − mean) in the reference's law.
        reached = log_nd(own, math.log(flops))
        needed = (reached - level + growth * self.means[0]) / (1 + growth)
        log_n = (needed - self.means[1]) / 2
        arm_flops = math.log(other.coefficient) + (1 + other.exponent) * log_n + self.means[1]
        return math.log(flops) - arm_flops

    def multiplier(self, flops: float) -> Multiplier:
        """The multiplier at a compute, with its interval and p-value."""
        found = self.factor(lambda theta: self.log_multiplier(theta, flops))
        return Multiplier(flops, found.value, found.interval, found.p)

    def factor(self, of: Callable[[Array], float]) -> Difference:
        """The exponential of a function of the constants, by the delta method."""
        value = float(of(self.theta))
        steps = 1e-4 * np.sqrt(np.maximum(np.diag(self.covariance), 1e-24))
        gradient = np.array(
            [(of(self.theta + step) - of(self.theta - step)) / (2 * step.sum()) for step in np.diag(steps)]
        )
        error = standard_error(gradient, self.covariance)
        confidence = self.arms[0].fit.settings.confidence
        return Difference.of(value, error, self.df, confidence).factor()


def _joint_problem(
    reference: ArmRuns, arm: ArmRuns, own: Sequence[Kind]
) -> tuple[SizeLawProblem, tuple[float, float]]:
    """One law of both arms' runs but for the arm's `own` constants; means of log(N·D), log(D/N)."""
    split, settings = len(reference.loss), reference.fit.settings
    loss: ChinchillaLoss = "mse" if settings.loss == "mse" else "log-mse"
    n, d, y = (
        np.concatenate([getattr(one, name) for one in (reference, arm)])
        for name in ("parameters", "tokens", "loss")
    )
    problem = build_problem(ModelSize.of(n), d, y, replace(settings, loss=loss), looped=False)
    kinds, index = problem.kinds, problem.index.copy()
    for kind in own:
        if (kind == "e" and problem.fixed_e is not None) or (kind == "beta" and settings.tied):
            continue
        rows = [KINDS.index(kind)] if kind != "alpha" or not settings.tied else [3, 4]
        index[rows, split:] = len(kinds)
        kinds = (*kinds, kind)
    x, z = np.log(n * d), np.log(d / n)
    columns = (1.0, x - x.mean(), z - z.mean())
    problem = replace(problem, kinds=kinds, index=index, multiplier_columns=columns)
    return problem, (float(x.mean()), float(z.mean()))


def _start(problem: SizeLawProblem, fits: tuple[ChinchillaFit, ChinchillaFit]) -> Array:
    """θ from two fitted laws; a shared constant from the second."""
    theta = np.zeros(len(problem.kinds))
    for fit, place in zip(fits, (0, -1), strict=True):
        a = math.log(fit.a) - fit.alpha * problem.centre[0]
        b = math.log(fit.b) - fit.beta * problem.centre[1]
        theta[problem.index[:5, place]] = fit.e, a, b, fit.alpha, fit.beta
    return theta


def _equal_cells(reference: ArmRuns, arm: ArmRuns) -> tuple[IntArray, IntArray]:
    """Places of the cells (N, D) that both arms have, in the first and in the second."""
    places = {cell: i for i, cell in enumerate(zip(reference.parameters, reference.tokens, strict=True))}
    theirs = enumerate(zip(arm.parameters, arm.tokens, strict=True))
    found = [(places[cell], i) for i, cell in theirs if cell in places]
    first, second = np.array(found, np.intp).reshape(-1, 2).T
    return first, second
