"""Lay out a panel: the box, ticks, labels, series and legend, before drawing.

The matplotlib figures and the SVG page draw the same layout, so they show the same ranges, ticks, colours
and labels. Coordinates run from the top left, in points on paper and in
pixels on the page.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from steepen.report.axes import AxisRange, Tick, axis_range, ticks
from steepen.report.groups import Curve, LegendEntry, curves_of, legend_entries
from steepen.report.labels import Label, labels_at_curve_ends, labels_beside_points
from steepen.studies.answer import Panel, Series


@dataclass(frozen=True)
class Canvas:
    """Size and fonts of a drawing. `character_width` is the mean, as a fraction of the font size."""

    width: float
    height: float
    font: float
    character_width: float = 0.6
    rotated_y_label: bool = False  # beside the axis; otherwise horizontal above it

    def text_width(self, text: str) -> float:
        """Approximate width of a text."""
        return self.character_width * self.font * len(text)


# 3.5 inches: one column of a two-column page.
PAPER = Canvas(252, 178, 7.5, character_width=0.47, rotated_y_label=True)
WIDE = Canvas(760, 420, 13)
NARROW = Canvas(358, 330, 11.5)


@dataclass(frozen=True)
class PlacedSeries:
    """A series with the coordinates and values of its points that can be shown."""

    series: Series
    curve: Curve
    at: tuple[tuple[float, float], ...]
    values: tuple[tuple[float, float], ...]
    upper: tuple[float, ...] = ()  # of a band: where its upper edge lies
    upper_values: tuple[float, ...] = ()
    runs: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReferenceLine:
    """A vertical or horizontal line across the box, with a label."""

    direction: str
    value: float
    at: float
    text: str


@dataclass(frozen=True)
class PanelLayout:
    """Everything a drawing of one panel needs."""

    panel: Panel
    canvas: Canvas
    height: float
    box: tuple[float, float, float, float]  # left, top, right, bottom
    x: AxisRange
    y: AxisRange
    x_ticks: tuple[tuple[float, Tick], ...]
    y_ticks: tuple[tuple[float, Tick], ...]
    x_minor: tuple[tuple[float, float], ...]  # coordinates and values of unlabelled ticks
    y_minor: tuple[tuple[float, float], ...]
    marks: tuple[PlacedSeries, ...]
    labels: tuple[Label, ...]
    reference_lines: tuple[ReferenceLine, ...]
    legend: tuple[tuple[float, float, LegendEntry], ...]
    hidden: int  # points that cannot be shown on a log axis


def lay_out(panel: Panel, canvas: Canvas, titles: dict[str, str]) -> PanelLayout:
    """Lay out a panel on a canvas; `titles` are the arms' display names."""
    groups = curves_of(panel, titles)
    x, y = _axis_ranges(panel)
    font = canvas.font
    x_ticks, x_minor = ticks(x, wanted=5 if canvas.width < 400 else 7)
    y_ticks, y_minor = ticks(y, wanted=6)

    lone_points = [g for g in groups if g.named and _lone_point(g, x, y)]
    with_ends = [g for g in groups if g.named and g not in lone_points and _has_end(g)]
    label_space = max((canvas.text_width(g.label) for g in with_ends), default=0.0)
    right_margin = min(label_space + 1.9 * font, 0.42 * canvas.width) if with_ends else 1.2 * font
    left = max((canvas.text_width(_tick_text(t)) for t in y_ticks), default=0.0) + 1.1 * font
    left += 1.5 * font if canvas.rotated_y_label else 0.0
    top = 1.9 * font if canvas.rotated_y_label else 2.3 * font
    right = canvas.width - right_margin
    entries, legend_height = _place_legend(legend_entries(groups), canvas)
    label_height = (3.2 if canvas.rotated_y_label else 3.6) * font  # ticks and the axis's label
    bottom_margin = label_height + legend_height + 0.3 * font
    box_height = max(canvas.height - top - (bottom_margin - legend_height), 1.25 * font * len(with_ends))
    bottom = top + box_height
    height = bottom + bottom_margin

    def at_x(value: float) -> float:
        return left + x.position(value) * (right - left)

    def at_y(value: float) -> float:
        return bottom - y.position(value) * (bottom - top)

    marks: list[PlacedSeries] = []
    hidden = 0
    for group in groups:
        for series in group.series:
            mark, lost = _mark(series, group, x, y, at_x, at_y)
            hidden += lost
            if mark.at:
                marks.append(mark)
    box = (left, top, right, bottom)
    label_width = right_margin - 1.6 * font
    labels = labels_at_curve_ends(
        [(g, _end(g, marks, box)) for g in with_ends], box, font, label_width, canvas.character_width
    )
    occupied = [place for mark in marks if mark.series.kind != "band" for place in _covered(mark, 0.4 * font)]
    labels += labels_beside_points(
        [(g, _end(g, marks, box)) for g in lone_points], occupied, box, font, canvas.character_width
    )
    reference_lines = [
        ReferenceLine(kind, value, at_x(value) if kind == "x" else at_y(value), text)
        for kind, value, text in panel.lines
        if (x if kind == "x" else y).can_show(value)
    ]
    return PanelLayout(
        panel=panel,
        canvas=canvas,
        height=height,
        box=box,
        x=x,
        y=y,
        x_ticks=tuple((at_x(t.value), t) for t in x_ticks),
        y_ticks=tuple((at_y(t.value), t) for t in y_ticks),
        x_minor=tuple((at_x(v), v) for v in x_minor),
        y_minor=tuple((at_y(v), v) for v in y_minor),
        marks=tuple(sorted(marks, key=lambda mark: ("band", "line", "points").index(mark.series.kind))),
        labels=tuple(labels),
        reference_lines=tuple(reference_lines),
        legend=tuple((px, bottom + label_height + py, entry) for px, py, entry in entries),
        hidden=hidden,
    )


