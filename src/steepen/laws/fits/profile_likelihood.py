"""Profile-likelihood intervals: the values of a parameter at which an F-test does not reject the best fit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from steepen.laws.distributions import Interval
from steepen.laws.fits.solver import Array, Design, parameter_bounds, solve_from_starts, starting_points

Indices = NDArray[np.intp]

START_FRACTIONS = (0.0, 0.5, 0.9)  # of the lowest loss, as starting values of E
MAX_STEPS = 60


@dataclass(frozen=True, eq=False)
class LeastSquaresFit:
    """A least-squares fit to one data set, as `profile_intervals` needs it."""

    design: Design
    x: Array
    y: Array
    weights: Array
    theta: Array
    rss: float
    variance: float
    log: bool


def profile_intervals(
    fit: LeastSquaresFit, which: list[int], covariance: Array, quantile: float
) -> list[Interval]:
    """Interval of each parameter in `which`, up to where the profiled RSS exceeds its minimum by
    quantile² · variance.

    With `quantile` Student's t for the residual degrees of freedom this inverts an F-test. An end that is
    never reached is infinite; the lower end of an irreducible loss is at least zero.
    """
    n_irreducible = fit.design.sizes[0]
    errors = np.sqrt(np.maximum(np.diag(covariance) * fit.variance, 0.0))
    rows = [(index, side) for index in which for side in (-1.0, 1.0)]
    index = np.array([row[0] for row in rows])
    side = np.array([row[1] for row in rows])
    best = fit.theta[index]
    # First-order response of the other parameters to a shift of one, from the covariance.
    response = (covariance[:, index] / np.maximum(np.diag(covariance)[index], 1e-300)).T
    lowest, highest = (part[0, index] for part in parameter_bounds(fit.design, fit.y[None]))
    limit = np.abs(np.where(side < 0, lowest, highest) - best)  # distance to the bound
    # Bracket: `near` is not rejected, `far` is. Until `far` is found, the step doubles.
    near, far = np.zeros(len(rows)), np.full(len(rows), np.inf)
    near_rise, far_rise = np.zeros(len(rows)), np.full(len(rows), np.inf)
    step = np.minimum(np.maximum(quantile * errors[index], 1e-9 * np.maximum(np.abs(best), 1.0)), limit)
    theta = np.repeat(fit.theta[None], len(rows), axis=0)
    unbounded = np.zeros(len(rows), bool)
    # Far from the optimum the constrained fit may have several minima, so it is begun from other points too;
    # once, since each later step begins from the fit of the one before.
    others = [
        np.repeat(starting_points(fit.design, fit.x, fit.y, fraction)[None], len(rows), axis=0)
        for fraction in START_FRACTIONS
    ]
    for _ in range(MAX_STEPS):
        value = best + side * step
        start = fit.theta + response * (value - best)[:, None]
        rise, theta = _profile(fit, index, value, [start, theta, *others])
        others = []
        out = rise >= quantile
        near, near_rise = np.where(out, near, step), np.where(out, near_rise, rise)
        far, far_rise = np.where(out, step, far), np.where(out, rise, far_rise)
        unbounded = ~out & (step >= limit)
        done = unbounded | (np.abs(rise - quantile) <= 1e-4 * quantile)
        done |= np.isfinite(far) & (far - near <= 1e-9 * far)
        if done.all():
            break
        # Secant step, kept away from both ends of the bracket since the rise is not quite linear.
        with np.errstate(invalid="ignore"):
            fraction = np.clip((quantile - near_rise) / (far_rise - near_rise), 0.1, 0.9)
            between = near + fraction * (far - near)
        step = np.where(done, step, np.where(np.isfinite(far), between, np.minimum(2.0 * step, limit)))
    # Beyond the solver's bounds the interval is open, except that E is not negative.
    ends = np.where(unbounded & ((index >= n_irreducible) | (side > 0)), side * np.inf, best + side * step)
    return [(float(ends[2 * i]), float(ends[2 * i + 1])) for i in range(len(which))]


def _profile(fit: LeastSquaresFit, index: Indices, value: Array, begin: list[Array]) -> tuple[Array, Array]:
    """√(RSS rise / variance) with each parameter held at `value`, and the refitted θ, of the best start."""
    rows = np.arange(len(index))
    fixed = np.zeros((len(rows), fit.design.n_parameters), bool)
    fixed[rows, index] = True
    for start in begin:
        start[rows, index] = value
    found = solve_from_starts(
        fit.design, fit.x, fit.y[None], begin,
        weights=fit.weights[None], fixed=fixed, log=fit.log, iterations=100,
    )  # fmt: skip
    return np.sqrt(np.maximum(found.objective - fit.rss, 0.0) / fit.variance), found.theta
