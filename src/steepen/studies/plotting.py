"""Series for panels: measured points with their runs, fitted curves and optima."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np

from steepen.laws.fits.isoflop import IsoflopFit
from steepen.laws.fits.vertex import Vertex
from steepen.studies.answer import Series
from steepen.utils.formatting import format_flops

CURVE_POINTS = 60


def points(
    label: str,
    x: Iterable[float],
    y: Iterable[float],
    runs: Iterable[str] = (),
    **fields: Any,
) -> Series:
    """Measured points in order of x; those without a finite y (diverged runs) are left out."""
    xs, ys = list(x), list(y)
    names = list(runs) or [""] * len(xs)
    rows = sorted(row for row in zip(xs, ys, names, strict=True) if math.isfinite(row[1]))
    return Series(
        label=label,
        kind="points",
        x=tuple(float(row[0]) for row in rows),
        y=tuple(float(row[1]) for row in rows),
        runs=tuple(row[2] for row in rows) if any(names) else (),
        **fields,
    )


def line(label: str, x: Iterable[float], y: Iterable[float], **fields: Any) -> Series:
    """A line through given points."""
    return Series(label, "line", tuple(map(float, x)), tuple(map(float, y)), **fields)


def censored_points(label: str, vertices: Iterable[Vertex], **fields: Any) -> list[Series]:
    """Hollow points at the best measured x of censored sweeps, against their budgets; [] without any."""
    censored = [vertex for vertex in vertices if vertex.censored]
    if not censored:
        return []
    x, y = [v.budget for v in censored], [v.x for v in censored]
    return [points(label, x, y, role="censored", filled=False, **fields)]


def parabola(
    label: str, vertex: Vertex, low: float, high: float, *, log_x: bool, log_loss: bool, **fields: Any
) -> list[Series]:
    """The fitted parabola of a sweep over [low, high]; [] where the optimum is censored."""
    if not vertex.interior or not low < high:
        return []
    x = np.geomspace(low, high, CURVE_POINTS) if log_x else np.linspace(low, high, CURVE_POINTS)
    offset = np.log(x) - math.log(vertex.x) if log_x else x - vertex.x
    bend = 0.5 * vertex.curvature * offset**2
    y = vertex.loss * np.exp(bend) if log_loss else vertex.loss + bend
    return [line(label, x.tolist(), y.tolist(), role="fit", **fields)]


def optimum_star(label: str, vertex: Vertex, **fields: Any) -> Series:
    """The optimum of a sweep as a star; hollow where it is only the best measured point."""
    role = "optimum" if vertex.interior else "censored"
    return Series(
        label, "points", (vertex.x,), (vertex.loss,), role=role, marker="star", filled=vertex.interior,
        **fields,
    )  # fmt: skip


def sweep_series(
    label: str, x: Sequence[float], losses: Sequence[float], runs: Sequence[str], vertex: Vertex,
    *, log: bool, **fields: Any,
) -> list[Series]:  # fmt: skip
    """A sweep: its measured points, fitted parabola and optimum."""
    fitted = parabola_or_segments(label, x, losses, vertex, log=log, **fields)
    return [points(label, x, losses, runs, **fields), *fitted, optimum_star(label, vertex, **fields)]


def parabola_or_segments(
    label: str, x: Sequence[float], losses: Sequence[float], vertex: Vertex, *, log: bool, **fields: Any
) -> list[Series]:
    """The parabola of a sweep with an optimum; else its points joined by a dotted line."""
    fitted = parabola(label, vertex, min(x), max(x), log_x=log, log_loss=log, **fields)
    return fitted or [joined(label, x, losses, **{**fields, "style": "dotted"})]


def joined(label: str, x: Iterable[float], y: Iterable[float], **fields: Any) -> Series:
    """Measured points joined in order of x; those that diverged are left out."""
    rows = sorted((a, b) for a, b in zip(x, y, strict=True) if math.isfinite(b))
    return line(label, [row[0] for row in rows], [row[1] for row in rows], **fields)


def error_of_mean(fit: IsoflopFit) -> float | None:
    """Standard error of the mean optimum of several sweeps, from their spread; None for fewer than two."""
    inside = [vertex.x for vertex in fit.vertices if vertex.interior]
    return float(np.std(inside, ddof=1)) / math.sqrt(len(inside)) if len(inside) > 1 else None


def mean_with_error(fit: IsoflopFit, digits: int) -> str:
    """The mean optimum in words, with its standard error if there is one."""
    error = error_of_mean(fit)
    return f"{fit.mean:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def family_curve(
    kind: Literal["depth", "passes", "FLOPs", "TPP"], value: float
) -> tuple[str, dict[str, Any]]:
    """Label and fields of one curve of a family of depths, passes, budgets or tokens per parameter.

    Budgets and tokens per parameter are rounded as their labels are, so that equal labels are one curve.
    """
    label = {
        "depth": f"d{value:g}",
        "passes": f"K = {value:g}",
        "FLOPs": f"{format_flops(value)} FLOPs",
        "TPP": f"TPP {value:.3g}",
    }[kind]
    level = float(value) if kind in ("depth", "passes") else float(f"{value:.3g}")
    return label, {"level": level, "family": kind}


def finite_or_none(value: float | None) -> float | None:
    """A number that JSON can express, or None."""
    return None if value is None or not math.isfinite(value) else float(value)
