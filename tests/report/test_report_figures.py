"""Figures: colours, axes, layout of any panel, reproducible bytes and embedded fonts."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import pairwise
from typing import get_args
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steepen.report.axes import AxisRange, axis_range, ticks
from steepen.report.colours import (
    ARM_COLOURS,
    ARM_TITLES,
    DARK_BACKGROUND,
    LIGHT_BACKGROUND,
    arm_colour,
    contrast,
    level_colour,
)
from steepen.report.groups import curves_of
from steepen.report.labels import spread_apart
from steepen.report.layout import NARROW, PAPER, WIDE, Canvas, lay_out
from steepen.report.load_studies import LoadedStudy
from steepen.report.panel_figures import draw_panels
from steepen.report.svg import alt_text, panel_svg
from steepen.studies.answer import Axis, Panel, Role, Series

# Machado, Oliveira and Fernandes 2009: what full protanopia, deuteranopia and tritanopia make of linear RGB.
BLIND = {
    "normal": np.eye(3),
    "protan": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deutan": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritan": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def lab(colour: str, vision: np.ndarray) -> np.ndarray:
    """CIELAB of a colour as seen with a kind of colour vision."""
    channels = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    xyz = TO_XYZ @ np.clip(vision @ linear, 0, 1) / np.array([0.9505, 1.0, 1.089])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def min_distance(colours: list[str], vision: np.ndarray) -> float:
    seen = [lab(colour, vision) for colour in colours]
    return min(float(np.linalg.norm(a - b)) for i, a in enumerate(seen) for b in seen[i + 1 :])


@pytest.mark.parametrize("vision", BLIND)
@pytest.mark.parametrize("ground", ["light", "dark"])
def test_arm_colours_are_distinguishable_in_every_vision(vision: str, ground: str) -> None:
    colours = [getattr(colour, ground) for colour in ARM_COLOURS.values()]
    # Okabe and Ito's palette with grey in place of its yellow has 9.7 here; 2.3 is just noticeable.
    assert min_distance(colours, BLIND[vision]) > 20


def test_colour_distance_detects_red_green_confusion() -> None:
    red_and_green = ["#c04040", "#708020"]
    assert min_distance(red_and_green, BLIND["normal"]) > 45
    assert min_distance(red_and_green, BLIND["deutan"]) < 20


def test_lines_and_text_have_wcag_contrast() -> None:
    others = [arm_colour(f"arm-{i}") for i in range(200)]
    for colour in [*ARM_COLOURS.values(), *others]:
        assert contrast(colour.light, LIGHT_BACKGROUND) >= 3 and contrast(colour.dark, DARK_BACKGROUND) >= 3
    for colour in [*ARM_COLOURS.values(), *others, *(level_colour(s / 10) for s in range(11))]:
        assert contrast(colour.light_text, LIGHT_BACKGROUND) >= 4.5
        assert contrast(colour.dark_text, DARK_BACKGROUND) >= 4.5


def test_arm_colour_ignores_spelling_of_the_name() -> None:
    assert arm_colour("Deep Vanilla") == arm_colour("deep_vanilla") == ARM_COLOURS["deep-vanilla"]
    assert arm_colour("my-arm") == arm_colour("My arm")
    assert len({arm_colour(f"arm-{i}") for i in range(30)}) >= 29


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (3.2e17, 1.3e21, ["10^18", "10^19", "10^20", "10^21"]),
        (2.4, 3.6, ["2.4", "2.6", "2.8", "3.0", "3.2", "3.4", "3.6"]),
        (7.9, 20.4, ["8", "10", "20"]),
        (0.95, 4.2, ["1", "2", "3", "4"]),
        (1e-5, 1e-1, ["10^-5", "10^-4", "0.001", "0.01", "0.1"]),
    ],
)
def test_log_axis_ticks(low: float, high: float, expected: list[str]) -> None:
    found, _ = ticks(AxisRange(Axis("x", "log"), low, high))
    assert [tick.text + (f"^{tick.power}" if tick.power is not None else "") for tick in found] == expected


@settings(max_examples=200, deadline=None)
@given(st.floats(-1e12, 1e12), st.floats(1e-6, 1e12), st.booleans())
def test_every_axis_has_two_to_nine_ticks_inside(start: float, length: float, log: bool) -> None:
    axis = Axis("x", "log" if log else "linear")
    values = [abs(start) + 1e-9, (abs(start) + 1e-9) * (1 + length)] if log else [start, start + length]
    reach = axis_range(axis, values)
    found, small = ticks(reach)
    inside = [
        reach.low - 1e-9 * abs(reach.low) <= t.value <= reach.high + 1e-9 * abs(reach.high) for t in found
    ]
    assert all(inside) and 2 <= len(found) <= 9
    assert len({(t.text, t.power) for t in found}) == len(found)
    assert len(small) < 100


@given(st.lists(st.floats(0, 100), max_size=12), st.floats(0.1, 8))
def test_spread_labels_keep_gap_and_order(wanted: list[float], gap: float) -> None:
    wanted = sorted(wanted)
    placed = spread_apart(wanted, gap, 0, 100)
    assert all(b - a >= gap - 1e-9 for a, b in pairwise(placed))
    if (len(wanted) - 1) * gap <= 100:
        assert all(-1e-9 <= value <= 100 + 1e-9 for value in placed)


def test_labels_without_collisions_do_not_move() -> None:
    assert spread_apart([10, 50, 90], 5, 0, 100) == [10, 50, 90]


number = st.floats(allow_nan=True, allow_infinity=True) | st.floats(0.1, 10)


@st.composite
def series(draw_: Callable[..., object]) -> Series:
    size = draw_(st.integers(0, 5))
    column = st.lists(number, min_size=size, max_size=size).map(tuple)  # type: ignore[arg-type]
    kind = draw_(st.sampled_from(["points", "line", "band"]))
    return Series(
        label=draw_(st.sampled_from(["Vanilla fit", "a $b^", "<b>&", "", "3e+17 FLOPs"])),  # type: ignore[arg-type]
        kind=kind,  # type: ignore[arg-type]
        x=draw_(column),  # type: ignore[arg-type]
        y=draw_(column),  # type: ignore[arg-type]
        y_high=draw_(column) if kind == "band" else (),  # type: ignore[arg-type]
        arm=draw_(st.sampled_from([None, "vanilla", "my <arm>"])),  # type: ignore[arg-type]
        level=draw_(st.sampled_from([None, None, 1.0, 2.0])),  # type: ignore[arg-type]
        style=draw_(st.sampled_from(["solid", "dashed", "dotted"])),  # type: ignore[arg-type]
        filled=draw_(st.booleans()),  # type: ignore[arg-type]
        role=draw_(st.sampled_from(get_args(Role))),  # type: ignore[arg-type]
        variant=draw_(st.sampled_from(["", "adamw"])),  # type: ignore[arg-type]
        note=draw_(st.sampled_from(["", "a <note>"])),  # type: ignore[arg-type]
        detail=draw_(st.sampled_from(["", "γ = 0.1"])),  # type: ignore[arg-type]
        marker=draw_(st.sampled_from(["circle", "star", "square"])),  # type: ignore[arg-type]
    )


axis = st.builds(
    Axis, st.sampled_from(["loss", "<x> & $y"]), st.sampled_from(["linear", "log"]), st.booleans()
)
panels = st.builds(
    Panel, st.just("A panel"), axis, axis, st.lists(series(), max_size=6).map(tuple),
    st.lists(st.tuples(st.sampled_from(["x", "y"]), number, st.just("mark")), max_size=2).map(tuple),
)  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(panels, st.sampled_from([PAPER, WIDE, NARROW]))
def test_any_panel_can_be_laid_out_as_svg(panel: Panel, canvas: Canvas) -> None:
    layout = lay_out(panel, canvas, ARM_TITLES)
    assert all(math.isfinite(v) for mark in layout.marks for place in mark.at for v in place)
    assert all(math.isfinite(label.x) and math.isfinite(label.y) for label in layout.labels)
    drawing = ElementTree.fromstring(panel_svg(layout, "n", lambda _: "k0", alt_text(panel, layout)))
    shown = sum(len(mark.at) for mark in layout.marks if mark.series.kind == "points")
    given_ = sum(len(one.x) for one in panel.series if one.kind == "points")
    assert len(drawing.findall(".//g[@class='point']")) == shown
    assert shown + layout.hidden == given_


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(panels)
def test_any_panel_can_be_drawn_by_matplotlib(panel: Panel) -> None:
    assert draw_panels([panel], ARM_TITLES, ("png",))["png"].startswith(b"\x89PNG")


def test_point_coordinates_match_their_values() -> None:
    panel = Panel(
        "p", Axis("x", "log"), Axis("y", reverse=True),
        (Series("a", "points", (1.0, 10.0, 100.0), (0.0, 5.0, 10.0)),),
    )  # fmt: skip
    layout = lay_out(panel, WIDE, {})
    (x0, y0), (x1, y1), (x2, y2) = layout.marks[0].at
    assert x1 - x0 == pytest.approx(x2 - x1) and x1 > x0  # equal ratios, equal steps
    assert y1 - y0 == pytest.approx(y2 - y1) and y2 > y0  # reversed: larger values lie lower
    left, top, right, bottom = layout.box
    assert left < x0 < x2 < right and top < y0 < y2 < bottom


def test_unbounded_band_does_not_set_the_axis_range() -> None:
    x = (1.0, 2.0)
    firm = Series("m", "line", x, (1.0, 1.5), arm="vanilla")
    wild = Series("m band", "band", x, (0.9, 0.5), (1.1, math.inf), arm="vanilla")
    far = Series("m band", "band", x, (0.9, -500.0), (1.1, 900.0), arm="vanilla")
    layout = lay_out(Panel("p", Axis("x"), Axis("y"), (firm, wild, far)), WIDE, {})
    assert -1 < layout.y.low < 0.9 and 1.5 < layout.y.high < 3


def test_points_hidden_by_a_log_axis_are_counted() -> None:
    one = Series("a", "points", (1.0, -1.0, math.nan), (1.0, 1.0, 1.0))
    assert lay_out(Panel("p", Axis("x", "log"), Axis("y"), (one,)), WIDE, {}).hidden == 2


def test_many_labels_make_the_figure_taller() -> None:
    many = tuple(
        Series(f"arm-{i}", "line", (1.0, 2.0), (1.0, 1.0 + i / 100), arm=f"arm-{i}") for i in range(40)
    )
    layout = lay_out(Panel("p", Axis("x"), Axis("y"), many), PAPER, {})
    heights = sorted(label.y for label in layout.labels)
    assert len(heights) == 40 and min(b - a for a, b in pairwise(heights)) >= PAPER.font
    assert heights[-1] <= layout.box[3]


def test_legend_names_line_styles_and_markers(finished: Callable[[str], LoadedStudy]) -> None:
    ladder, held = finished("family"), finished("extrapolate")
    words = [entry.text for _, _, entry in lay_out(ladder.answer.panels[1], PAPER, ARM_TITLES).legend]
    assert words == ["90% band", "fitted", "extrapolated", "measured"]
    words = [entry.text for _, _, entry in lay_out(held.answer.panels[0], PAPER, ARM_TITLES).legend]
    assert words == ["90% band", "law", "forecast", "held out"]


def test_two_ladders_of_one_arm_have_different_colours_and_labels() -> None:
    x, y = (1.0, 2.0), (3.0, 2.0)
    panel = Panel(
        "p",
        Axis("x"),
        Axis("y"),
        (
            Series("untied-2", "points", x, y, arm="untied-2"),
            Series("untied-2", "line", x, y, arm="untied-2", role="fit", detail="γ = 0.11"),
            Series("untied-2", "points", x, (3.1, 2.2), arm="untied-2", variant="vanilla recipe"),
            Series("untied-2", "line", x, (3.1, 2.2), arm="untied-2", variant="vanilla recipe", role="fit"),
            Series("vanilla", "points", x, (3.2, 2.4), arm="vanilla"),
            Series("vanilla", "points", (3.0,), (2.0,), arm="vanilla", role="held_out", marker="square"),
        ),
    )
    groups = curves_of(panel, ARM_TITLES)
    assert [(g.label, len(g.series)) for g in groups] == [
        ("Untied-2", 2),
        ("Untied-2 (vanilla recipe)", 2),
        ("Vanilla", 2),
    ]
    assert groups[0].colour == arm_colour("untied-2") != groups[1].colour


def test_figures_embed_fonts_and_no_timestamp(finished: Callable[[str], LoadedStudy]) -> None:
    panels_ = list(finished("ladder").answer.panels)
    first = draw_panels(panels_[:1], ARM_TITLES, ("pdf", "svg", "png"))
    assert first == draw_panels(panels_[:1], ARM_TITLES, ("pdf", "svg", "png"))
    pdf = first["pdf"]
    descriptors = re.findall(rb"/Type /FontDescriptor", pdf)
    assert descriptors and len(re.findall(rb"/FontFile2 \d+ 0 R", pdf)) == len(descriptors)
    assert b"/CreationDate" not in pdf and b"/Type3" not in pdf
    assert b"<text" not in first["svg"] and b"<dc:date>" not in first["svg"]  # letters are outlines
