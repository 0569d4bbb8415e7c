"""Panels as one matplotlib figure: the only drawing code, for files, the page and notebooks."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from steepen.report.colours import ARM_TITLES, NEUTRAL
from steepen.report.figure_style import Format, figure_bytes, figure_format, figure_style, new_figure
from steepen.report.groups import Curve, curve_label, curves_of, legend_entries
from steepen.studies.answer import Axis, Panel, Series
from steepen.utils.files import write_atomically
from steepen.utils.formatting import pretty_exponents

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FONT = 7.5  # points
GRID, AXIS = "#e6e6e6", "#333333"
MAX_NAMED = 16  # curves in a legend; of a longer family, evenly spaced ones
BAND_REACH = 8.0  # bands widen an axis by at most this many times the range of everything else, either way
MARKERS = {"circle": "o", "square": "s", "star": "*", "diamond": "D", "triangle": "^", "cross": "X"}
MARKER_SIZES = {"circle": 3.2, "square": 3.4, "star": 6.4, "diamond": 3.2, "triangle": 3.8, "cross": 4.0}
DASHES: dict[str, Any] = {"solid": "-", "dashed": (0, (4, 2)), "dotted": (0, (1, 1.6))}
Limits = tuple[float, float]


@dataclass(frozen=True)
class DrawnPanel:
    """A panel in its axes. Series `i` of `drawn` has the artist id `f"s{i}"`; `hidden` counts lost points."""

    panel: Panel
    axes: Axes
    drawn: tuple[tuple[Series, Curve], ...]
    hidden: int
    cut: bool  # an edge of a band lies outside the axes


def save_panels(panels: Sequence[Panel], path: Path, titles: dict[str, str] = ARM_TITLES) -> None:
    """Write one figure of some panels, in the format of the file's name."""
    kind = figure_format(path)
    write_atomically(path, figure_files(panels, titles, (kind,))[kind])


@figure_style()
def figure_files(
    panels: Sequence[Panel], titles: dict[str, str], formats: tuple[Format, ...]
) -> dict[Format, bytes]:
    """One figure of one or more panels with a common legend, as the bytes of each format's file."""
    figure, _ = draw_figure(panels, titles)
    return {kind: figure_bytes(figure, kind) for kind in formats}


