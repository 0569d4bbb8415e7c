"""A panel drawn into matplotlib axes: its series, reference lines, labels, ticks and ranges."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from steepen.report.colours import NEUTRAL
from steepen.report.curves import Curve
from steepen.studies.answer import Axis, Panel, Series
from steepen.utils.formatting import pretty_exponents

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# Bands widen an axis by at most this many times the range of everything else, or this factor on a log axis.
BAND_REACH = 20.0
BAND_FACTOR = 1000.0
Limits = tuple[float, float]


def panel_limits(panel: Panel) -> tuple[Limits, Limits]:
    """The range of x and of y: all points, lines, bars and reference lines, and bands up to `BAND_REACH`."""
    values = {way: [value for kind, value, _ in panel.lines if kind == way] for way in ("x", "y")}
    across = values["x" if panel.y.names else "y"]  # along which bars and errors stand
    edges: list[float] = []
    for series in panel.series:
        values["x"] += series.x
        (edges if series.kind == "band" else values["y"]).extend((*series.y, *series.y_high))
        across += (*series.low, *series.high, *([0.0] if series.kind == "bars" else []))
    return axis_limits(panel.x, values["x"], (), 0.035), axis_limits(panel.y, values["y"], edges, 0.05)


def axis_limits(axis: Axis, values: Sequence[float], edges: Sequence[float], pad: float) -> Limits:
    """Limits with a margin around all `values` that the scale can show, and the `edges` of bands."""
    if axis.limits is not None:
        return axis.limits
    if axis.names:
        return -0.6, len(axis.names) - 0.4
    log = axis.scale == "log"
    to, back = (math.log, math.exp) if log else (float, float)
    good, extra = ([to(v) for v in some if can_show(v, axis)] for some in (values, edges))
    good = good or extra or [to(1.0)]
    low, high = min(good), max(good)
    if extra:
        reach = max(BAND_REACH * (high - low), math.log(BAND_FACTOR) if log else 0.0) or math.inf
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


FONT = 7.5  # points
GRID, AXIS = "#e6e6e6", "#333333"
MARKERS = {  # matplotlib's, with its size in points
    "circle": ("o", 3.2), "square": ("s", 3.4), "star": ("*", 6.4), "diamond": ("D", 3.2),
    "triangle": ("^", 3.8), "wedge": ("v", 3.8), "cross": ("X", 4.0), "block": ("s", 8.0),
}  # fmt: skip
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
    limits = limits or panel_limits(panel)
    _set_axes(axes, panel, limits, inches)
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
    y_low, y_high = limits[1]
    edges = [v for s, _ in drawn if s.kind == "band" for v in (*s.y, *s.y_high)]
    cut = any(not y_low <= edge <= y_high for edge in edges)
    return DrawnPanel(panel, axes, tuple(drawn), hidden, cut)


def _set_axes(axes: Axes, panel: Panel, limits: tuple[Limits, Limits], inches: tuple[float, float]) -> None:
    """Set scales, limits, ticks, labels and grid."""
    (x_low, x_high), (y_low, y_high) = limits
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


def set_ticks(axis: Any, described: Axis, limits: Limits, inches: float, *, whole: bool) -> None:
    """Named, linear or log ticks; a log axis over less than a factor of six has evenly spaced numbers."""
    from matplotlib import ticker

    low, high = limits
    axis.set_minor_formatter(ticker.NullFormatter())
    axis.set_tick_params(pad=2)
    power_of_ten = ticker.FuncFormatter(_power_of_ten)
    if described.names:
        letters = max(map(len, described.names)) * len(described.names)
        crowded = axis.axis_name == "x" and letters > 16 * inches
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
        _draw_band(axes, panel, series, colour, gid)
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


def _draw_band(axes: Axes, panel: Panel, series: Series, colour: str, gid: str) -> None:
    inside = [i for i, x in enumerate(series.x) if can_show(x, panel.x)]
    edges = series.y, series.y_high
    low, high = ([(series.x[i], _inside(edge[i], panel.y, axes)) for i in inside] for edge in edges)
    if low:
        outline = np.array([*low, *reversed(high)])
        axes.fill(*outline.T, color=colour, alpha=0.15, linewidth=0, zorder=1.5, gid=gid)


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
    low, high = (low / 2, high * 2) if axis.scale == "log" else (low - (high - low), high + (high - low))
    return low if math.isnan(value) else min(max(value, low), high)


def marker_style(series: Series, colour: str) -> dict[str, Any]:
    """How a series' points are drawn; hollow where they are not filled."""
    marker, size = MARKERS[series.marker]
    face, edge, width = (colour, "#ffffff", 0.3) if series.filled else ("#ffffff", colour, 0.8)
    return {
        "linestyle": "none", "marker": marker, "markersize": size, "markerfacecolor": face,
        "markeredgecolor": edge, "markeredgewidth": width,
    }  # fmt: skip


def are_whole(values: Sequence[float]) -> bool:
    """Whether all values (there is one) are whole numbers: depths, passes, epochs."""
    return bool(values) and all(math.isfinite(value) and value == round(value) for value in values)


def wrapped(text: str, inches: float) -> str:
    """Text in lines that fit, or nearly."""
    return textwrap.fill(text, max(12, int(72 * inches / (0.47 * FONT))))
