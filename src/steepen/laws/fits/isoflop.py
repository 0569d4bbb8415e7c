"""Iso-compute sweeps and the law of their optima: vertices, scale-shift test and rounding rule.

Where one training run gives a row at several budgets (checkpoints, cooldowns), its error moves the optima of
all these budgets together. Intervals from the scatter within a budget, or of optima about their law, do not
see that; `fit_isoflop_runs` resamples runs instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steepen.errors import UsageError
from steepen.laws.distributions import (
    Interval,
    exp_or_infinity,
    required_noncentrality,
    t_interval,
    t_p_value,
    t_reach,
)
from steepen.laws.fits.vertex import (
    MIN_POINTS,
    Parabola,
    Sweep,
    Vertex,
    VertexMethod,
    choose_points,
    find_vertex,
)
from steepen.utils.arrays import Array

DRAWS = 2000  # of the bootstrap over training runs


@dataclass(frozen=True)
class PowerLawFit:
    """y = coefficient · x^exponent by least squares of log y on log x, with t-intervals.

    `p_value` is for exponent = 0 (two-sided). `detectable` is the smallest |exponent| this many points with
    this scatter would have found with 80% power at 5%: smaller drifts would not be detected.
    """

    exponent: float
    coefficient: float
    standard_error: float
    interval: Interval
    p_value: float
    degrees_of_freedom: int
    detectable: float
    confidence: float
    leave_one_out: Interval | None
    mean_log_x: float
    mean_log_y: float
    residual_sd: float
    level_error: float  # standard error of log y at the mean of log x
    runs: int | None = None  # training runs that were resampled for the errors; None: from the scatter of y

    def predict(self, x: float) -> float:
        """The fitted y at x."""
        return math.exp(self.mean_log_y + self.exponent * (math.log(x) - self.mean_log_x))

    def interval_at(self, x: float) -> Interval:
        """Confidence interval of the fitted y at x (not a prediction interval)."""
        if self.degrees_of_freedom < 1:
            return 0.0, math.inf
        away = math.log(x) - self.mean_log_x
        reach = t_reach(self.confidence, self.degrees_of_freedom) * math.hypot(
            self.level_error, away * self.standard_error
        )
        middle = math.log(self.predict(x))
        return math.exp(middle - reach), exp_or_infinity(middle + reach)


def fit_power_law(x: Array, y: Array, confidence: float = 0.90) -> PowerLawFit:
    """Ordinary least squares of log y on log x."""
    u, v = np.log(np.asarray(x, float)), np.log(np.asarray(y, float))
    if len(u) < 2 or np.ptp(u) == 0:
        raise UsageError(f"a power law needs at least two different x; there are {len(np.unique(u))}.")
    value, error, sd = _ols(u, v)
    nu = len(u) - 2
    exponent = float(value[1])
    out = [_ols(np.delete(u, i), np.delete(v, i))[0][1] for i in range(len(u))] if len(u) > 3 else []
    centre = float(u.mean())
    return PowerLawFit(
        exponent=exponent, coefficient=float(np.exp(np.clip(value[0], -700, 700))), standard_error=error,
        interval=t_interval(exponent, error, nu, confidence) if nu > 0 else (-math.inf, math.inf),
        p_value=t_p_value(exponent, error, nu) if nu > 0 else 1.0, degrees_of_freedom=nu,
        detectable=error * math.sqrt(required_noncentrality(nu, 0.05, 0.80)) if nu > 0 else math.inf,
        confidence=confidence, leave_one_out=(float(min(out)), float(max(out))) if out else None,
        mean_log_x=centre, mean_log_y=float(value[0] + value[1] * centre), residual_sd=sd,
        level_error=sd / math.sqrt(len(u)),
    )  # fmt: skip


@dataclass(frozen=True)
class IsoflopFit:
    """The vertex of every budget, their power law and their mean; censored vertices enter neither."""

    vertices: tuple[Vertex, ...]
    law: PowerLawFit | None
    mean: float
    rounded: float
    settings: dict[str, Any]
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Nested dicts, lists and numbers, for JSON."""
        law = self.law
        return {
            "law": "isoflop", "form": "x* = coefficient * budget ** exponent", "settings": self.settings,
            "exponent": law.exponent if law else None, "coefficient": law.coefficient if law else None,
            "interval": list(law.interval) if law else None, "p_scale_shift": law.p_value if law else None,
            "detectable_drift": law.detectable if law else None, "fit": asdict(law) if law else None,
            "mean": self.mean, "rounded": self.rounded, "vertices": [asdict(v) for v in self.vertices],
            "warnings": list(self.warnings),
        }  # fmt: skip


