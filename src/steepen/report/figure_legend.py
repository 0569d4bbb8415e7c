"""The legend of a figure: handles and labels of its curves, and of its kinds of lines and markers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from steepen.report.curves import Curve, curve_label, legend_curves, legend_entries, main_series
from steepen.report.draw_panel import DASHES, FONT, marker_style
from steepen.studies.answer import Series

SPACING = {"columnspacing": 1.2, "handlelength": 1.8, "handletextpad": 0.6, "borderpad": 0.1}  # × the font


def legend_handles(curves: Sequence[Curve]) -> tuple[list[Any], list[str]]:
    """Handles and labels: every named curve, then what kinds of lines and markers mean."""
    rows = [
        (_handle(curve.series, curve.colour.light), curve_label(curve)) for curve in legend_curves(curves)
    ]
    rows += [(_handle([entry.series], entry.colour.light), entry.text) for entry in legend_entries(curves)]
    return [one for one, _ in rows], [text for _, text in rows]


def _handle(series: Sequence[Series], colour: str) -> Any:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    main = main_series(series)
    line = next((s for s in main if s.kind == "line"), None)
    point = next((s for s in main if s.kind == "points"), None)
    if line is None and point is None:
        bars = series[0].kind == "bars"
        face = colour if series[0].filled else "#ffffff"
        return Patch(facecolor=face, alpha=None if bars else 0.2, edgecolor=colour if bars else "none")
    style: dict[str, Any] = {"color": colour, "lw": 1.2, "ls": DASHES[line.style] if line else "none"}
    if point is not None:
        marker = marker_style(point, colour)
        style |= {key: value for key, value in marker.items() if key != "linestyle"}
    return Line2D([], [], **style)


def legend_columns(labels: Sequence[str], inches: float) -> int:
    """The most columns whose labels fit a width, filled as matplotlib does: column by column."""
    extra = SPACING["handlelength"] + SPACING["handletextpad"] + SPACING["columnspacing"]
    for columns in range(len(labels), 1, -1):
        rows, longer = divmod(len(labels), columns)
        total, start = 0.0, 0
        for column in range(columns):
            count = rows + (column < longer)
            own = labels[start : start + count]
            start += count
            total += FONT * (extra + 0.48 * max(map(len, own)))
        if total <= 72 * inches:
            return columns
    return 1
