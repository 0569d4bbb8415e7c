"""A panel drawn into matplotlib axes: its series, reference lines, labels and ticks."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from steepen.report.axis_limits import Limits, can_show, panel_limits, shown_points
from steepen.report.curves import Curve
from steepen.report.reference_lines import draw_reference_lines
from steepen.studies.answer import Axis, Panel, Series
from steepen.utils.formatting import pretty_exponents

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FONT = 7.5  # points
GRID, AXIS = "#e6e6e6", "#333333"
MARKERS = {  # matplotlib's, with its size in points
    "circle": ("o", 3.2),
    "square": ("s", 3.4),
    "star": ("*", 6.4),
    "diamond": ("D", 3.2),
    "triangle": ("^", 3.8),
    "wedge": ("v", 3.8),
    "cross": ("X", 4.0),
    "block": ("s", 8.0),
}
DASHES: dict[str, Any] = {"solid": "-", "dashed": (0, (4, 2)), "dotted": (0, (1, 1.6))}


@dataclass(frozen=True)
class DrawnPanel:
    """A panel in its axes. Series `i` of `drawn` has the artist id `f"s{i}"`; `hidden` counts lost points."""

    panel: Panel
    axes: Axes
    drawn: tuple[tuple[Series, Curve], ...]
    hidden: int
    cut: bool  # an edge of a band lies outside the axes


def draw_panel(
    axes: Axes,
    panel: Panel,
    curves: Sequence[Curve],
    limits: tuple[Limits, Limits] | None = None,
    *,
    inches: tuple[float, float] = (5.0, 3.6),
) -> DrawnPanel:
    """Draw a panel into axes; `curves` are those of a whole figure."""
    (x_low, x_high), (y_low, y_high) = limits or panel_limits(panel)
    axes.set(xscale=panel.x.scale, yscale=panel.y.scale)
    axes.set_xlim((x_high, x_low) if panel.x.reverse else (x_low, x_high))
    axes.set_ylim((y_high, y_low) if panel.y.reverse else (y_low, y_high))
    measured = [series for series in panel.series if series.kind == "points"]
    wide, tall = inches
    whole_x, whole_y = (are_whole([v for s in measured for v in getattr(s, way)]) for way in ("x", "y"))
    set_ticks(axes.xaxis, panel.x, (x_low, x_high), wide, whole=whole_x)
    set_ticks(axes.yaxis, panel.y, (y_low, y_high), tall, whole=whole_y)
    names = max((len(name) for name in panel.y.names), default=8)
    axes.set_xlabel(wrapped(panel.x.label, wide - 0.5 * FONT / 72 * names), labelpad=2, parse_math=False)
    axes.set_ylabel(wrapped(panel.y.label, tall - 0.3), labelpad=3, parse_math=False)
    axes.grid(axis="x" if panel.y.names else "y", color=GRID, linewidth=0.4)
    axes.set_axisbelow(True)
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
    draw_reference_lines(axes, panel, inches, FONT)
    edges = [v for s, _ in drawn if s.kind == "band" for v in (*s.y, *s.y_high)]
    cut = any(not y_low <= edge <= y_high for edge in edges)
    return DrawnPanel(panel, axes, tuple(drawn), hidden, cut)


def set_ticks(axis: Any, described: Axis, limits: Limits, inches: float, *, whole: bool) -> None:
    """Named, linear or log ticks; a log axis over less than a factor of six has evenly spaced numbers."""
    from matplotlib import ticker

    low, high = limits
    axis.set_minor_formatter(ticker.NullFormatter())
    axis.set_tick_params(pad=2)
    power_of_ten = ticker.FuncFormatter(_power_of_ten)
    if described.names:
        crowded = (
            axis.axis_name == "x" and max(map(len, described.names)) * len(described.names) > 16 * inches
        )
        turned = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if crowded else {}
        axis.set_ticks(range(len(described.names)), described.names, parse_math=False, **turned)
        axis.set_tick_params(length=0)
    elif described.scale == "log" and high >= 6 * low:
        # Powers of ten where there are three; labels such as 2×10¹⁸ are wide, so few of them.
        powers = math.floor(math.log10(high)) - math.ceil(math.log10(low)) + 1
        few = (1, 3) if powers == 2 and (high >= 1e4 or low < 1e-4) else (1, 2, 5)
        axis.set_major_locator(ticker.LogLocator(subs=(1,) if powers > 2 else few, numticks=10))
        axis.set_minor_locator(ticker.LogLocator(subs=range(2, 10), numticks=12))
        axis.set_major_formatter(power_of_ten)
    else:
        large = high >= 1e5
        few = 3 if large else 4 if inches <= 1.9 and axis.axis_name == "x" else 6
        axis.set_major_locator(ticker.MaxNLocator(few, steps=[1, 2, 2.5, 5, 10], integer=whole))
        axis.set_minor_locator(ticker.NullLocator())
        axis.set_major_formatter(power_of_ten if large else ticker.ScalarFormatter(useOffset=False))


def _power_of_ten(value: float, _: int) -> str:
    """A tick of a log axis: 0.02, 500, 10¹⁸ or 2×10⁻⁵."""
    return pretty_exponents(f"{value:g}")


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
    marker, size = MARKERS[series.marker]
    return {
        "linestyle": "none",
        "marker": marker,
        "markersize": size,
        "markerfacecolor": colour if series.filled else "#ffffff",
        "markeredgecolor": "#ffffff" if series.filled else colour,
        "markeredgewidth": 0.3 if series.filled else 0.8,
    }


def are_whole(values: Sequence[float]) -> bool:
    """Whether all values (there is one) are whole numbers: depths, passes, epochs."""
    return bool(values) and all(math.isfinite(value) and value == round(value) for value in values)


def wrapped(text: str, inches: float) -> str:
    """Text in lines that fit, or nearly."""
    return textwrap.fill(text, max(12, int(72 * inches / (0.47 * FONT))))
