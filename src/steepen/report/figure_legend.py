"""The legend of a figure: handles and labels of its curves, and of its kinds of lines and markers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from steepen.report.draw_panel import DASHES, marker_style
from steepen.report.groups import Curve, curve_label, legend_entries
from steepen.studies.answer import Series

MAX_NAMED = 16  # curves in a legend; of a longer family, evenly spaced ones


def legend_handles(curves: Sequence[Curve]) -> tuple[list[Any], list[str]]:
    """Handles and labels: every named curve, then what kinds of lines and markers mean."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    def handle(series: Sequence[Series], colour: str) -> Any:
        line = next((s for s in series if s.kind == "line"), None)
        point = next((s for s in series if s.kind == "points"), None)
        if line is None and point is None:
            bars = series[0].kind == "bars"
            face = colour if series[0].filled else "#ffffff"
            return Patch(facecolor=face, alpha=None if bars else 0.2, edgecolor=colour if bars else "none")
        style: dict[str, Any] = {"color": colour, "lw": 1.2, "ls": DASHES[line.style] if line else "none"}
        if point is not None:
            marker = marker_style(point, colour)
            style |= {key: value for key, value in marker.items() if key != "linestyle"}
        return Line2D([], [], **style)

    named = legend_curves(curves)
    rows = [(handle(curve.series, curve.colour.light), curve_label(curve)) for curve in named]
    rows += [(handle([entry.series], entry.colour.light), entry.text) for entry in legend_entries(curves)]
    return [one for one, _ in rows], [text for _, text in rows]


def legend_curves(curves: Sequence[Curve]) -> list[Curve]:
    """The curves that a legend names: all, or evenly spaced ones of more than `MAX_NAMED`."""
    named = [curve for curve in curves if curve.named]
    if len(named) <= MAX_NAMED:
        return named
    return [named[round(i * (len(named) - 1) / (MAX_NAMED - 1))] for i in range(MAX_NAMED)]
