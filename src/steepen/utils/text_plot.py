"""A small line chart as text, for a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

MARKS = "•×+o"


def text_plot(
    curves: Sequence[tuple[Sequence[float], Sequence[float]]], width: int = 72, height: int = 12
) -> list[str]:
    """The lines of a chart of (x, y) curves, at most `width` characters wide, each with its own mark.

    Every column shows the mean of the points in it. Values that are not finite are left out.
    """
    points = [
        [(float(a), float(b)) for a, b in zip(x, y, strict=True) if math.isfinite(a) and math.isfinite(b)]
        for x, y in curves
    ]
    every = [point for curve in points for point in curve]
    if not every:
        return []
    left, right = min(x for x, _ in every), max(x for x, _ in every)
    low, high = min(y for _, y in every), max(y for _, y in every)
    labels = [f"{high:.3f}", f"{low:.3f}"]
    margin = max(map(len, labels))
    columns = max(8, width - margin - 2)
    grid = [[" "] * columns for _ in range(height)]
    for number, curve in enumerate(points):
        bins: dict[int, list[float]] = {}
        for x, y in curve:
            place = (x - left) / (right - left) if right > left else 0.0
            bins.setdefault(round(place * (columns - 1)), []).append(y)
        for column, values in bins.items():
            share = (sum(values) / len(values) - low) / (high - low) if high > low else 0.5
            grid[height - 1 - round(share * (height - 1))][column] = MARKS[number % len(MARKS)]
    lines = [
        f"{(labels[0] if row == 0 else labels[1] if row == height - 1 else '').rjust(margin)} │"
        + "".join(cells).rstrip()
        for row, cells in enumerate(grid)
    ]
    ends = f"{left:,.0f}".ljust(columns - len(f"{right:,.0f}")) + f"{right:,.0f}"
    return [*lines, f"{'':{margin}} └{'─' * columns}", f"{'':{margin}}  {ends}"]
