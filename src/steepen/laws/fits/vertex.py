"""The optimum of one sweep at fixed compute: vertex of a parabola with its interval, or Akima minimum."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import interpolate

from steepen.errors import UsageError
from steepen.laws.distributions import Interval, exp_or_infinity, f_p_value, t_reach
from steepen.utils.arrays import Array

VertexMethod = Literal["quadratic", "akima"]
MIN_POINTS = 3


@dataclass(frozen=True)
class Vertex:
    """The minimum of a sweep. `interior`: it lies inside the sweep; otherwise it is censored.

    A censored sweep's `x` is its best measured point, not an optimum. `interval` is infinite where the
    curvature itself is uncertain. `leave_one_out` is the range of the vertex without each point. A
    parabola that opens downwards is `concave`: it has no minimum, so `interval` and `leave_one_out` are None.
    `bracketed`: the lowest measured point is not at an end of the sweep, a stricter condition than `interior`
    by which the paper's authors choose the optima of the number of passes.
    `p_cubic` is small where a cubic term is needed, that is, where the sweep is too wide for a parabola.
    """

    budget: float
    x: float
    loss: float
    interior: bool
    interval: Interval | None
    curvature: float
    points: int
    leave_one_out: Interval | None
    method: VertexMethod
    p_cubic: float | None = None
    bracketed: bool = False

    @property
    def censored(self) -> bool:
        """Whether the optimum lies outside the sweep."""
        return not self.interior

    @property
    def concave(self) -> bool:
        """Whether the sweep has no minimum at all, because its parabola opens downwards."""
        return self.method == "quadratic" and self.curvature <= 0

    @property
    def unbounded(self) -> bool:
        """Whether the interval of the optimum is infinite (an Akima minimum has no interval)."""
        return self.method == "quadratic" and (self.interval is None or math.isinf(self.interval[1]))


@dataclass(frozen=True, eq=False)
class Sweep:
    """The points of one parabola: u is x or its logarithm, v the loss or its logarithm, in order of x.

    `rows` are the places of these points in the arrays they were chosen from.
    """

    u: Array
    v: Array
    rows: NDArray[np.intp]


def choose_points(
    x: Array, loss: Array, *, log_x: bool = True, log_loss: bool = True, nearest: int | None = None
) -> Sweep:
    """The points of a sweep that its parabola is fitted to: all, or the `nearest` around the lowest."""
    rows = np.argsort(x)
    x, loss = np.asarray(x, float)[rows], np.asarray(loss, float)[rows]
    u, v = (np.log(x) if log_x else x), (np.log(loss) if log_loss else loss)
    if nearest is not None:
        close = np.sort(np.argsort(np.abs(u - u[np.argmin(v)]), kind="stable")[:nearest])
        u, v, rows = u[close], v[close], rows[close]
    return Sweep(u, v, rows)


@dataclass(frozen=True, eq=False)
class Parabola:
    """Least squares of v on 1, z and z² with z = (u − centre) / scale, so that the columns are of one size.

    `inverse` is that of the normal equations: the covariance of `value` in units of the noise's variance.
    """

    centre: float
    scale: float
    design: Array
    inverse: Array
    value: Array
    residual: Array

    @classmethod
    def of(cls, u: Array, v: Array) -> Parabola:
        """Fit the parabola."""
        centre, scale = float(u.mean()), max(float(np.ptp(u)), 1e-12)
        z = (u - centre) / scale
        design = np.stack([np.ones_like(z), z, z * z], axis=1)
        inverse = np.asarray(np.linalg.pinv(design.T @ design), float)
        value = inverse @ design.T @ v
        return cls(centre, scale, design, inverse, value, v - design @ value)


def find_vertex(
    x: Array,
    loss: Array,
    *,
    budget: float = math.nan,
    method: VertexMethod = "quadratic",
    log_x: bool = True,
    log_loss: bool = True,
    confidence: float = 0.90,
    nearest: int | None = None,
) -> Vertex:
    """Fit loss against x (log–log by default) and find the minimum.

    `nearest` fits only that many points around the lowest, for sweeps too wide for a parabola.
    """
    if nearest is not None and nearest < MIN_POINTS:
        raise UsageError(f"nearest is {nearest}; a parabola needs at least {MIN_POINTS} points.")
    where = "" if math.isnan(budget) else f" at budget {budget:.3g}"
    if len(np.unique(x)) < MIN_POINTS:
        raise UsageError(
            f"a sweep{where} has {len(np.unique(x))} different x; a parabola needs {MIN_POINTS}."
        )
    sweep = choose_points(x, loss, log_x=log_x, log_loss=log_loss, nearest=nearest)
    u, v = sweep.u, sweep.v
    quadratic = method == "quadratic"
    position, height, curvature = (_parabola if quadratic else _akima)(u, v)
    # At an end of the sweep, and beyond it, the vertex is an extrapolation.
    inner = 1e-9 * (u[-1] - u[0])
    interior = bool(math.isfinite(position) and curvature > 0 and u[0] + inner < position < u[-1] - inner)
    interval: Interval | None = _fieller(u, v, confidence) if quadratic else (-math.inf, math.inf)
    jackknife = _leave_one_out(u, v, method)
    if quadratic and curvature <= 0:
        interval, jackknife = None, None
    if not interior:
        best = int(np.argmin(v))
        position, height = float(u[best]), float(v[best])

    def back(value: float) -> float:
        return exp_or_infinity(value) if log_x else value

    return Vertex(
        budget, back(position), math.exp(height) if log_loss else height, interior,
        None if interval is None else (back(interval[0]), back(interval[1])), curvature, len(u),
        None if jackknife is None else (back(jackknife[0]), back(jackknife[1])), method,
        p_cubic=_p_cubic(u, v) if quadratic else None,
        bracketed=bool(u[0] < u[int(np.argmin(v))] < u[-1]),
    )  # fmt: skip


def _p_cubic(u: Array, v: Array) -> float | None:
    """F-test of a cubic term; None without the points for it.

    Losses rise faster on one side of an optimum than on the other, so the parabola of a wide sweep has its
    vertex too far on the flat side.
    """
    nu = len(u) - 4
    if nu < 1 or len(np.unique(u)) < 4:
        return None
    z = (u - u.mean()) / max(float(np.ptp(u)), 1e-12)
    small, large = (float(((v - np.polyval(np.polyfit(z, v, k), z)) ** 2).sum()) for k in (2, 3))
    return float(f_p_value(np.array((small - large) / max(large / nu, 1e-300)), 1.0, np.array(float(nu))))


def _parabola(u: Array, v: Array) -> tuple[float, float, float]:
    """Vertex, height there, and curvature (second derivative)."""
    centre, scale = u.mean(), max(float(np.ptp(u)), 1e-12)
    c2, c1, c0 = np.polyfit((u - centre) / scale, v, 2)
    if c2 == 0:
        return math.nan, float(v.min()), 0.0
    minimum = -c1 / (2 * c2)
    height = c0 + c1 * minimum + c2 * minimum**2
    return float(centre + scale * minimum), float(height), float(2 * c2 / scale**2)


def _akima(u: Array, v: Array) -> tuple[float, float, float]:
    """The minimum of an Akima curve through the points (repeats at one x averaged)."""
    unique, inverse = np.unique(u, return_inverse=True)
    mean = np.bincount(inverse, v) / np.bincount(inverse)
    if len(unique) < 3:
        return math.nan, float(v.min()), 0.0
    grid = np.linspace(unique[0], unique[-1], 5001)
    curve = interpolate.Akima1DInterpolator(unique, mean)(grid)
    best = int(np.argmin(curve))
    if best in (0, len(grid) - 1):
        return float(grid[best]), float(curve[best]), 0.0
    position, height, curvature = _parabola(grid[best - 1 : best + 2], curve[best - 1 : best + 2])
    return position, height, max(curvature, 1e-300)


def _fieller(u: Array, v: Array, confidence: float) -> Interval:
    """The vertex is −b/(2c); Fieller's interval holds also where the curvature c is poorly known."""
    nu = len(u) - 3
    if nu < 1:
        return -math.inf, math.inf
    fit = Parabola.of(u, v)
    covariance = fit.inverse * float(fit.residual @ fit.residual) / nu
    t = t_reach(confidence, nu)
    # All p with (b + 2cp)² ≤ t²·Var(b + 2cp): a quadratic inequality in p.
    b, c = fit.value[1], fit.value[2]
    quad = 4 * c * c - t * t * 4 * covariance[2, 2]
    line = 4 * b * c - t * t * 4 * covariance[1, 2]
    rest = b * b - t * t * covariance[1, 1]
    discriminant = line * line - 4 * quad * rest
    if quad <= 0 or discriminant < 0:
        return -math.inf, math.inf
    ends = sorted((-line + side * math.sqrt(discriminant)) / (2 * quad) for side in (-1, 1))
    return float(fit.centre + fit.scale * ends[0]), float(fit.centre + fit.scale * ends[1])


def _leave_one_out(u: Array, v: Array, method: VertexMethod) -> Interval | None:
    if len(u) <= MIN_POINTS:
        return None
    fit = _akima if method == "akima" else _parabola
    rest = [np.arange(len(u)) != i for i in range(len(u))]
    found = [fit(u[keep], v[keep])[0] for keep in rest if len(np.unique(u[keep])) >= MIN_POINTS]
    finite = [value for value in found if math.isfinite(value)]
    return (min(finite), max(finite)) if finite else None
