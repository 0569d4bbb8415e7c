"""Series for panels: measured points with their runs, fitted curves and optima; and curves of cells."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from steepen.laws.fits.isoflop import PowerLawFit
from steepen.laws.fits.vertex import Vertex
from steepen.results.panel import Lines, Series
from steepen.utils.formatting import format_flops
from steepen.utils.rows import Rows

CURVE_POINTS = 60
# What distinguishes the curves of a family: its name in the cells, and then as `Series.family`.
FAMILIES = {"depth": "depth", "passes": "passes", "budget": "FLOPs", "tpp": "TPP"}


def points(
    label: str, x: Iterable[float], y: Iterable[float], runs: Iterable[str] = (), **fields: Any
) -> Series:
    """Measured points in order of x; those without a finite y (diverged runs) are left out."""
    xs, ys = list(x), list(y)
    names = list(runs) or [""] * len(xs)
    rows = sorted(row for row in zip(xs, ys, names, strict=True) if math.isfinite(row[1]))
    x, y = (tuple(float(row[i]) for row in rows) for i in (0, 1))
    return Series(label, "points", x, y, runs=tuple(row[2] for row in rows) if any(names) else (), **fields)


def line(label: str, x: Iterable[float], y: Iterable[float], **fields: Any) -> Series:
    """A line through given points."""
    return Series(label, "line", tuple(map(float, x)), tuple(map(float, y)), **fields)


def joined(label: str, x: Iterable[float], y: Iterable[float], **fields: Any) -> Series:
    """Measured points joined in order of x; those that diverged are left out."""
    rows = sorted((a, b) for a, b in zip(x, y, strict=True) if math.isfinite(b))
    return line(label, [row[0] for row in rows], [row[1] for row in rows], **fields)


def measured_curve(
    label: str, x: Sequence[float], y: Sequence[float], runs: Iterable[str] = (), **fields: Any
) -> list[Series]:
    """Measured points with the line that joins them."""
    return [points(label, x, y, runs, **fields), joined(label, x, y, **fields)]


def family_curve(name: str, value: float) -> tuple[str, dict[str, Any]]:
    """Label and fields of one curve of a family of depths, passes, budgets or tokens per parameter (`tpp`).

    Budgets and tokens per parameter are rounded as their labels are, so that equal labels are one curve.
    """
    label = {
        "depth": f"d{value:g}", "passes": f"K = {value:g}", "budget": f"{format_flops(value)} FLOPs",
        "tpp": f"TPP {value:.3g}",
    }[name]  # fmt: skip
    level = float(value) if name in ("depth", "passes") else float(f"{value:.3g}")
    return label, {"level": level, "family": FAMILIES[name]}


Group = tuple[str, dict[str, Any], Rows[Any]]  # label, fields and rows of one curve


def family(rows: Rows[Any], by: str) -> list[Group]:
    """The curves of some rows: one for every value of `by`."""
    return [(*family_curve(by, level), own) for level, own in rows.by(by).items()]


def measured_curves(
    groups: Iterable[Group], x: str, y: str, *, join: bool = True, runs: bool = True
) -> list[Series]:
    """Measured points of every curve, joined, with their runs; those without a y are left out."""
    found: list[Series] = []
    for label, fields, rows in groups:
        own = rows.having(y)
        xs, ys = own.column(x), own.column(y)
        found += [points(label, xs, ys, own.column("run") if runs else (), **fields)] if own else []
        found += [joined(label, xs, ys, **fields)] if own and join else []
    return found


def joined_curves(rows: Rows[Any], x: str, y: str, by: str, *, runs: bool = True) -> list[Series]:
    """Measured points, joined, for every value of `by`."""
    return measured_curves(family(rows, by), x, y, runs=runs)


def sweep_curves(
    cells: Rows[Any], x: str, y: str, by: str, vertices: Mapping[Any, Vertex], *, log: bool, **star: Any
) -> list[Series]:
    """For every value of `by` the points of a sweep; with its parabola and optimum where it has one."""
    found: list[Series] = []
    for level, own in cells.having(y).by(by).items():
        label, curve = family_curve(by, level)
        found.append(points(label, own.column(x), own.column(y), own.column("run"), **curve))
        if level in vertices:
            found += optimum_curve(label, own.column(x), own.column(y), vertices[level], log, star, **curve)
    return found


def optimum_curve(
    label: str, x: Sequence[float], y: Sequence[float], vertex: Vertex, log: bool, star: dict[str, Any],
    **fields: Any,
) -> list[Series]:  # fmt: skip
    """The parabola of a sweep with its optimum; where it has none, its points joined and the best of them."""
    fitted = parabola_or_segments(label, x, y, vertex, log=log, **fields)
    return [*fitted, optimum_star(label, vertex, **star, **fields)]


def parabola_or_segments(
    label: str, x: Sequence[float], losses: Sequence[float], vertex: Vertex, *, log: bool, **fields: Any
) -> list[Series]:
    """The parabola of a sweep with an optimum; else its points joined by a dotted line."""
    fitted = parabola(label, vertex, min(x), max(x), log_x=log, log_loss=log, **fields)
    return fitted or [joined(label, x, losses, **{**fields, "style": "dotted"})]


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


def optima_with_law(
    label: str, vertices: Iterable[Vertex], law: PowerLawFit | None, detail: str = "", **fields: Any
) -> list[Series]:
    """The optima of sweeps against their budgets, hollow where censored, with the law of the others."""
    inside, censored = [v for v in vertices if v.interior], [v for v in vertices if v.censored]
    x = [v.budget for v in inside]
    found = [points(label, x, [v.x for v in inside], **fields)]
    if censored:
        at = [v.budget for v in censored], [v.x for v in censored]
        found.append(points(label, *at, role="censored", filled=False, **fields))
    if law is not None and inside:
        ends = [min(x), max(x)]
        found.append(line(label, ends, map(law.predict, ends), role="fit", detail=detail, **fields))
    return found


def mark_mean(mean: float, digits: int) -> Lines:
    """A vertical line at the mean optimum; none where there is no mean."""
    return (("x", mean, f"mean {mean:.{digits}f}"),) if math.isfinite(mean) else ()
