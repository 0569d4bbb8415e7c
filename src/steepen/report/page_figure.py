"""Panels as inline SVG of the page: matplotlib's drawing, in the page's colours and with its data attached.

The script of the page (assets/page.js) reads hover values back from the coordinates: `data-box` is the axes'
rectangle, `data-x` and `data-y` their scale and limits.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Sequence
from typing import Any
from xml.etree import ElementTree

from markupsafe import Markup

from steepen.report.colours import LIGHT_BACKGROUND, NEUTRAL, Colour
from steepen.report.curves import Curve, panel_with_titles, series_name
from steepen.report.draw_panel import AXIS, GRID, DrawnPanel, draw_panel, shown_points
from steepen.report.figure import figure_curves, figure_limits, is_wide
from steepen.report.figure_style import figure_style, new_figure
from steepen.studies.answer import Axis, Panel, Series
from steepen.utils.formatting import format_value

SVG, LINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
INCHES = (3.6, 2.5)  # 259 × 180 units: about 1.4 pixels each on a phone, 2 on a desktop
DENSE_INCHES = (2.7, 2.0)  # of the panels of a large grid
WIDE_INCHES = 7.2  # of a panel with many names under it
MANY_PANELS = 4
PAGE_STYLE = {"font.family": ["DejaVu Sans"], "mathtext.fontset": "dejavusans", "svg.fonttype": "none"}
ColourClass = Callable[[Colour], str]


def page_panels(
    panels: Sequence[Panel], titles: dict[str, str], name: str, colour_class: ColourClass
) -> list[tuple[Markup, DrawnPanel]]:
    """Every panel of a figure as an SVG; `name` makes its ids unique on the page."""
    panels = [panel_with_titles(panel, titles) for panel in panels]
    curves = figure_curves(panels, titles)
    found: list[tuple[Markup, DrawnPanel]] = []
    with figure_style(PAGE_STYLE):
        for i, (panel, limits) in enumerate(zip(panels, figure_limits(panels), strict=True)):
            wide, tall = DENSE_INCHES if len(panels) >= MANY_PANELS else INCHES
            wide = WIDE_INCHES if is_wide(panel) else wide
            tall = max(tall, 0.6 + 0.17 * len(panel.y.names))
            # A browser's line of text is taller than matplotlib's, also that of the rotated y label.
            figure = new_figure(wide, tall, w_pad=0.07)
            drawn = draw_panel(figure.add_subplot(), panel, curves, limits, inches=(wide, tall))
            drawn.axes.minorticks_off()
            figure.draw_without_rendering()
            figure.set_layout_engine(None)
            buffer = io.StringIO()
            figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
            found.append((_svg(buffer.getvalue(), drawn, curves, f"{name}-{i}", colour_class), drawn))
    return found


def _svg(
    text: str, drawn: DrawnPanel, curves: Sequence[Curve], name: str, colour_class: ColourClass
) -> Markup:
    """matplotlib's SVG with the series in one clipped group, each with its curve, name and runs."""
    root = ElementTree.fromstring(text)
    _, _, wide, tall = (float(v) for v in root.attrib["viewBox"].split())
    box = drawn.axes.get_position()
    left, right, top, bottom = wide * box.x0, wide * box.x1, tall * (1 - box.y1), tall * (1 - box.y0)
    root.attrib = {
        "viewBox": f"0 0 {wide:g} {tall:g}",
        "role": "group",
        "aria-label": alt_text(drawn),
        "data-box": f"{left:.3f} {top:.3f} {right:.3f} {bottom:.3f}",
        "data-x": _scale(drawn.panel.x, drawn.axes.get_xlim()),
        "data-y": _scale(drawn.panel.y, drawn.axes.get_ylim()),
    }
    by_id = {element.get("id", ""): element for element in root.iter()}
    found = [(f"r{i}", "rule", {}) for i in range(len(drawn.panel.lines))]
    found += [(f"r{i}-t", "rule-text", {}) for i in range(len(drawn.panel.lines))]
    for i, (series, curve) in enumerate(drawn.drawn):
        data = {"data-c": str(curves.index(curve))}
        shade = colour_class(curve.colour)
        lists = _lists(series, drawn.panel) if series.kind in ("points", "bars") else {}
        words = {"data-n": series_name(series, curve), **lists}
        found += [(f"s{i}", f"{series.kind} {shade}", {**data, **words}), (f"s{i}-e", f"error {shade}", data)]
        if f"s{i}" in by_id:
            by_id[f"s{i}"].set("colour", curve.colour.light)
    edge = 3  # markers on the frame are whole
    clip = ElementTree.SubElement(root, _tag("clipPath"), {"id": "clip"})
    sides = {"x": left - edge, "y": top - edge, "width": right - left + 2 * edge}
    sides |= {"height": bottom - top + 2 * edge}
    ElementTree.SubElement(clip, _tag("rect"), {key: f"{value:.2f}" for key, value in sides.items()})
    marks = ElementTree.Element(_tag("g"), {"class": "marks", "clip-path": "url(#clip)"})
    parents = {child: parent for parent in root.iter() for child in parent}
    for gid, kind, data in found:
        if gid in by_id:
            element = by_id[gid]
            parents[element].remove(element)
            _simplify(element, element.attrib.pop("colour", ""))
            element.attrib |= {"class": kind, **data}
            marks.append(element)
    root.append(marks)
    _clean(root, name)
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", LINK)
    return Markup(re.sub(r">\s+<", "><", ElementTree.tostring(root, encoding="unicode")))


