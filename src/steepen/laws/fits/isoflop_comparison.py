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
from steepen.laws.distributions import ROUNDING_ERROR, Interval, f_p_value, t_interval, t_p_value
from steepen.laws.fits.isoflop import IsoflopFit, group_budgets
from steepen.laws.fits.vertex import Vertex, choose_points
from steepen.utils.arrays import Array

SCATTER_LEVEL = 0.10  # of the test that multipliers scatter more about their trend than noise explains
SAME_BUDGET = 0.05  # relative difference up to which budgets of two arms are the same


@dataclass(frozen=True)
class Contrast:
    """A difference or factor with its interval and p-value (of zero, or of a factor of one)."""

    value: float
    interval: Interval
    p: float


@dataclass(frozen=True)
class BudgetComparison:
    """At one budget: ratio of the optima x*, difference of the losses there, and the compute multiplier.

    The multiplier is how many times less compute the arm needs for the reference's loss; None where the
    arm has a single budget. Its error is that of the two losses.
    """

    budget: float
    optimum_ratio: Contrast
    loss_difference: Contrast
    multiplier: Contrast | None


@dataclass(frozen=True)
class SweepComparison:
    """An arm's sweeps against the reference's: each common budget, their mean multiplier and its growth.

    `growth` is the factor by which the multiplier changes per decade of compute (from three budgets on),
    `exponent` the difference of the exponents of x* ∝ C^a.
    """

    budgets: tuple[BudgetComparison, ...]
    multiplier: Contrast | None
    growth: Contrast | None
    exponent: Contrast | None


@dataclass(frozen=True)
class _Optimum:
    """log x* (or x*) and log loss at the vertex of a sweep, with variances in units of the noise's."""

    vertex: Vertex
    position: float
    log_loss: float
    position_variance: float
    loss_variance: float


