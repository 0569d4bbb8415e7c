"""Compare two arms' sweeps at fixed compute: optimum, loss and multiplier at each budget, and exponents.

One noise variance is pooled over all parabolas of both arms, since a sweep has few points beyond a parabola's
three coefficients. Where the multipliers scatter more about their trend than this noise explains, the errors
of their mean and growth are those of the scatter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from steepen.errors import UsageError
from steepen.laws.distributions import ROUNDING_ERROR, Difference, f_p_value
from steepen.laws.fits.isoflop import IsoflopFit, PowerLawFit, budget_sweeps
from steepen.laws.fits.vertex import Parabola, Vertex, choose_points
from steepen.utils.arrays import Array

SCATTER_LEVEL = 0.10  # of the test that multipliers scatter more about their trend than noise explains
SAME_BUDGET = 0.05  # relative difference up to which budgets of two arms are the same


@dataclass(frozen=True)
class BudgetComparison:
    """At one budget: ratio of the optima x*, difference of the losses there, and the compute multiplier.

    The multiplier is how many times less compute the arm needs for the reference's loss; None where the
    arm has a single budget. Its error is that of the two losses.
    """

    budget: float
    optimum_ratio: Difference
    loss_difference: Difference
    multiplier: Difference | None


@dataclass(frozen=True)
class SweepComparison:
    """An arm's sweeps against the reference's: each common budget, their mean multiplier and its growth.

    `growth` is the factor by which the multiplier changes per decade of compute (from three budgets on),
    `exponent` the difference of the exponents of x* ∝ C^a.
    """

    budgets: tuple[BudgetComparison, ...]
    multiplier: Difference | None
    growth: Difference | None
    exponent: Difference | None


def compare_sweeps(
    fits: tuple[IsoflopFit, IsoflopFit], data: Sequence[tuple[Array, Array, Array]]
) -> SweepComparison:
    """Compare an arm's parabolas with the reference's; `fits` and `data` are those of reference and arm."""
    settings = fits[0].settings
    if settings["method"] != "quadratic":
        raise UsageError("an Akima minimum has no standard error; compare arms with `vertex` quadratic.")
    (ours, *first), (theirs, *second) = (_optima(fit, one) for fit, one in zip(fits, data, strict=True))
    squares, freedom = first[0] + second[0], first[1] + second[1]
    if freedom < 1:
        raise UsageError(
            "every sweep has three points, which leaves nothing to estimate noise from; add points to compare"
            " arms."
        )
    noise = _Noise(max(squares / freedom, ROUNDING_ERROR**2), freedom, settings["confidence"])
    curve = _Frontier(theirs) if len(theirs) > 1 else None
    compared: list[BudgetComparison] = []
    logs: list[tuple[float, float, float]] = []
    for one in ours:
        near = [each for each in theirs if abs(each.vertex.budget / one.vertex.budget - 1) <= SAME_BUDGET]
        if near:
            found, log = _compare_optima(one, near[0], curve, noise, settings["log_x"], settings["log_loss"])
            compared.append(found)
            logs += [log] if log else []
    if not compared:
        raise UsageError(
            "the arms have no budget in common (within 5%) at which both have an optimum; sweep the same"
            " budgets."
        )
    mean, growth = _over_budgets(logs, noise) if logs else (None, None)
    return SweepComparison(tuple(compared), mean, growth, _exponents(fits[0].law, fits[1].law, noise))


@dataclass(frozen=True)
class _Noise:
    """The variance of a residual, pooled over all parabolas, and its degrees of freedom."""

    variance: float
    freedom: float
    confidence: float

    def difference(self, value: float, variance: float, freedom: float | None = None) -> Difference:
        """An estimate with this variance."""
        df = self.freedom if freedom is None else freedom
        return Difference.of(value, math.sqrt(variance), df, self.confidence)


@dataclass(frozen=True)
class _Optimum:
    """log x* (or x*) and log loss at the vertex of a sweep, with variances in units of the noise's."""

    vertex: Vertex
    position: float
    log_loss: float
    position_variance: float
    loss_variance: float


def _compare_optima(
    ours: _Optimum, theirs: _Optimum, curve: _Frontier | None, noise: _Noise, log_x: bool, log_loss: bool
) -> tuple[BudgetComparison, tuple[float, float, float] | None]:
    """Two optima at one budget; log budget, log multiplier and its variance where there is a multiplier."""
    log_c, scale = math.log(ours.vertex.budget), ours.vertex.loss**2
    ratio = theirs.position - ours.position
    variance = noise.variance * (theirs.position_variance + ours.position_variance)
    loss = theirs.vertex.loss - ours.vertex.loss
    loss_variance = noise.variance * (theirs.loss_variance + ours.loss_variance)
    multiplier = log = None
    if curve is not None and (slope := curve.slope(log_c)) < 0:
        log_m = log_c - curve.compute_for(ours.log_loss, log_c)
        relative = loss_variance / (1.0 if log_loss else scale)
        log = log_c, log_m, relative / slope**2
        multiplier = noise.difference(log_m, relative / slope**2).factor()
    ratios = noise.difference(ratio, variance)
    losses = noise.difference(loss, loss_variance * (scale if log_loss else 1.0))
    found = ours.vertex.budget, ratios.factor() if log_x else ratios, losses, multiplier
    return BudgetComparison(*found), log


