"""Series for panels: measured points with their runs, fitted curves, and the vertices' stars."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from steepen.laws.fits.vertex import Vertex
from steepen.studies.answer import Series

CURVE_POINTS = 60


def points(
    label: str,
    x: Iterable[float],
    y: Iterable[float],
    runs: Iterable[str] = (),
    **look: Any,
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
        **look,
    )


def line(label: str, x: Iterable[float], y: Iterable[float], **look: Any) -> Series:
    """A line through given points."""
    return Series(label, "line", tuple(map(float, x)), tuple(map(float, y)), **look)


def parabola(
    label: str, vertex: Vertex, low: float, high: float, *, log_x: bool, log_loss: bool, **look: Any
) -> list[Series]:
    """The fitted parabola of a sweep over [low, high]; none where the optimum is censored."""
    if not vertex.interior or not low < high:
        return []
    x = np.geomspace(low, high, CURVE_POINTS) if log_x else np.linspace(low, high, CURVE_POINTS)
    away = np.log(x) - math.log(vertex.x) if log_x else x - vertex.x
    bend = 0.5 * vertex.curvature * away**2
    y = vertex.loss * np.exp(bend) if log_loss else vertex.loss + bend
    return [line(label, x.tolist(), y.tolist(), **look)]


def optimum_star(label: str, vertex: Vertex, **look: Any) -> Series:
    """The optimum of a sweep: a star, hollow where it is only the best measured point."""
    return Series(label, "points", (vertex.x,), (vertex.loss,), marker="star", filled=vertex.interior, **look)


def sweep_series(
    label: str, x: Sequence[float], losses: Sequence[float], runs: Sequence[str], vertex: Vertex,
    *, log: bool, **look: Any,
) -> list[Series]:  # fmt: skip
    """A sweep as it is always shown: what was measured, the fitted parabola, and the optimum's star."""
    fitted = parabola(label, vertex, min(x), max(x), log_x=log, log_loss=log, **look)
    return [
        points(label, x, losses, runs, **look),
        *fitted,
        optimum_star(f"{label}: optimum", vertex, **look),
    ]


def shade_levels(values: Sequence[float]) -> dict[float, float]:
    """A shade in [0, 1] for each of a family of curves."""
    ordered = sorted(set(values))
    return {value: i / max(1, len(ordered) - 1) for i, value in enumerate(ordered)}


def finite_or_none(value: float | None) -> float | None:
    """A number that JSON has a word for, or None."""
    return None if value is None or not math.isfinite(value) else float(value)