def _tag(name: str) -> str:
    return f"{{{SVG}}}{name}"


def _simplify(group: ElementTree.Element, colour: str) -> None:
    """Drop the clips of a series (its group has one), say its markers' style once, and name its colour."""
    for element in group.iter():
        element.attrib.pop("clip-path", None)
        if colour:
            element.attrib["style"] = element.get("style", "").replace(colour, "var(--c)")
    uses = [element for element in group.iter() if element.tag == _tag("use")]
    if uses:
        group.set("style", uses[0].get("style", ""))
        for element in (*uses, *(e for e in group.iter() if e.tag == _tag("path"))):
            element.attrib.pop("style", None)


def _clean(root: ElementTree.Element, name: str) -> None:
    """Three decimals, colours as the page's variables, no font families, ids unique on the page."""
    for parent in root.iter():
        for child in [child for child in parent if child.tag in (_tag("metadata"), _tag("style"))]:
            parent.remove(child)
    targets = {e.get(f"{{{LINK}}}href", "").lstrip("#") for e in root.iter()} | {"clip"}
    for element in root.iter():
        attributes = element.attrib
        if attributes.get("id", "").startswith(("xtick", "ytick")):
            attributes["class"] = "tick"
            for use in element.iter(_tag("use")):
                use.attrib.pop("style", None)
        if attributes.get("transform", "").startswith("rotate(-0 "):
            del attributes["transform"]
        for key in {"d", "x", "y", "transform"} & attributes.keys():
            value = re.sub(r"(\.\d{3})\d+", r"\1", attributes[key])
            attributes[key] = re.sub(r" ?([MLzC]) ?", r"\1", " ".join(value.split()))
        if "style" in attributes:
            attributes["style"] = _style(attributes["style"])
        if attributes.get("id", "clip") not in targets:
            del attributes["id"]
        if not attributes.get("style", "-"):
            del attributes["style"]
        if "id" in attributes:
            attributes["id"] = f"{name}-{attributes['id']}"
        if f"{{{LINK}}}href" in attributes:
            attributes[f"{{{LINK}}}href"] = f"#{name}-{attributes[f'{{{LINK}}}href'].lstrip('#')}"
        if attributes.get("clip-path") == "url(#clip)":
            attributes["clip-path"] = f"url(#{name}-clip)"
        else:
            attributes.pop("clip-path", None)


def _style(text: str) -> str:
    for colour, variable in ((AXIS, "soft"), (GRID, "hair"), (NEUTRAL.light, "soft")):
        text = text.replace(colour, f"var(--{variable})")
    text = text.replace(LIGHT_BACKGROUND, "var(--paper)")
    text = re.sub(r"font-family:[^;]*;?", "", text)
    text = re.sub(r"font: ([\d.]+)px [^;]*", r"font-size:\1px", text)
    return re.sub(r"\s*([:;])\s*", r"\1", text)


def _lists(series: Series, panel: Panel) -> dict[str, str]:
    """Runs and texts of the points that are drawn, where the series has them."""
    shown = shown_points(series, panel)
    found: dict[str, str] = {}
    if len(series.runs) == len(series.x):
        found["data-runs"] = " ".join(series.runs[i] or "-" for i in shown)
    if len(series.texts) == len(series.x):
        found["data-texts"] = json.dumps([series.texts[i] for i in shown], ensure_ascii=False)
    return found


def _scale(axis: Axis, limits: tuple[float, float]) -> str:
    value: dict[str, Any] = {
        "label": axis.label,
        "log": axis.scale == "log",
        "limits": [float(f"{v:.9g}") for v in limits],
    }
    if axis.names:
        value["names"] = list(axis.names)
    return json.dumps(value, ensure_ascii=False)


def alt_text(drawn: DrawnPanel) -> str:
    """The panel as text, for screen readers."""
    panel = drawn.panel
    parts = [f"{panel.title}: {panel.y.label} against {panel.x.label}."]
    for series, curve in drawn.drawn:
        if series.kind in ("points", "bars") and series.x:
            text = f"{series_name(series, curve)}: {format_value(series.y[0])} at {format_value(series.x[0])}"
            if len(series.x) > 1:
                text += f" to {format_value(series.y[-1])} at {format_value(series.x[-1])}"
            parts.append(text + ".")
    return " ".join(parts)