def fit_isoflop(
    budget: Array,
    x: Array,
    loss: Array,
    *,
    method: VertexMethod = "quadratic",
    log_x: bool = True,
    log_loss: bool = True,
    confidence: float = 0.90,
    tolerance: float = 0.01,
    decimals: int = 0,
    nearest: int | None = None,
    needs_law: bool = True,
) -> IsoflopFit:
    """Fit the vertex of each budget and their power law; budgets within `tolerance` are one sweep.

    With `needs_law=False` (only the mean optimum is used) too few optima for a law give no warning.
    """
    budget, x, loss = (np.asarray(part, float) for part in (budget, x, loss))
    sweeps, warnings = budget_sweeps(budget, x, tolerance)
    vertices = [
        find_vertex(
            x[rows], loss[rows], budget=level, method=method, log_x=log_x, log_loss=log_loss,
            confidence=confidence, nearest=nearest,
        )
        for level, rows in sweeps
    ]  # fmt: skip
    if not vertices:
        raise UsageError("no budget has three different x, so there is no parabola to fit.")
    warnings += _vertex_warnings(vertices)
    interior = [v for v in vertices if v.interior]
    law, optima = None, [v.x for v in interior]
    if len(interior) >= 2 and min(optima) > 0:
        law = fit_power_law(np.array([v.budget for v in interior]), np.array(optima), confidence)
    elif needs_law:
        warnings.append(f"{len(interior)} interior optima are too few for a law")
    mean = float(np.mean(optima)) if interior else math.nan
    settings = {
        "method": method, "log_x": log_x, "log_loss": log_loss, "confidence": confidence,
        "tolerance": tolerance, "decimals": decimals, "nearest": nearest,
    }  # fmt: skip
    rounded = rounded_mean(optima, decimals) if interior else math.nan
    return IsoflopFit(tuple(vertices), law, mean, rounded, settings, tuple(warnings))


def _vertex_warnings(vertices: Sequence[Vertex]) -> list[str]:
    """What is wrong with sweeps. Censored ones are left out: their best points would bend law and mean."""
    warnings = [
        f"budget {v.budget:.3g}: no minimum: the parabola opens downwards; sweep around the optimum"
        if v.concave
        else f"budget {v.budget:.3g}: the optimum is censored (outside the sweep); widen it"
        for v in vertices
        if v.censored
    ]
    warnings += [
        f"budget {v.budget:.3g}: the interval of the optimum is unbounded (too few points, or too flat), yet"
        " it enters law and mean like any other; add points or leave it out"
        for v in vertices
        if v.interior and v.unbounded
    ]
    wide = [f"{v.budget:.3g}" for v in vertices if v.p_cubic is not None and v.p_cubic < 0.01]
    if wide:
        warnings.append(
            f"{len(wide)} of {len(vertices)} sweeps are not parabolas (budget {', '.join(wide)}; p < 0.01 for"
            " a cubic term); fit fewer points around the minimum, or use the Akima minimum"
        )
    return warnings


def budget_sweeps(
    budget: Array, x: Array, tolerance: float = 0.01
) -> tuple[list[tuple[float, NDArray[np.intp]]], list[str]]:
    """Mean budget and rows of every sweep with enough different x, and a warning for each of the others."""
    found: list[tuple[float, NDArray[np.intp]]] = []
    warnings: list[str] = []
    for rows in group_budgets(budget, tolerance):
        level = float(np.exp(np.log(budget[rows]).mean()))
        if len(np.unique(x[rows])) < MIN_POINTS:
            warnings.append(f"budget {level:.3g} has fewer than three different x and is left out")
        else:
            found.append((level, rows))
    return found, warnings


def rounded_mean(optima: list[float], decimals: int = 0) -> float:
    """The paper's rounding rule: the mean of the optima to whole TPP (or one decimal of ρ), half up."""
    factor = 10.0**decimals
    return math.floor(float(np.mean(optima)) * factor + 0.5) / factor


def group_budgets(budget: Array, tolerance: float = 0.01) -> list[NDArray[np.intp]]:
    """Row indices of each budget, lowest first; neighbours within `tolerance` are one budget."""
    order = np.argsort(budget, kind="stable")
    gaps = np.flatnonzero(np.diff(np.log(budget[order])) > math.log1p(tolerance)) + 1
    return [np.asarray(part) for part in np.split(order, gaps) if len(part)]


def _ols(u: Array, v: Array) -> tuple[Array, float, float]:
    """(intercept, slope), the slope's standard error and the residual sd."""
    centred = u - u.mean()
    spread = float(centred @ centred)
    slope = float(centred @ v) / spread if spread > 0 else math.nan
    residual = v - v.mean() - slope * centred
    nu = len(u) - 2
    variance = float(residual @ residual) / nu if nu > 0 else 0.0
    value = np.array([v.mean() - slope * u.mean(), slope])
    return value, math.sqrt(variance / max(spread, 1e-300)), math.sqrt(variance)


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
    leverage in its parabola, and get a common random sign. Drawing runs anew would leave parabolas without
    the points that they need.
    """
    fit = fit_isoflop(budget, x, loss, log_loss=log_loss, nearest=nearest, confidence=confidence)
    numbers = {name: i for i, name in enumerate(dict.fromkeys(runs))}
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], size=(DRAWS, len(numbers)))
    drawn: list[Array] = []
    for _, group in budget_sweeps(budget, x)[0]:
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
    fit, v = Parabola.of(sweep.u, sweep.v), sweep.v
    solver = np.linalg.pinv(fit.design)
    hat = fit.design @ solver
    residual = v - hat @ v
    # Rows of one run have equal signs in all draws; their leverages add up.
    same = (signs.T @ signs) > DRAWS - 0.5
    noise = residual / np.sqrt(np.maximum(1 - same @ np.diag(hat), 0.1)) * signs
    _, b, c = ((hat @ v + noise) @ solver.T).T
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.exp(np.minimum(fit.centre + fit.scale * np.where(c > 0, -b / (2 * c), np.nan), 700.0))


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
