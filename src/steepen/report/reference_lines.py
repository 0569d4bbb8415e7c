"""Labelled vertical and horizontal lines of a panel; each label is put where it covers least."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from steepen.report.axis_limits import can_show, shown_points
from steepen.report.colours import NEUTRAL
from steepen.results.panel import Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Box = tuple[float, float, float, float]  # left, bottom, right, top in fractions of the axes
SAMPLES = 24  # places on each segment of a line that a label should not cover
GAP = 0.012  # between a line and its label
# Places along a line, the usual one first, and which part of the label is there: its end, start or middle.
PLACES = ((0.99, 1.0), (0.01, 0.0), (0.5, 0.5), (0.3, 0.5), (0.7, 0.5), (0.85, 0.5), (0.15, 0.5))
ALIGN = {"ha": {0.0: "left", 0.5: "center", 1.0: "right"}, "va": {0.0: "bottom", 0.5: "center", 1.0: "top"}}


def draw_reference_lines(axes: Axes, panel: Panel, inches: tuple[float, float], font: float) -> None:
    """Draw `panel.lines` behind its series, which are drawn already; ids are `r0`, `r0-t`, `r1` …"""
    covered, used = _covered(axes, panel), list[Box]()
    letter = 0.85 * font / 72  # inches
    style: dict[str, Any] = {"color": NEUTRAL.light, "lw": 0.5, "zorder": 1}
    for i, (direction, value, text) in enumerate(panel.lines):
        if not can_show(value, panel.x if direction == "x" else panel.y):
            continue
        (axes.axvline if direction == "x" else axes.axhline)(value, gid=f"r{i}", **style)
        size = (0.5 * letter * len(text) / (0.8 * inches[0]), 1.25 * letter / (0.75 * inches[1]))
        ends = (value, axes.get_ylim()[0]) if direction == "x" else (axes.get_xlim()[0], value)
        at = float(axes.transLimits.transform(axes.transScale.transform(ends))["xy".index(direction)])
        boxes: dict[Box, tuple[float, float, float, float]] = {}
        for across, side in ((at + GAP, 0.0), (at - GAP, 1.0)):
            for along, part in PLACES:
                x, y, fx, fy = (
                    (across, along, side, part) if direction == "x" else (along, across, part, side)
                )
                left, low = x - size[0] * fx, y - size[1] * fy
                boxes[left, low, left + size[0], low + size[1]] = (x, y, fx, fy)
        if text:
            used.append(min(boxes, key=lambda box: _cost(box, covered, used)))
            x, y, fx, fy = boxes[used[-1]]
            axes.annotate(
                text, (x, y), xycoords="axes fraction", ha=ALIGN["ha"][fx], va=ALIGN["va"][fy], zorder=3.5,
                fontsize=0.85 * font, color=NEUTRAL.light, parse_math=False, gid=f"r{i}-t",
                annotation_clip=False,
            )  # fmt: skip


def _cost(box: Box, covered: np.ndarray, used: Sequence[Box]) -> float:
    """How bad a place is: outside the axes, on another label, or on a curve."""
    left, low, right, top = box
    outside = max(0.0, -left, right - 1) + max(0.0, -low, top - 1)
    on_labels = sum(left < b[2] and b[0] < right and low < b[3] and b[1] < top for b in used)
    x, y = covered.T
    on_curves = int(((x > left - 0.01) & (x < right + 0.01) & (y > low - 0.02) & (y < top + 0.02)).sum())
    return 1e4 * outside + 1e3 * on_labels + on_curves


def _covered(axes: Axes, panel: Panel) -> np.ndarray:
    """Places that points, lines and error bars cover, (places, 2) in fractions of the axes."""
    found: list[np.ndarray] = [np.empty((0, 2))]
    for series in panel.series:
        shown = shown_points(series, panel)
        if not shown or series.kind == "band":
            continue
        ends = (series.low, series.high) if series.low and series.high and not panel.y.names else ()
        data = [(series.x[i], y[i]) for y in (series.y, *ends) for i in shown]
        places = axes.transLimits.transform(axes.transScale.transform(np.array(data)))
        if series.kind == "line" and len(places) > 1:
            steps = np.linspace(0, 1, SAMPLES)[:, None, None]
            places = (places[:-1] + steps * (places[1:] - places[:-1])).reshape(-1, 2)
        found += [places] * (3 if series.kind != "line" else 1)
    return np.concatenate(found)
