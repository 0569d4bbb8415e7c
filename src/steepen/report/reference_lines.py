"""Labelled vertical and horizontal lines of a panel; each label is put where it covers least."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from steepen.report.axis_limits import can_show, shown_points
from steepen.report.colours import NEUTRAL
from steepen.studies.answer import Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Box = tuple[float, float, float, float]  # left, bottom, right, top in fractions of the axes
SAMPLES = 24  # places on each segment of a line that a label should not cover
DOTTED: Any = (0, (1, 1.6))


def draw_reference_lines(axes: Axes, panel: Panel, inches: tuple[float, float], font: float) -> None:
    """Draw `panel.lines` behind its series, which are drawn already; ids are `r0`, `r0-t`, `r1` …"""
    covered = _covered(axes, panel)
    used: list[Box] = []
    letter = 0.85 * font / 72  # inches
    for i, (direction, value, text) in enumerate(panel.lines):
        if not can_show(value, panel.x if direction == "x" else panel.y):
            continue
        style: dict[str, Any] = {"color": NEUTRAL.light, "lw": 0.6, "ls": DOTTED, "zorder": 1, "gid": f"r{i}"}
        (axes.axvline if direction == "x" else axes.axhline)(value, **style)
        if not text:
            continue
        size = (0.5 * letter * len(text) / (0.8 * inches[0]), 1.25 * letter / (0.75 * inches[1]))
        place = axes.transLimits.transform(
            axes.transScale.transform((value, axes.get_ylim()[0]) if direction == "x"
                                      else (axes.get_xlim()[0], value))
        )  # fmt: skip
        at = float(place[0 if direction == "x" else 1])
        x, y, ha, va, box = min(
            _candidates(direction, at, size), key=lambda found: _cost(found[-1], covered, used)
        )
        used.append(box)
        axes.annotate(
            text, (x, y), xycoords="axes fraction", ha=ha, va=va, fontsize=0.85 * font, color=NEUTRAL.light,
            parse_math=False, gid=f"r{i}-t", annotation_clip=False, zorder=3.5,
        )  # fmt: skip


Candidate = tuple[float, float, str, str, Box]


def _candidates(direction: Literal["x", "y"], at: float, size: tuple[float, float]) -> list[Candidate]:
    """Places of a label beside a line at a fraction of the axes, the usual one first."""
    wide, tall = size
    gap = 0.012
    found: list[Candidate] = []
    if direction == "y":
        for y, va in ((at + gap, "bottom"), (at - gap, "top")):
            low = y if va == "bottom" else y - tall
            for x, ha in (
                (0.995, "right"),
                (0.005, "left"),
                (0.5, "center"),
                (0.3, "center"),
                (0.7, "center"),
            ):
                left = x - wide * {"right": 1.0, "left": 0.0, "center": 0.5}[ha]
                found.append((x, y, ha, va, (left, low, left + wide, low + tall)))
        return found
    for x, ha in ((at + gap, "left"), (at - gap, "right")):
        left = x if ha == "left" else x - wide
        for y, va in ((0.985, "top"), (0.015, "bottom"), *((0.1 * i, "bottom") for i in range(8, 0, -1))):
            low = y - tall if va == "top" else y
            found.append((x, y, ha, va, (left, low, left + wide, low + tall)))
    return found


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
        data = np.array([(series.x[i], series.y[i]) for i in shown])
        if series.low and series.high and not panel.y.names:
            ends = [(series.x[i], end[i]) for end in (series.low, series.high) for i in shown]
            data = np.concatenate([data, np.array(ends)])
        places = axes.transLimits.transform(axes.transScale.transform(data))
        if series.kind == "line" and len(places) > 1:
            steps = np.linspace(0, 1, SAMPLES)[:, None, None]
            places = (places[:-1] + steps * (places[1:] - places[:-1])).reshape(-1, 2)
        found += [places] * (3 if series.kind != "line" else 1)
    return np.concatenate(found)