def _over_budgets(
    logs: Sequence[tuple[float, float, float]], noise: _Noise
) -> tuple[Difference, Difference | None]:
    """The mean multiplier, and its growth per decade.

    Noise of the points is not all: a sweep's rates or batch may be off as a whole. Where the multipliers
    scatter more about their trend than noise explains, the scatter is the error.
    """
    c, log_m, variance = (np.array(part) for part in zip(*logs, strict=True))
    growth, freedom = None, noise.freedom
    if len(c) > 2:
        weight = (c - c.mean()) / float(((c - c.mean()) ** 2).sum())
        slope = float(weight @ log_m)
        spread = log_m - log_m.mean() - slope * (c - c.mean())
        excess = float((spread**2 / variance).sum()) / (len(c) - 2)
        if f_p_value(np.array(excess), len(c) - 2, np.array(float(freedom))) < SCATTER_LEVEL:
            variance, freedom = variance * excess, len(c) - 2.0
        growth_variance = math.log(10) ** 2 * float(weight**2 @ variance)
        growth = noise.difference(math.log(10) * slope, growth_variance, freedom).factor()
    mean = noise.difference(float(log_m.mean()), float(variance.sum()) / len(c) ** 2, freedom)
    return mean.factor(), growth


def _exponents(first: PowerLawFit | None, second: PowerLawFit | None, noise: _Noise) -> Difference | None:
    """The difference of the exponents, with Welch's degrees of freedom: the laws' scatters may differ."""
    if first is None or second is None or min(first.degrees_of_freedom, second.degrees_of_freedom) <= 0:
        return None
    parts = [law.standard_error**2 for law in (first, second)]
    freedoms = [law.degrees_of_freedom for law in (first, second)]
    welch = sum(parts) ** 2 / max(sum(v**2 / f for v, f in zip(parts, freedoms, strict=True)), 1e-300)
    return noise.difference(second.exponent - first.exponent, sum(parts), welch)


def _optima(fit: IsoflopFit, data: tuple[Array, Array, Array]) -> tuple[list[_Optimum], float, int]:
    """The interior optima of an arm; residual sum of squares and degrees of freedom of all its parabolas."""
    budget, x, loss = data
    settings = fit.settings
    how = {name: settings[name] for name in ("log_x", "log_loss", "nearest")}
    found, squares, spare = list[_Optimum](), 0.0, 0
    sweeps, _ = budget_sweeps(budget, x, settings["tolerance"])
    for vertex, (_, rows) in zip(fit.vertices, sweeps, strict=True):
        sweep = choose_points(x[rows], loss[rows], **how)
        parabola = Parabola.of(sweep.u, sweep.v)
        squares = squares + float(parabola.residual @ parabola.residual)
        spare = spare + len(sweep.u) - 3
        if not vertex.interior:
            continue
        _, b, c = parabola.value
        place = -b / (2 * c)
        by_position = np.array([0.0, -1 / (2 * c), b / (2 * c * c)]) * parabola.scale
        by_height = np.array([1.0, place, place * place])  # the height is flat in the vertex's position
        found.append(
            _Optimum(
                vertex, parabola.centre + parabola.scale * place, math.log(vertex.loss),
                float(by_position @ parabola.inverse @ by_position),
                float(by_height @ parabola.inverse @ by_height),
            )
        )  # fmt: skip
    return found, squares, spare


class _Frontier:
    """log loss at the optimum as a polynomial in log compute: a parabola from three budgets on."""

    def __init__(self, optima: Sequence[_Optimum]) -> None:
        c = np.log([one.vertex.budget for one in optima])
        self.centre = float(c.mean())
        y = [one.log_loss for one in optima]
        self.coefficients = np.polyfit(c - c.mean(), y, min(len(c) - 1, 2))

    def slope(self, log_c: float) -> float:
        """d log loss / d log compute."""
        return float(np.polyval(np.polyder(self.coefficients), log_c - self.centre))

    def compute_for(self, log_loss: float, log_c: float) -> float:
        """log compute at which a log loss is reached, searched for within a factor of 100."""
        grid = np.linspace(log_c - math.log(100), log_c + math.log(100), 4001)
        losses = np.polyval(self.coefficients, grid - self.centre)
        falling = np.flatnonzero(np.diff(losses) < 0)
        part = slice(int(falling[0]), int(falling[-1]) + 2)
        return float(np.interp(-log_loss, -losses[part], grid[part]))