def _axis_ranges(panel: Panel) -> tuple[AxisRange, AxisRange]:
    curves = [s for s in panel.series if s.kind != "band"]
    bands = [s for s in panel.series if s.kind == "band"]
    lines_x = [value for kind, value, _ in panel.lines if kind == "x"]
    lines_y = [value for kind, value, _ in panel.lines if kind == "y"]
    x = axis_range(
        panel.x, [v for s in curves for v in s.x] + lines_x, [v for s in bands for v in s.x], pad=0.035
    )
    edges = [v for s in bands for v in (*s.y, *s.y_high)]
    return x, axis_range(panel.y, [v for s in curves for v in s.y] + lines_y, edges)


def _mark(
    series: Series,
    group: Curve,
    x: AxisRange,
    y: AxisRange,
    at_x: Callable[[float], float],
    at_y: Callable[[float], float],
) -> tuple[PlacedSeries, int]:
    if series.kind == "band":
        return _band(series, group, x, y, at_x, at_y), 0
    shown = [
        i for i, (a, b) in enumerate(zip(series.x, series.y, strict=True)) if x.can_show(a) and y.can_show(b)
    ]
    runs = tuple(series.runs[i] for i in shown) if len(series.runs) == len(series.x) else ()
    mark = PlacedSeries(
        series,
        group,
        tuple((at_x(series.x[i]), at_y(series.y[i])) for i in shown),
        tuple((series.x[i], series.y[i]) for i in shown),
        runs=runs,
    )
    return mark, (len(series.x) - len(shown)) if series.kind == "points" else 0


def _band(
    series: Series,
    group: Curve,
    x: AxisRange,
    y: AxisRange,
    at_x: Callable[[float], float],
    at_y: Callable[[float], float],
) -> PlacedSeries:
    """Edges that run off the axis (an infinite interval, zero on a log axis) are cut at the box."""

    def cut(value: float) -> float:
        return min(max(value, y.low), y.high) if not math.isnan(value) else y.low

    rows = [(a, b, c) for a, b, c in zip(series.x, series.y, series.y_high, strict=True) if x.can_show(a)]
    return PlacedSeries(
        series,
        group,
        tuple((at_x(a), at_y(cut(b))) for a, b, _ in rows),
        tuple((a, b) for a, b, _ in rows),
        tuple(at_y(cut(c)) for _, _, c in rows),
        tuple(c for _, _, c in rows),
    )


def _lone_point(group: Curve, x: AxisRange, y: AxisRange) -> bool:
    """A point with no curve (a plane of parameters): its label belongs beside it, not at the right."""
    points = sum(
        x.can_show(a) and y.can_show(b)
        for s in group.series
        if s.kind == "points"
        for a, b in zip(s.x, s.y, strict=True)
    )
    return points == 1 and all(len(s.x) <= 2 for s in group.series)


def _has_end(group: Curve) -> bool:
    return any(s.x and s.kind != "band" for s in group.series)


def _end(
    group: Curve, marks: list[PlacedSeries], box: tuple[float, float, float, float]
) -> tuple[float, float]:
    """Where a group's label points to: its rightmost point inside the box."""
    _, top, right, bottom = box
    own = [mark for mark in marks if mark.curve is group and mark.series.kind != "band"]
    points = [p for mark in own if mark.series.kind == "points" for p in mark.at]
    inside = [p for mark in own for p in mark.at if top - 1 <= p[1] <= bottom + 1 and p[0] <= right + 1]
    if len(points) == 1 and all(len(mark.at) <= 2 for mark in own):
        return points[0]
    return max(inside, default=(right, (top + bottom) / 2))


def _covered(mark: PlacedSeries, step: float) -> list[tuple[float, float]]:
    """Coordinates a label should not cover: the points, and the lines in small steps."""
    places = list(mark.at)
    if mark.series.kind == "line":
        for (ax, ay), (bx, by) in pairwise(mark.at):
            count = min(200, math.ceil(math.hypot(bx - ax, by - ay) / step))
            places += [(ax + (bx - ax) * i / count, ay + (by - ay) * i / count) for i in range(1, count)]
    return places


def _tick_text(tick: Tick) -> str:
    return tick.text + ("" if tick.power is None else str(tick.power))


def _place_legend(
    entries: list[LegendEntry], canvas: Canvas
) -> tuple[list[tuple[float, float, LegendEntry]], float]:
    """The entries in rows under the axis, and their total height."""
    placed: list[tuple[float, float, LegendEntry]] = []
    font, x, row = canvas.font, 0.5 * canvas.font, 0
    for entry in entries:
        entry_width = 2.6 * font + canvas.text_width(entry.text) + 1.4 * font
        if x > font and x + entry_width > canvas.width:
            x, row = 0.5 * font, row + 1
        placed.append((x, (row + 0.5) * 1.35 * font, entry))
        x += entry_width
    return placed, 1.35 * font * (row + 1) if entries else 0.0
