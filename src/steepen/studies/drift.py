"""Drift of a hyperparameter's optimum with model size, and the laws of growth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy import stats

from steepen.errors import UsageError
from steepen.laws.distributions import Interval, t_interval
from steepen.laws.fits.isoflop import IsoflopFit, PowerLawFit, fit_isoflop, fit_power_law
from steepen.laws.fits.vertex import Vertex, find_vertex
from steepen.utils.arrays import Array


@dataclass(frozen=True)
class Drift:
    """The drift exponent β of optimum ∝ N^β, and the cost of missing the optimum.

    `regret` is the mean loss at half and twice the base value less the loss at the base; `span` the full
    range of losses; both at the largest size swept at half, base and twice. `exceeds_three_standard_errors`
    (|β| at least three standard errors) marks what the paper prints in bold; with three sizes that has one
    degree of freedom and p can be as large as 0.20, so use `law.interval` and `law.p_value`.
    """

    law: PowerLawFit | None
    vertices: tuple[Vertex, ...]
    regret: float | None
    span: float | None
    at_parameters: float | None
    exceeds_three_standard_errors: bool


def fit_drift(sweeps: Mapping[float, tuple[Array, Array]]) -> Drift:
    """Fit log optimum against log size, each optimum the vertex of log loss against log multiple.

    `sweeps` are multiples of a hyperparameter's base value, and their losses, by model size. Censored optima
    are excluded.
    """
    if not sweeps:
        raise UsageError("there are no sweeps to fit a drift to.")
    ordered = sorted(sweeps.items(), key=lambda one: one[0])
    vertices = tuple(find_vertex(multiples, loss, budget=size) for size, (multiples, loss) in ordered)
    places = np.array([[v.budget, v.x] for v in vertices if v.interior])
    line = fit_power_law(places[:, 0], places[:, 1]) if len(places) >= 2 else None
    regret = span = largest = None
    for size, (multiples, loss) in ordered:
        at = [np.isclose(multiples, multiple, rtol=1e-6) for multiple in (0.5, 1.0, 2.0)]
        if all(close.any() for close in at):
            half, base, twice = (float(np.mean(loss[close])) for close in at)
            regret, span, largest = 0.5 * (half + twice) - base, float(np.ptp(loss)), size
    significant = (
        line is not None and line.degrees_of_freedom > 0 and abs(line.exponent) >= 3 * line.standard_error
    )
    return Drift(line, vertices, regret, span, largest, significant)


def fit_growth_fraction(budget: Array, rho: Array, loss: Array) -> IsoflopFit:
    """Each budget's best fraction ρ of tokens after growth, by a parabola; mean rounded to one decimal."""
    return fit_isoflop(budget, rho, loss, log_x=False, log_loss=False, decimals=1, needs_law=False)


@dataclass(frozen=True)
class AffineLaw:
    """y = a·x + b, 90% intervals; as a `GrowthLaw` x is TPP without growth, y that at the best transition."""

    a: float
    b: float
    a_interval: Interval
    b_interval: Interval
    r_squared: float
    degrees_of_freedom: int


def fit_affine(x: Array, y: Array) -> AffineLaw:
    """Ordinary least squares of y on x."""
    x, y = np.asarray(x, float), np.asarray(y, float)
    if len(x) < 3 or np.ptp(x) == 0:
        raise UsageError(
            f"an affine law with intervals needs three points at different x; there are {len(x)}."
        )
    found = stats.linregress(x, y)
    nu, a, b = len(x) - 2, float(found.slope), float(found.intercept)
    of_a, of_b = (
        t_interval(value, float(error), nu, 0.90)
        for value, error in ((a, found.stderr), (b, found.intercept_stderr))
    )
    return AffineLaw(a, b, of_a, of_b, float(found.rvalue) ** 2, nu)