def compare_sweeps(
    fits: tuple[IsoflopFit, IsoflopFit], data: Sequence[tuple[Array, Array, Array]]
) -> SweepComparison:
    """Compare an arm's parabolas with the reference's; `fits` and `data` are those of reference and arm."""
    settings = fits[0].settings
    if settings["method"] != "quadratic":
        raise UsageError("an Akima minimum has no standard error; compare arms with `vertex` quadratic.")
    optima, squares, df = list[list[_Optimum]](), 0.0, 0
    for fit, one in zip(fits, data, strict=True):
        found, rss, spare = _optima(fit, one)
        optima.append(found)
        squares, df = squares + rss, df + spare
    if df < 1:
        raise UsageError(
            "every sweep has three points, which leaves nothing to estimate noise from; add points to compare"
            " arms."
        )
    noise = max(squares / df, ROUNDING_ERROR**2)

    def contrast(value: float, variance: float, freedom: float = df) -> Contrast:
        error = math.sqrt(variance)
        interval = t_interval(value, error, freedom, settings["confidence"])
        return Contrast(value, interval, t_p_value(value, error, freedom))

    def factor(value: float, variance: float, freedom: float = df) -> Contrast:
        found = contrast(value, variance, freedom)
        return Contrast(math.exp(value), (math.exp(found.interval[0]), math.exp(found.interval[1])), found.p)

    curve = _Frontier(optima[1]) if len(optima[1]) > 1 else None
    compared: list[BudgetComparison] = []
    logs: list[tuple[float, float, float]] = []  # log budget, log multiplier, variance
    for ours in optima[0]:
        near = [one for one in optima[1] if abs(one.vertex.budget / ours.vertex.budget - 1) <= SAME_BUDGET]
        if not near:
            continue
        theirs, log_c = near[0], math.log(ours.vertex.budget)
        ratio = theirs.position - ours.position
        variance = noise * (theirs.position_variance + ours.position_variance)
        loss = theirs.vertex.loss - ours.vertex.loss
        loss_variance = noise * (theirs.loss_variance + ours.loss_variance)
        scale = ours.vertex.loss**2 if settings["log_loss"] else 1.0
        multiplier = None
        if curve is not None and (slope := curve.slope(log_c)) < 0:
            log_m = log_c - curve.compute_for(ours.log_loss, log_c)
            relative = loss_variance / (1.0 if settings["log_loss"] else ours.vertex.loss**2)
            logs.append((log_c, log_m, relative / slope**2))
            multiplier = factor(log_m, relative / slope**2)
        ratios = factor(ratio, variance) if settings["log_x"] else contrast(ratio, variance)
        losses = contrast(loss, loss_variance * scale)
        compared.append(BudgetComparison(ours.vertex.budget, ratios, losses, multiplier))
    if not compared:
        raise UsageError(
            "the arms have no budget in common (within 5%) at which both have an optimum; sweep the same"
            " budgets."
        )
    mean = growth = None
    if logs:
        c, log_m, variance = (np.array(part) for part in zip(*logs, strict=True))
        freedom = float(df)
        if len(c) > 2:
            weight = (c - c.mean()) / float(((c - c.mean()) ** 2).sum())
            slope = float(weight @ log_m)
            spread = log_m - log_m.mean() - slope * (c - c.mean())
            excess = float((spread**2 / variance).sum()) / (len(c) - 2)
            if f_p_value(np.array(excess), len(c) - 2, np.array(float(df))) < SCATTER_LEVEL:
                variance, freedom = variance * excess, len(c) - 2.0
            growth = factor(math.log(10) * slope, math.log(10) ** 2 * float(weight**2 @ variance), freedom)
        mean = factor(float(log_m.mean()), float(variance.sum()) / len(c) ** 2, freedom)
    first, second = (fit.law for fit in fits)
    exponent = None
    freedoms = [law.degrees_of_freedom for law in (first, second) if law is not None]
    if first is not None and second is not None and min(freedoms) > 0:
        parts = [law.standard_error**2 for law in (first, second)]
        welch = sum(parts) ** 2 / max(sum(v**2 / f for v, f in zip(parts, freedoms, strict=True)), 1e-300)
        exponent = contrast(second.exponent - first.exponent, sum(parts), welch)
    return SweepComparison(tuple(compared), mean, growth, exponent)


def _optima(fit: IsoflopFit, data: tuple[Array, Array, Array]) -> tuple[list[_Optimum], float, int]:
    """The interior optima of an arm; residual sum of squares and degrees of freedom of all its parabolas."""
    budget, x, loss = data
    settings = fit.settings
    found, squares, spare = list[_Optimum](), 0.0, 0
    vertices = {vertex.budget: vertex for vertex in fit.vertices}
    for group in group_budgets(budget, settings["tolerance"]):
        vertex = vertices.get(float(np.exp(np.log(budget[group]).mean())))
        if vertex is None:
            continue
        how = {name: settings[name] for name in ("log_x", "log_loss", "nearest")}
        sweep = choose_points(x[group], loss[group], **how)
        centre, scale = float(sweep.u.mean()), max(float(np.ptp(sweep.u)), 1e-12)
        z = (sweep.u - centre) / scale
        design = np.stack([np.ones_like(z), z, z * z], axis=1)
        inverse = np.linalg.pinv(design.T @ design)
        value = inverse @ design.T @ sweep.v
        residual = sweep.v - design @ value
        squares, spare = squares + float(residual @ residual), spare + len(z) - 3
        if not vertex.interior:
            continue
        _, b, c = value
        place = -b / (2 * c)
        by_position = np.array([0.0, -1 / (2 * c), b / (2 * c * c)]) * scale
        by_height = np.array([1.0, place, place * place])  # the height is flat in the vertex's position
        found.append(
            _Optimum(
                vertex, centre + scale * place, math.log(vertex.loss),
                float(by_position @ inverse @ by_position), float(by_height @ inverse @ by_height),
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
