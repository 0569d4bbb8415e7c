"""Intervals by profile likelihood: how far a parameter can move before the best fit with it there is
refuted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from steepen.laws.distributions import Interval
from steepen.laws.fits.solver import Array, Design, parameter_bounds, solve_from_starts, starting_points

Indices = NDArray[np.intp]

START_FRACTIONS = (0.0, 0.5, 0.9)  # of the lowest loss, at which floors begin
MAX_STEPS = 60


@dataclass(frozen=True, eq=False)
class LeastSquaresFit:
    """A least-squares fit to one data set, ready to be profiled."""

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
    """For each parameter, where the profiled sum of squares has risen by quantile² · variance on either
    side.

    With `quantile` Student's t for the residual degrees of freedom this is the interval an F-test inverts.
    An end that is never reached is infinite; a floor's lower end stops at zero.
    """
    n_floor = fit.design.sizes[0]
    errors = np.sqrt(np.maximum(np.diag(covariance) * fit.variance, 0.0))
    rows = [(index, side) for index in which for side in (-1.0, 1.0)]
    index = np.array([row[0] for row in rows])
    side = np.array([row[1] for row in rows])
    best = fit.theta[index]
    # As a parameter is pushed, the others follow it; the covariance says how, to first order.
    follow = (covariance[:, index] / np.maximum(np.diag(covariance)[index], 1e-300)).T
    lowest, highest = (part[0, index] for part in parameter_bounds(fit.design, fit.y[None]))
    limit = np.abs(np.where(side < 0, lowest, highest) - best)  # how far each can go
    # Between `near`, which is not refuted, and `far`, which is; until that is found, twice as far each time.
    near, far = np.zeros(len(rows)), np.full(len(rows), np.inf)
    near_rise, far_rise = np.zeros(len(rows)), np.full(len(rows), np.inf)
    step = np.minimum(np.maximum(quantile * errors[index], 1e-9 * np.maximum(np.abs(best), 1.0)), limit)
    theta = np.repeat(fit.theta[None], len(rows), axis=0)
    endless = np.zeros(len(rows), bool)
    for _ in range(MAX_STEPS):
        value = best + side * step
        start = fit.theta + follow * (value - best)[:, None]
        rise, theta = _profile(fit, index, value, [start, theta])
        out = rise >= quantile
        near, near_rise = np.where(out, near, step), np.where(out, near_rise, rise)
        far, far_rise = np.where(out, step, far), np.where(out, rise, far_rise)
        endless = ~out & (step >= limit)
        done = endless | (np.abs(rise - quantile) <= 1e-4 * quantile)
        done |= np.isfinite(far) & (far - near <= 1e-9 * far)
        if done.all():
            break
        # The rise is nearly linear in the parameter; not quite, so some way is always kept from both ends.
        with np.errstate(invalid="ignore"):
            share = np.clip((quantile - near_rise) / (far_rise - near_rise), 0.1, 0.9)
            between = near + share * (far - near)
        step = np.where(done, step, np.where(np.isfinite(far), between, np.minimum(2.0 * step, limit)))
    # Past every limit the solver allows there is no end, save that no floor lies below zero.
    ends = np.where(endless & ((index >= n_floor) | (side > 0)), side * np.inf, best + side * step)
    return [(float(ends[2 * i]), float(ends[2 * i + 1])) for i in range(len(which))]


def _profile(fit: LeastSquaresFit, index: Indices, value: Array, begin: list[Array]) -> tuple[Array, Array]:
    """How far, in standard deviations, the fit is off with each parameter at a value, and where it is then.

    The best from several starts: where a parameter is pushed far, the best fit may be another than the one
    that its neighbour's leads to.
    """
    rows = np.arange(len(index))
    anew = [starting_points(fit.design, fit.x, fit.y, fraction) for fraction in START_FRACTIONS]
    fixed = np.zeros((len(rows), fit.design.n_parameters), bool)
    fixed[rows, index] = True
    every = [*begin, *(np.repeat(one[None], len(rows), axis=0) for one in anew)]
    for start in every:
        start[rows, index] = value
    found = solve_from_starts(
        fit.design, fit.x, fit.y[None], every,
        weights=fit.weights[None], fixed=fixed, log=fit.log, iterations=100,
    )  # fmt: skip
    return np.sqrt(np.maximum(found.objective - fit.rss, 0.0) / fit.variance), found.theta
