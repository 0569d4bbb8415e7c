"""Ranges of a panel's axes: what they must show, and which values a scale can show at all."""

from __future__ import annotations

import math
from collections.abc import Sequence

from steepen.results.panel import Axis, Panel, Series

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
