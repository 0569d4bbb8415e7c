"""Intervals by profile likelihood: how far a parameter can move before the best fit with it there is
refuted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from steepen.laws.solver import Array, Design, limits, solve

Interval = tuple[float, float]


@dataclass(frozen=True, eq=False)
class Fitted:
    """A least-squares fit to one data set, ready to be profiled."""

    design: Design
    x: Array
    y: Array
    weights: Array
    theta: Array
    rss: float
    variance: float
    log: bool


def profile_intervals(fit: Fitted, which: list[int], covariance: Array, quantile: float) -> list[Interval]:
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
    step = np.maximum(quantile * errors[index], 1e-9 * np.maximum(np.abs(fit.theta[index]), 1.0))
    fixed = np.zeros((len(rows), fit.design.parameters), bool)
    fixed[np.arange(len(rows)), index] = True
    # As a parameter is pushed, the others follow it; the covariance says how, to first order.
    follow = (covariance[:, index] / np.maximum(np.diag(covariance)[index], 1e-300)).T
    lowest, highest = (part[0, index] for part in limits(fit.design, fit.y[None]))
    ends = np.where(side < 0, lowest, highest)
    reached = np.zeros(len(rows), bool)
    for _ in range(40):
        value = np.clip(fit.theta[index] + side * step, lowest, highest)
        start = fit.theta + follow * (value - fit.theta[index])[:, None]
        start[np.arange(len(rows)), index] = value
        found = solve(
            fit.design, fit.x, fit.y[None], start,
            weights=fit.weights[None], fixed=fixed, log=fit.log, iterations=60,
        )  # fmt: skip
        rise = np.sqrt(np.maximum(found.objective - fit.rss, 0.0) / fit.variance)
        stuck = ((value <= lowest) | (value >= highest)) & (rise < quantile)
        # Past every limit the solver allows there is no end, save that no floor lies below zero.
        beyond = np.where(stuck & ((index >= n_floor) | (side > 0)), side * np.inf, value)
        ends = np.where(reached, ends, beyond)
        reached |= (np.abs(rise - quantile) <= 1e-4 * quantile) | stuck
        if reached.all():
            break
        # The root of the rise is nearly linear in the parameter, so scaling the step homes in at once.
        scale = np.clip(quantile / np.maximum(rise, 1e-12), 0.25, 2.0)
        step = np.where(reached, step, step * scale)
    return [(float(ends[2 * i]), float(ends[2 * i + 1])) for i in range(len(which))]
