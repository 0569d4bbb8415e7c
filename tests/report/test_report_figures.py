"""Figures: colours, ticks, bands inside the axes, bars, legends, reproducible bytes and embedded fonts."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any, get_args
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from steepen.report.colours import (
    ARM_COLOURS,
    ARM_TITLES,
    DARK_BACKGROUND,
    LIGHT_BACKGROUND,
    Colour,
    arm_colour,
    contrast,
    level_colour,
)
from steepen.report.contents import figure_csv
from steepen.report.curves import curve_label, curves_of, legend_curves, legend_entries, styled_panel
from steepen.report.draw_panel import DrawnPanel, draw_panel, panel_limits
from steepen.report.figure import draw_figure, figure_curves, figure_files
from steepen.report.figure_style import figure_style, new_figure
from steepen.report.load_studies import LoadedStudy, study_arm_styles
from steepen.report.page import render_page
from steepen.report.page_figure import page_panels
from steepen.studies.answer import Answer, Axis, Panel, Role, Series

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
        (3.2e17, 1.3e21, ["10¹⁸", "10¹⁹", "10²⁰", "10²¹"]),
        (2.4, 3.6, ["2.50", "2.75", "3.00", "3.25", "3.50"]),
        (0.95, 14, ["1", "2", "5", "10"]),
        (1e-5, 1e-1, ["10⁻⁵", "0.0001", "0.001", "0.01", "0.1"]),
    ],
)
def test_log_axis_ticks(low: float, high: float, expected: list[str]) -> None:
    panel = Panel("p", Axis("x", "log", limits=(low, high)), Axis("y"), ())
    with figure_style():
        figure = new_figure(3.5, 2.5)
        axes = figure.add_subplot()
        draw_panel(axes, panel, [])
        figure.draw_without_rendering()
        inside = 1 - 1e-9
        shown = [t for t in axes.get_xticklabels() if low * inside <= t.get_position()[0] <= high / inside]
        labels = [tick.get_text() for tick in shown]
    assert labels == expected


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


@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(panels, min_size=1, max_size=2))
def test_any_panel_becomes_svg_with_all_its_points(shown: list[Panel]) -> None:
    for svg, drawn in page_panels(shown, ARM_TITLES, "n", lambda _: "k0"):
        root = ElementTree.fromstring(svg)
        marks = root.find("{*}g[@class='marks']")
        assert marks is not None
        groups = [group for group in marks if str(group.get("class")).startswith("points")]
        given_ = sum(len(one.x) for one in drawn.panel.series if one.kind == "points")
        assert sum(len(group.findall(".//{*}use")) for group in groups) + drawn.hidden == given_


@settings(max_examples=4, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(panels, min_size=1, max_size=3))
def test_any_panels_become_a_file(shown: list[Panel]) -> None:
    assert figure_files(shown, ARM_TITLES, ("png",))["png"].startswith(b"\x89PNG")


def draw(*shown: Panel) -> list[DrawnPanel]:
    with figure_style():
        return draw_figure(shown, ARM_TITLES)[1]


def test_series_are_drawn_at_their_values() -> None:
    points = Series("a", "points", (1.0, 10.0, 100.0), (0.0, 5.0, 10.0))
    line = Series("a", "line", (1.0, 100.0), (2.0, 3.0), style="dashed")
    band = Series("a", "band", (1.0, 100.0), (-2.0, -3.0), (4.0, 14.0))
    (one,) = draw(Panel("p", Axis("x", "log"), Axis("y", reverse=True), (points, line, band)))
    by_id: dict[str | None, Any] = {artist.get_gid(): artist for artist in one.axes.get_children()}
    artists = {series.kind: by_id[f"s{i}"] for i, (series, _) in enumerate(one.drawn)}
    assert artists["points"].get_xydata().tolist() == [[1, 0], [10, 5], [100, 10]]
    assert artists["line"].get_xydata().tolist() == [[1, 2], [100, 3]]
    assert artists["line"].get_linestyle() == "--"
    assert sorted(map(tuple, artists["band"].get_xy()[:4].tolist())) == [
        (1, -2),
        (1, 4),
        (100, -3),
        (100, 14),
    ]
    low, high = one.axes.get_ylim()
    assert low > 14 and high < -3 and not one.cut  # reversed, with the whole band inside


@given(
    st.lists(st.tuples(st.floats(0.5, 2), st.floats(0, 1), st.floats(0, 1)), min_size=2, max_size=6),
    st.sampled_from(["linear", "log"]),
)
@settings(max_examples=60)
def test_bands_lie_inside_the_axes(rows: list[tuple[float, float, float]], scale: str) -> None:
    x = tuple(float(i + 1) for i in range(len(rows)))
    middle = tuple(value for value, _, _ in rows)
    low = tuple(value * math.exp(-below) for value, below, _ in rows)
    high = tuple(value * math.exp(above) for value, _, above in rows)
    spread = max(middle) / min(middle)
    panel = Panel(
        "p", Axis("x"), Axis("y", scale),  # type: ignore[arg-type]
        (Series("m", "line", x, middle), Series("m", "band", x, low, high)),
    )  # fmt: skip
    _, (bottom, top) = panel_limits(panel)
    if spread > 1.5 or spread == 1:  # else a band could be more than BAND_REACH times the line's range
        assert bottom < min(low) and max(high) < top


def test_a_band_beyond_all_reason_is_cut_and_the_page_says_so(
    finished: Callable[[str], LoadedStudy],
) -> None:
    x = (1.0, 2.0)
    firm = Series("m", "line", x, (1.0, 1.5), arm="vanilla")
    wild = Series("m", "band", x, (0.9, 0.5), (1.1, math.inf), arm="vanilla")
    far = Series("m", "band", x, (0.9, -500.0), (1.1, 900.0), arm="vanilla")
    panel = Panel("p", Axis("x"), Axis("y"), (firm, wild, far))
    (one,) = draw(panel)
    low, high = one.axes.get_ylim()
    assert one.cut and -11 < low < 0.5 and 1.5 < high < 13
    wide = Series("m", "band", x, (0.9, 1 / 400), (1.1, 300.0), arm="vanilla")
    (one,) = draw(Panel("p", Axis("x"), Axis("y", "log"), (firm, wide)))
    assert not one.cut  # a log axis shows bands of several hundred times whole
    study = finished("tpp")
    page = render_page([replace(study, answer=replace(study.answer, panels=(panel,)))])
    assert "Bands that touch the frame continue beyond it." in page


def test_points_hidden_by_a_log_axis_are_counted() -> None:
    one = Series("a", "points", (1.0, -1.0, math.nan), (1.0, 1.0, 1.0))
    assert draw(Panel("p", Axis("x", "log"), Axis("y"), (one,)))[0].hidden == 2


def test_bars_stand_beside_each_other_with_their_errors() -> None:
    names = Axis("", names=("a", "b"))
    one = Series("one", "bars", (0.0, 1.0), (3.0, 4.0), low=(2.0, 3.5), high=(3.5, 6.0))
    two = Series("two", "bars", (0.0, 1.0), (1.0, -1.0), filled=False)
    (upright,) = draw(Panel("p", names, Axis("score"), (one, two)))
    (sideways,) = draw(Panel("p", Axis("score"), names, tuple(replace(s, x=s.y, y=s.x) for s in (one, two))))
    for drawn, across in ((upright, 0), (sideways, 1)):
        by_id: dict[str | None, Any] = {a.get_gid(): a for a in drawn.axes.get_children()}
        first, second = (by_id[f"s{i}"].get_path().vertices for i in (0, 1))
        assert first[:4, across].max() <= second[:4, across].min() + 1e-9
        assert first[1, 1 - across] == 3 and second[6, 1 - across] == -1
        limits = drawn.axes.get_xlim() if across else drawn.axes.get_ylim()
        assert limits[0] < -1 and limits[1] > 6  # zero, the bars and their errors
        errors = by_id["s0-e"].get_xydata()[:, 1 - across]
        assert errors[~np.isnan(errors)].tolist() == [2, 3.5, 3.5, 6]


def test_panels_of_a_figure_share_colours_ranges_and_a_legend() -> None:
    def panel(title: str, level: float, top: float) -> Panel:
        line = Series(f"{level:g} epochs", "line", (1.0, 2.0), (1.0, top), level=level)
        return Panel(title, Axis("x"), Axis("y"), (line,), group="g", share="y")

    shown = [panel("one", 1, 2), panel("two", 2, 5), panel("three", 2, 3)]
    with figure_style():
        figure, drawn = draw_figure(shown, ARM_TITLES)
    assert len({one.axes.get_ylim() for one in drawn}) == 1
    colours = [one.drawn[0][1].colour for one in drawn]
    assert colours[0] != colours[1] == colours[2]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["1 epochs", "2 epochs"]


def test_legend_names_arms_values_line_styles_and_markers(finished: Callable[[str], LoadedStudy]) -> None:
    ladder, held = finished("family"), finished("extrapolate")

    def words(panel: Panel) -> list[str]:
        with figure_style():
            (legend,) = draw_figure([panel], ARM_TITLES)[0].legends
        return [text.get_text() for text in legend.get_texts()]

    (multipliers,) = (panel for panel in ladder.answer.panels if panel.lead)
    assert words(multipliers) == [*(ARM_TITLES[arm] for arm in list(ARM_COLOURS)[1:]), "90% band", "fitted"]
    named, kinds = words(held.answer.panels[0])[:2], words(held.answer.panels[0])[2:]
    assert [name.partition(", γ = ")[0] for name in named] == ["Vanilla", "Untied-Grow"]
    assert kinds == ["extrapolated", "held out"]
    law = Series("vanilla", "line", (1.0, 2.0), (2.0, 1.0), arm="vanilla", role="fit", detail="γ = 0.11")
    assert words(Panel("p", Axis("x"), Axis("y"), (law,))) == ["Vanilla, γ = 0.11"]


def test_texts_of_a_figure_do_not_overlap_or_leave_it(finished: Callable[[str], LoadedStudy]) -> None:
    with figure_style():
        figure, drawn = draw_figure(finished("family").answer.panels, ARM_TITLES)
        renderer = FigureCanvasAgg(figure).get_renderer()
        texts = [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
        inside = {id(t) for one in drawn for axis in (one.axes.xaxis, one.axes.yaxis)
                  for t in axis.get_ticklabels(which="both")}  # fmt: skip
        boxes = [text.get_window_extent(renderer) for text in texts if id(text) not in inside]
    for box in boxes:
        assert box.x0 >= -1 and box.y0 >= -1 and box.x1 <= figure.bbox.x1 + 1 and box.y1 <= figure.bbox.y1 + 1
    for i, one in enumerate(boxes):
        for other in boxes[i + 1 :]:
            wide = min(one.x1, other.x1) - max(one.x0, other.x0)
            tall = min(one.y1, other.y1) - max(one.y0, other.y0)
            assert wide <= 1 or tall <= 2


def test_csv_has_every_value_of_the_figure(finished: Callable[[str], LoadedStudy]) -> None:
    panels_ = finished("extrapolate").answer.panels
    rows = list(csv.DictReader(io.StringIO(figure_csv(panels_, ARM_TITLES))))
    for series_ in panels_[0].series:
        own = [r for r in rows if r["kind"] == series_.kind and (series_.kind != "points" or (
            r["what"] == "held out") == (series_.role == "held_out"))]  # fmt: skip
        names = ("low", "high") if series_.kind == "band" else ("y",)
        values = [tuple(float(r[name]) for name in ("x", *names)) for r in own]
        wanted = zip(series_.x, series_.y, *([series_.y_high] if series_.kind == "band" else []), strict=True)
        assert set(wanted) <= set(values)
    assert {row["curve"] for row in rows} == {"Vanilla", "Untied-Grow"}


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


def test_curves_of_one_level_have_the_colours_of_their_arms() -> None:
    x, y = (1.0, 2.0), (3.0, 2.0)

    def colours(*levels: float) -> list[Colour]:
        arms = ("vanilla", "untied-2")
        series = [Series(f"{arm} d{k}", "line", x, y, arm=arm, level=k) for arm in arms for k in levels]
        return [curve.colour for curve in curves_of(Panel("p", Axis("x"), Axis("y"), tuple(series)), {})]

    assert colours(5.0) == [arm_colour("vanilla"), arm_colour("untied-2")]
    assert colours(4.0, 5.0)[1::2] == colours(5.0) and len(set(colours(4.0, 5.0))) == 4


def test_figures_embed_fonts_and_no_timestamp(finished: Callable[[str], LoadedStudy]) -> None:
    panels_ = list(finished("ladder").answer.panels)
    first = figure_files(panels_[:1], ARM_TITLES, ("pdf", "svg", "png"))
    assert first == figure_files(panels_[:1], ARM_TITLES, ("pdf", "svg", "png"))
    pdf = first["pdf"]
    descriptors = re.findall(rb"/Type /FontDescriptor", pdf)
    assert descriptors and len(re.findall(rb"/FontFile2 \d+ 0 R", pdf)) == len(descriptors)
    assert b"/CreationDate" not in pdf and b"/Type3" not in pdf
    assert b"<text" not in first["svg"] and b"<dc:date>" not in first["svg"]  # letters are outlines


def _family(kind: str, values: tuple[float, ...], x: tuple[float, ...] = (1.0, 2.0)) -> tuple[Series, ...]:
    return tuple(
        Series(f"{kind} {value:g}", "line", x, (value, value + 1), level=value, family=kind)
        for value in values
    )


def test_families_of_curves_keep_their_names_and_have_shades_of_their_own() -> None:
    panels_ = [
        Panel("a", Axis("x"), Axis("y"), _family("passes", (1.0, 2.0, 4.0))),
        Panel("b", Axis("x"), Axis("y"), _family("depth", (1.0, 2.0, 4.0))),
        Panel("c", Axis("x"), Axis("y"), _family("depth", (2.0, 8.0))),
    ]
    curves = figure_curves(panels_, {})
    names = [curve_label(curve) for curve in legend_curves(curves)]
    assert names == ["passes 1", "passes 2", "passes 4", "depth 1", "depth 2", "depth 4", "depth 8"]
    assert len({curve.colour for curve in curves}) == len(curves)
    many = [Panel("a", Axis("x"), Axis("y"), _family("depth", tuple(float(i) for i in range(40))))]
    some = [curve_label(curve) for curve in legend_curves(figure_curves(many, {}))]
    assert len(some) == 9 and (some[0], some[-1]) == ("depth 0", "depth 39")


def test_legend_explains_every_line_and_names_each_curve_once() -> None:
    x, y = (1.0, 2.0), (1.0, 2.0)
    series_ = [
        *(Series(f"way {i}", kind, x, y) for i in range(12) for kind in ("points", "line")),
        Series("law", "line", x, y, role="fit"),
        Series("law", "line", x, y, role="extrapolated", style="dashed"),
    ]
    curves = curves_of(Panel("p", Axis("x"), Axis("y"), tuple(series_)), {})
    assert [curve_label(curve) for curve in legend_curves(curves)] == [
        *(f"way {i}" for i in range(12)),
        "law",
    ]
    assert [entry.text for entry in legend_entries(curves)] == ["extrapolated"]


def test_several_ladders_of_an_arm_are_told_apart_and_no_curve_has_an_arms_colour() -> None:
    x, y = (1.0, 2.0), (1.0, 2.0)
    ladders = [Series("v", "line", x, y, arm="vanilla", variant=name) for name in ("", "a", "b", "c")]
    other = Series("more passes", "line", x, y)
    panel = Panel("p", Axis("x"), Axis("y"), (*ladders, other))
    colours = [curve.colour.light for curve in curves_of(panel, ARM_TITLES)]
    assert colours[0] == ARM_COLOURS["vanilla"].light
    assert min_distance(colours, BLIND["normal"]) > 20
    assert not {curve.colour for curve in curves_of(panel, ARM_TITLES)[1:]} & set(ARM_COLOURS.values())


def test_titles_and_axes_say_the_display_names_of_arms() -> None:
    panel = Panel(
        "loop-2-nci over loop-2", Axis("compute of untied-grow"), Axis("y"),
        (Series("1.5× for vanilla", "line", (1.0, 2.0), (1.0, 2.0)),), (("y", 1.0, "vanilla"),),
    )  # fmt: skip
    (one,) = draw(panel)
    assert one.panel.title == "loop-2-nci over Loop-2"  # a longer name is another arm
    assert one.axes.get_xlabel() == "compute of Untied-Grow"
    assert one.drawn[0][1].label == "1.5× for Vanilla"
    assert any(text.get_text() == "Vanilla" for text in one.axes.texts)


def test_labels_of_reference_lines_avoid_curves_and_each_other() -> None:
    x = tuple(float(i) for i in range(11))
    high = Series("high", "line", x, tuple(1.0 for _ in x))
    panel = Panel(
        "p", Axis("x"), Axis("y"), (high,), (("y", 0.98, "one"), ("y", 0.5, "two"), ("y", 0.49, "3"))
    )
    with figure_style():
        figure, (one,) = draw_figure([panel], {})
        renderer = FigureCanvasAgg(figure).get_renderer()
        boxes = [text.get_window_extent(renderer) for text in one.axes.texts]
        line = one.axes.transData.transform((5.0, 1.0))[1]
    assert all(not box.y0 <= line <= box.y1 for box in boxes)
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[i + 1 :])


@pytest.mark.parametrize(
    ("low", "high"), [(1.6, 90.0), (4e17, 1.2e19), (2.5e18, 1.1e20), (0.3, 3.0), (1e14, 3e22), (1.2, 8.0)]
)
@pytest.mark.parametrize("inches", [1.8, 2.7, 3.5, 7.0])
def test_log_axes_have_at_least_two_labels_and_none_overlap(low: float, high: float, inches: float) -> None:
    with figure_style():
        figure = new_figure(inches, 2.2)
        axes = figure.add_subplot()
        draw_panel(
            axes, Panel("p", Axis("x", "log", limits=(low, high)), Axis("y"), ()), [], inches=(inches, 2.2)
        )
        renderer = FigureCanvasAgg(figure).get_renderer()
        figure.draw(renderer)
        ticks = axes.xaxis.get_major_ticks()
        shown = [t.label1 for t in ticks if low <= t.get_loc() <= high and t.label1.get_text()]
        boxes = sorted((label.get_window_extent(renderer) for label in shown), key=lambda box: box.x0)
    assert len(boxes) >= 2
    assert all(one.x1 <= other.x0 + 1 for one, other in pairwise(boxes))


def test_own_arms_of_a_study_differ_from_each_other_and_from_the_papers_in_colour_marker_and_grey() -> None:
    names = ["vanilla", "my_block", "other-block", "third"]
    points = [Series(name, "points", (1.0, 2.0), (3.0, 2.0 + i), arm=name) for i, name in enumerate(names)]
    panel = Panel("Loss", Axis("x"), Axis("y"), tuple(points))
    study = LoadedStudy("s", Answer("s", "", "", (), {}, panels=(panel,)), {}, ())
    styles = study_arm_styles([study])
    assert set(styles) == {"my-block", "other-block", "third"}  # the paper's arms keep theirs
    curves = curves_of(styled_panel(panel, styles), {})
    assert curves[0].colour == ARM_COLOURS["vanilla"]
    seen = [curve.colour.light for curve in curves]
    for vision in BLIND.values():
        assert min_distance(seen, vision) > 12
    assert len({curve.series[0].marker for curve in curves}) == len(names)
    twice = replace(panel, series=(points[1], replace(points[1], variant="fitted")))
    shade = curves_of(styled_panel(twice, styles), {})
    assert shade[0].colour == styles["my-block"][0] != shade[1].colour  # a second ladder is a shade of it
    assert shade[1].colour == level_colour(0.45, styles["my-block"][0])