def draw_figure(
    panels: Sequence[Panel], titles: dict[str, str], *, legend: bool = True, title: bool = True
) -> tuple[Figure, list[DrawnPanel]]:
    """The panels in a grid, the names of all curves under it. Call it inside `figure_style()`."""
    columns = grid_columns(panels)
    rows = math.ceil(len(panels) / columns)
    width = {1: 3.5, 2: 3.4, 3: 2.7, 4: 2.2}.get(columns, 1.8)  # inches
    if any(panel.y.names for panel in panels):
        width = max(width, 4.8 / math.sqrt(columns))
    heights = [
        max(_height(panel, width) for panel in panels[row * columns : (row + 1) * columns])
        for row in range(rows)
    ]
    curves = figure_curves(panels, titles)
    handles, labels = _legend(curves) if legend else ([], [])
    longest = max((len(label) for label in labels), default=1)
    per_row = max(1, min(len(labels) or 1, int(72 * columns * width / (0.5 * FONT * (longest + 6)))))
    legend_height = 0.165 * math.ceil(len(labels) / per_row)
    figure = new_figure(columns * width, sum(heights) + legend_height)
    grid = figure.add_gridspec(rows, columns, height_ratios=heights)
    drawn = [
        draw_panel(
            figure.add_subplot(grid[i // columns, i % columns]),
            panel,
            titles,
            curves,
            limits,
            inches=(width, heights[i // columns]),
        )
        for i, (panel, limits) in enumerate(zip(panels, figure_limits(panels), strict=True))
    ]
    for one in drawn:
        if title:
            one.axes.set_title(_wrapped(one.panel.title, 0.92 * width), loc="left", weight="bold",
                               parse_math=False)  # fmt: skip
    if labels:
        box = figure.legend(
            handles, labels, loc="outside lower left", ncols=per_row, columnspacing=1.2, handlelength=1.8,
            handletextpad=0.6, borderpad=0.1, labelspacing=0.35,
        )  # fmt: skip
        for text in box.get_texts():
            text.set_parse_math(False)
    figure.draw_without_rendering()  # lays out; the files and the page then share the positions
    figure.set_layout_engine("none")
    return figure, drawn


def grid_columns(panels: Sequence[Panel]) -> int:
    """Columns of a figure's grid: as its first panel says, or 1 to 4 by the number of panels."""
    count = len(panels)
    if panels[0].columns:
        return min(panels[0].columns, count)
    return count if count <= 3 else 2 if count == 4 else 3 if count <= 9 else 4


def figure_curves(panels: Sequence[Panel], titles: dict[str, str]) -> list[Curve]:
    """The curves of a figure; a curve has one colour in all of its panels."""
    return curves_of(replace(panels[0], series=tuple(s for panel in panels for s in panel.series)), titles)


def figure_limits(panels: Sequence[Panel]) -> list[tuple[Limits, Limits]]:
    """The range of x and y of every panel; panels that share an axis have the union of theirs."""
    found = [panel_limits(panel) for panel in panels]
    for index, name in enumerate(("x", "y")):
        sharing = [i for i, panel in enumerate(panels) if name in panel.share]
        if sharing:
            low, high = min(found[i][index][0] for i in sharing), max(found[i][index][1] for i in sharing)
            for i in sharing:
                found[i] = ((low, high), found[i][1]) if index == 0 else (found[i][0], (low, high))
    return found


def panel_limits(panel: Panel) -> tuple[Limits, Limits]:
    """The range of x and of y: all points, lines, bars and reference lines, and bands up to `BAND_REACH`."""
    x: list[float] = [value for kind, value, _ in panel.lines if kind == "x"]
    y: list[float] = [value for kind, value, _ in panel.lines if kind == "y"]
    edges: list[float] = []
    for series in panel.series:
        if series.kind == "band":
            x += series.x
            edges += (*series.y, *series.y_high)
            continue
        x += series.x
        y += series.y
        (x if panel.y.names else y).extend((*series.low, *series.high))
        if series.kind == "bars":
            (x if panel.y.names else y).append(0.0)
    return axis_limits(panel.x, x, (), 0.035), axis_limits(panel.y, y, edges, 0.05)


def axis_limits(
    axis: Axis, values: Iterable[float], edges: Iterable[float] = (), pad: float = 0.05
) -> Limits:
    """Limits with a margin around all `values` that the scale can show, and the `edges` of bands."""
    if axis.limits is not None:
        return axis.limits
    if axis.names:
        return -0.6, len(axis.names) - 0.4
    log = axis.scale == "log"
    to, back = (math.log, math.exp) if log else (float, float)
    good = [to(v) for v in values if can_show(v, axis)]
    extra = [to(v) for v in edges if can_show(v, axis)]
    good = good or extra or [to(1.0)]
    low, high = min(good), max(good)
    if extra:
        reach = BAND_REACH * (high - low) or math.inf
        low, high = max(min(low, *extra), low - reach), min(max(high, *extra), high + reach)
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-300):
        around = math.log(2) if log else (0.5 * abs(low) or 1.0)
        low, high = low - around, high + around
    margin = pad * (high - low)
    low, high = low - margin, high + margin
    return (back(max(low, -300)), back(min(high, 300))) if log else (low, high)


def can_show(value: float, axis: Axis) -> bool:
    """Finite, positive on a log axis, and not so extreme that a margin or a band would overflow."""
    return abs(value) < 1e100 and (value > 1e-100 or axis.scale != "log")


def shown_points(series: Series, panel: Panel) -> list[int]:
    """The indices of a series' points that the panel's scales can show."""
    pairs = enumerate(zip(series.x, series.y, strict=True))
    return [i for i, (x, y) in pairs if can_show(x, panel.x) and can_show(y, panel.y)]


def draw_panel(
    axes: Axes,
    panel: Panel,
    titles: dict[str, str],
    curves: Sequence[Curve] | None = None,
    limits: tuple[Limits, Limits] | None = None,
    *,
    inches: tuple[float, float] = (5.0, 3.6),
    mathtext: bool = True,
) -> DrawnPanel:
    """Draw a panel into axes; without `curves` of a whole figure, with a legend and title of its own."""
    alone = curves is None
    curves = curves_of(panel, titles) if curves is None else curves
    (x_low, x_high), (y_low, y_high) = limits or panel_limits(panel)
    axes.set(xscale=panel.x.scale, yscale=panel.y.scale)
    axes.set_xlim((x_high, x_low) if panel.x.reverse else (x_low, x_high))
    axes.set_ylim((y_high, y_low) if panel.y.reverse else (y_low, y_high))
    measured = [series for series in panel.series if series.kind == "points"]
    _set_ticks(axes.xaxis, panel.x, x_low, x_high, _whole(v for s in measured for v in s.x), mathtext)
    _set_ticks(axes.yaxis, panel.y, y_low, y_high, _whole(v for s in measured for v in s.y), mathtext)
    wide, tall = inches
    names = max((len(name) for name in panel.y.names), default=8)
    axes.set_xlabel(_wrapped(panel.x.label, wide - 0.5 * FONT / 72 * names), labelpad=2, parse_math=False)
    axes.set_ylabel(_wrapped(panel.y.label, tall - 0.3), labelpad=3, parse_math=False)
    axes.grid(axis="x" if panel.y.names else "y", color=GRID, linewidth=0.4)
    axes.set_axisbelow(True)
    for i, (direction, value, text) in enumerate(panel.lines):
        if can_show(value, panel.x if direction == "x" else panel.y):
            _reference_line(axes, direction, value, text, f"r{i}")
    owners = {id(series): curve for curve in curves for series in curve.series}
    own = [(series, owners[id(series)]) for series in panel.series]
    order = {"band": 0, "bars": 1, "line": 2, "points": 3}
    drawn = sorted(own, key=lambda pair: order[pair[0].kind])
    hidden = 0
    bars = [series for series, _ in drawn if series.kind == "bars"]
    places = [at for series in bars for at in (series.y if panel.y.names else series.x)]
    beside = len(bars) if len(set(places)) < len(places) else 1  # series that share no place need no room
    for i, (series, curve) in enumerate(drawn):
        place = (bars.index(series) if series in bars and beside > 1 else 0, beside)
        hidden += _draw_series(axes, panel, series, curve.colour.light, f"s{i}", place)
    edges = [v for s, _ in drawn if s.kind == "band" for v in (*s.y, *s.y_high)]
    cut = any(not y_low <= edge <= y_high for edge in edges)
    if alone:
        handles, labels = _legend(curves)
        axes.set_title(panel.title, parse_math=False)
        if labels:
            axes.legend(handles, labels)
    return DrawnPanel(panel, axes, tuple(drawn), hidden, cut)


def _draw_series(
    axes: Axes, panel: Panel, series: Series, colour: str, gid: str, place: tuple[int, int]
) -> int:
    """Draw one series; returns how many of its points the axes cannot show."""
    if series.kind == "band":
        rows = [
            (a, *(_inside(edge, panel.y, axes) for edge in pair))
            for a, *pair in zip(series.x, series.y, series.y_high, strict=True)
            if can_show(a, panel.x)
        ]
        if rows:
            x, low, high = (list(column) for column in zip(*rows, strict=True))
            outline = np.array([*zip(x, low, strict=True), *reversed([*zip(x, high, strict=True)])])
            axes.fill(*outline.T, color=colour, alpha=0.15, linewidth=0, zorder=1.5, gid=gid)
        return 0
    shown = shown_points(series, panel)
    x, y = [series.x[i] for i in shown], [series.y[i] for i in shown]
    sideways = bool(panel.y.names)
    if series.kind == "line":
        style = DASHES[series.style]
        axes.plot(x, y, color=colour, lw=1, ls=style, zorder=2, solid_capstyle="round", gid=gid)
    elif series.kind == "bars":
        x, y = _draw_bars(axes, (x, y), series, colour, gid, place, sideways)
    else:
        axes.plot(x, y, **marker_style(series, colour), zorder=3, gid=gid)
    if series.low and series.high:
        ends = [(series.low[i], series.high[i]) for i in shown]
        across = [value for one in (y if sideways else x) for value in (one, one, math.nan)]
        along = [value for low, high in ends for value in (low, high, math.nan)]
        pair = (along, across) if sideways else (across, along)
        axes.plot(
            *pair, color=colour if series.kind == "points" else AXIS, lw=0.7, zorder=2.5, gid=f"{gid}-e"
        )
    return len(series.x) - len(shown) if series.kind == "points" else 0


def _draw_bars(
    axes: Axes,
    at: tuple[list[float], list[float]],
    series: Series,
    colour: str,
    gid: str,
    place: tuple[int, int],
    sideways: bool,
) -> tuple[list[float], list[float]]:
    """Bars as one path, beside those of other series; returns where their ends are."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    index, count = place
    width = 0.8 / count
    values, places = at if sideways else at[::-1]
    middles = [p + (index - (count - 1) / 2) * width for p in places]
    corners = [
        corner
        for p, v in zip(middles, values, strict=True)
        for corner in ((p - width / 2, 0), (p - width / 2, v), (p + width / 2, v), (p + width / 2, 0), (0, 0))
    ]
    codes = [Outline.MOVETO, *[Outline.LINETO] * 3, Outline.CLOSEPOLY] * len(values)
    if corners:
        outline = Outline([corner[::-1] if sideways else corner for corner in corners], codes)
        face = colour if series.filled else "#ffffff"
        axes.add_patch(
            PathPatch(outline, facecolor=face, edgecolor=colour, linewidth=0.6, zorder=1.8, gid=gid)
        )
    return (values, middles) if sideways else (middles, values)


def _inside(value: float, axis: Axis, axes: Axes) -> float:
    """An edge of a band that the scale can draw: cut a little outside the axes."""
    low, high = sorted(axes.get_ylim())
    if axis.scale == "log":
        low, high = low / 2, high * 2
    else:
        low, high = low - (high - low), high + (high - low)
    return low if math.isnan(value) else min(max(value, low), high)


def marker_style(series: Series, colour: str) -> dict[str, Any]:
    """How a series' points are drawn; hollow where they are not filled."""
    return {
        "linestyle": "none",
        "marker": MARKERS[series.marker],
        "markersize": MARKER_SIZES[series.marker],
        "markerfacecolor": colour if series.filled else "#ffffff",
        "markeredgecolor": "#ffffff" if series.filled else colour,
        "markeredgewidth": 0.3 if series.filled else 0.8,
    }


def _reference_line(axes: Axes, direction: str, value: float, text: str, gid: str) -> None:
    style: dict[str, Any] = {"color": NEUTRAL.light, "lw": 0.6, "ls": DASHES["dotted"], "zorder": 1}
    (axes.axvline if direction == "x" else axes.axhline)(value, gid=gid, **style)
    words: dict[str, Any] = {"fontsize": 0.85 * FONT, "color": NEUTRAL.light, "parse_math": False}
    words |= {"gid": f"{gid}-t", "textcoords": "offset points", "clip_on": True}
    if direction == "x":
        axes.annotate(
            text, (value, 1), xytext=(2, -2), xycoords=axes.get_xaxis_transform(), va="top", **words
        )
    else:
        axes.annotate(
            text, (1, value), xytext=(-2, 1.5), xycoords=axes.get_yaxis_transform(), ha="right", **words
        )


def _wrapped(text: str, inches: float) -> str:
    """Text in lines that fit, or nearly."""
    return textwrap.fill(text, max(12, int(72 * inches / (0.47 * FONT))))


def _whole(values: Iterable[float]) -> bool:
    """Whether all values (there is one) are whole numbers: depths, passes, epochs."""
    found = list(values)
    return bool(found) and all(math.isfinite(value) and value == round(value) for value in found)


def _set_ticks(axis: Any, described: Axis, low: float, high: float, whole: bool, mathtext: bool) -> None:
    """Named, linear or log ticks; a log axis over less than a decade has evenly spaced numbers."""
    from matplotlib.ticker import (
        FixedLocator,
        FuncFormatter,
        LogLocator,
        MaxNLocator,
        NullFormatter,
        NullLocator,
        ScalarFormatter,
    )

    if described.names:
        axis.set_major_locator(FixedLocator(range(len(described.names))))
        longest = max(map(len, described.names))
        crowded = axis.axis_name == "x" and longest * len(described.names) > 40
        turned = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if crowded else {}
        axis.set_ticklabels(described.names, parse_math=False, **turned)
        axis.set_minor_locator(NullLocator())
        axis.set_tick_params(length=0, pad=2)
        return
    ratio = high / low if described.scale == "log" and low > 0 else math.inf
    if described.scale == "log" and ratio >= 6:
        axis.set_major_locator(LogLocator(subs=(1,) if ratio > 60 else (1, 2, 5), numticks=7))
        axis.set_minor_locator(LogLocator(subs=range(2, 10), numticks=12))

        def label(value: float, _: int) -> str:
            return log_tick(value, mathtext)

        axis.set_major_formatter(FuncFormatter(label))
    else:
        axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10], integer=whole))
        axis.set_minor_locator(NullLocator())
        plain = ScalarFormatter(useOffset=False, useMathText=mathtext)
        plain.set_powerlimits((-3, 5))
        axis.set_major_formatter(plain)
    axis.set_minor_formatter(NullFormatter())
    axis.set_tick_params(pad=2)


def log_tick(value: float, mathtext: bool = True) -> str:
    """A tick of a log axis, 0.02, 500, 10¹⁸ or 2×10⁻⁵: the powers in mathtext or in Unicode."""
    digits, _, power = f"{value:e}".partition("e")
    if not mathtext or -5 < int(power) < 4:
        return pretty_exponents(f"{value:g}")
    factor = "" if float(digits) == 1 else rf"{float(digits):g}\times "
    return f"${factor}10^{{{int(power)}}}$"


def _legend(curves: Sequence[Curve]) -> tuple[list[Any], list[str]]:
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


def _height(panel: Panel, width: float) -> float:
    """Inches of a panel; bars beside their names need room for each."""
    return max(0.72 * width, 0.55 + 0.15 * len(panel.y.names))
