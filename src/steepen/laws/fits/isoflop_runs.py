"""Intervals of iso-compute optima whose rows share training runs: a cluster bootstrap.

Where one run gives a row at several budgets (checkpoints, cooldowns), its error moves the optima of all these
budgets together. Intervals from the scatter within a budget, or of optima about their law, do not see that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from steepen.laws.distributions import Interval, required_noncentrality, t_p_value
from steepen.laws.fits.isoflop import IsoflopFit, PowerLawFit, fit_isoflop, group_budgets
from steepen.laws.fits.vertex import MIN_POINTS, Sweep, choose_points
from steepen.utils.arrays import Array

DRAWS = 2000


def fit_isoflop_runs(
    budget: Array,
    x: Array,
    loss: Array,
    runs: Sequence[str],
    *,
    log_loss: bool = True,
    nearest: int | None = None,
    confidence: float = 0.90,
    seed: int = 0,
) -> IsoflopFit:
    """`fit_isoflop` by parabolas in log x, with intervals from `DRAWS` resamplings of `runs`, one name a row.

    A wild bootstrap: in each draw the residuals of all rows of a run keep their size, scaled by the run's
    leverage in its parabola, and get a common random sign.
    """
    fit = fit_isoflop(budget, x, loss, log_loss=log_loss, nearest=nearest, confidence=confidence)
    numbers = {name: i for i, name in enumerate(dict.fromkeys(runs))}
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], size=(DRAWS, len(numbers)))
    drawn: list[Array] = []
    for group in group_budgets(budget):
        if len(np.unique(x[group])) < MIN_POINTS:
            continue  # as in fit_isoflop
        sweep = choose_points(x[group], loss[group], log_loss=log_loss, nearest=nearest)
        rows: list[int] = group[sweep.rows].tolist()
        drawn.append(_draw_optima(sweep, signs[:, [numbers[runs[row]] for row in rows]]))
    vertices = tuple(
        vertex if vertex.concave else replace(vertex, interval=_interval(values, confidence))
        for vertex, values in zip(fit.vertices, drawn, strict=True)
    )
    law = fit.law
    if law is not None:
        used = [i for i, vertex in enumerate(fit.vertices) if vertex.interior]
        budgets = np.array([fit.vertices[i].budget for i in used])
        law = _resampled_law(law, budgets, [drawn[i] for i in used], len(numbers), confidence)
    return replace(fit, vertices=vertices, law=law, settings={**fit.settings, "runs": len(numbers)})


def _draw_optima(sweep: Sweep, signs: Array) -> Array:
    """x* of every draw, with `signs` (draws, points); NaN where its parabola opens downwards."""
    u, v = sweep.u, sweep.v
    centre, scale = float(u.mean()), max(float(np.ptp(u)), 1e-12)
    z = (u - centre) / scale
    design = np.stack([np.ones_like(z), z, z * z], axis=1)
    solver = np.linalg.pinv(design)
    hat = design @ solver
    residual = v - hat @ v
    # Rows of one run have equal signs in all draws; their leverages add up.
    same = (signs.T @ signs) > DRAWS - 0.5
    noise = residual / np.sqrt(np.maximum(1 - same @ np.diag(hat), 0.1)) * signs
    _, b, c = ((hat @ v + noise) @ solver.T).T
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.exp(np.minimum(centre + scale * np.where(c > 0, -b / (2 * c), np.nan), 700.0))


def _interval(values: Array, confidence: float) -> Interval:
    """Percentiles; unbounded where more draws than the tails hold have no minimum."""
    tail = (1 - confidence) / 2
    if np.mean(~np.isfinite(values)) > tail:
        return -math.inf, math.inf
    low, high = np.nanquantile(values, [tail, 1 - tail])
    return float(low), float(high)


def _resampled_law(
    law: PowerLawFit, budgets: Array, drawn: Sequence[Array], runs: int, confidence: float
) -> PowerLawFit:
    """The law with intervals of the draws; the scatter of the optima about it counts where it is larger."""
    u = np.log(budgets)
    centred = u - u.mean()
    with np.errstate(divide="ignore", invalid="ignore"):
        optima = np.log(np.stack(drawn, axis=1))
    optima = optima[np.isfinite(optima).all(axis=1)]
    if len(optima) < 0.9 * DRAWS:
        return replace(law, interval=(-math.inf, math.inf), standard_error=math.inf, p_value=1.0, runs=runs)
    slopes, levels = optima @ centred / float(centred @ centred), optima.mean(axis=1)
    error, level_error = float(np.std(slopes)), float(np.std(levels))
    tail = (1 - confidence) / 2
    low, high = (float(end) for end in np.quantile(slopes, [tail, 1 - tail]))
    spare = freedom = max(runs - 2, 1)
    if law.degrees_of_freedom > 0 and law.standard_error > error:
        error, (low, high), freedom = law.standard_error, law.interval, law.degrees_of_freedom
    return replace(
        law, standard_error=error, level_error=max(level_error, law.level_error), interval=(low, high),
        degrees_of_freedom=freedom, p_value=t_p_value(law.exponent, error, spare),
        detectable=error * math.sqrt(required_noncentrality(spare, 0.05, 0.80)), runs=runs,
    )  # fmt: skip
