"""Panels: what a figure shows, as data. `report/figure.py` draws them, for files, the page and notebooks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Scale = Literal["linear", "log"]
Role = Literal[
    "measured",
    "fit",  # a law, parabola or band fitted to measurements
    "extrapolated",  # a fit beyond the measurements
    "optimum",  # the minimum of a sweep, inside its range
    "censored",  # the best measured point of a sweep whose minimum lies outside its range
    "held_out",  # a run that took part in no fit
    "control",
]


@dataclass(frozen=True)
class Axis:
    """One axis of a panel."""

    label: str
    scale: Scale = "linear"
    reverse: bool = False
    names: tuple[str, ...] = ()  # of the values 0, 1, 2, …, instead of numbers
    limits: tuple[float, float] | None = None  # None: everything drawn is inside


@dataclass(frozen=True)
class Series:
    """Points, a line, a band or bars of one curve.

    Series with the same `arm`, `variant`, `family` and `level` are one curve, with one colour and one label.
    Without an arm and a level, series with the same `label` are. Bars stand on the axis that has `names`:
    beside each other where several series share a place.
    """

    label: str  # the curve's name: an arm, "d8", "1e17 FLOPs"
    kind: Literal["points", "line", "band", "bars"]
    x: tuple[float, ...]
    y: tuple[float, ...]  # of a band: its lower edge
    y_high: tuple[float, ...] = ()  # of a band: its upper edge
    arm: str | None = None  # decides the colour, the same on every figure
    colour: tuple[str, str] | None = None  # for light and dark pages, instead of the arm's
    variant: str = ""  # which of several ladders of an arm: another recipe or optimizer
    level: float | None = None  # value that orders the curves of a family: decides the shade
    family: str = ""  # what the level is: "depth", "passes", "FLOPs"; each family has shades of its own
    role: Role = "measured"
    note: str = ""  # the legend's text for this kind of line or marker, overriding the role's word
    detail: str = ""  # a value of this curve alone, such as its exponent
    style: Literal["solid", "dashed", "dotted"] = "solid"
    filled: bool = True
    marker: Literal["circle", "star", "square", "diamond", "triangle", "wedge", "cross", "block"] = "circle"
    runs: tuple[str, ...] = ()  # run hashes, point by point
    low: tuple[float, ...] = ()  # error bars of points and bars, point by point: the lower ends …
    high: tuple[float, ...] = ()  # … and the upper ends, along y (along x where y has names)
    texts: tuple[str, ...] = ()  # what each point is, shown on hover: "hellaswag", "d12"


Lines: TypeAlias = tuple[tuple[Literal["x", "y"], float, str], ...]  # across x or y, at a value, with a label


@dataclass(frozen=True)
class Panel:
    """One set of axes. `lines` are labelled vertical or horizontal reference lines.

    Panels of an answer with the same `group` are one figure, titled with it: a grid of `columns` (0: as many
    as fit) with one legend. `share` gives the panels of a group the same range of an axis.
    """

    title: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    lines: Lines = ()
    caption: str = ""
    group: str = ""
    columns: int = 0
    share: Literal["", "x", "y", "xy"] = ""
    lead: bool = False  # shown first: the figure that answers the study's question
