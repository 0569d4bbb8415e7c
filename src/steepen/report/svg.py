"""A layout as inline SVG for the page: classes for colours, a title on every point for the hover.

Written by hand rather than with a charting library: a panel is a few kilobytes instead of a megabyte of
script, prints as vectors, follows the page's light or dark colours, and needs no network.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

from markupsafe import Markup, escape

from steepen.report.axes import Tick
from steepen.report.colours import Colour
from steepen.report.groups import series_name
from steepen.report.layout import PanelLayout, PlacedSeries
from steepen.studies.answer import Panel, Series
from steepen.utils.formatting import format_value

ColourClass = Callable[[Colour], str]


def panel_svg(layout: PanelLayout, name: str, colour_class: ColourClass, alt: str) -> Markup:
    """The layout; `name` makes its ids unique, `alt` is its text for screen readers."""
    left, top, right, bottom = layout.box
    width, height, font = _px(layout.canvas.width), _px(layout.height), layout.canvas.font
    out: list[str] = [
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-size="{_px(font)}" role="group" aria-label="{escape(alt)}">',
        f'<clipPath id="{name}"><rect x="{_px(left)}" y="{_px(top - 4)}" width="{_px(right - left + 4)}" '
        f'height="{_px(bottom - top + 8)}"/></clipPath>',
    ]
    out += _axes(layout)
    out += _reference_lines(layout)
    out.append(f'<g clip-path="url(#{name})">')
    out += [_mark(mark, layout, colour_class) for mark in layout.marks]
    out.append("</g>")
    out += _labels(layout, colour_class)
    out += _legend(layout, colour_class)
    out.append("</svg>")
    return Markup("".join(out))


def alt_text(panel: Panel, layout: PanelLayout) -> str:
    """The panel as text, for screen readers."""
    parts = [f"{panel.title}: {panel.y.label} against {panel.x.label}."]
    for mark in layout.marks:
        if mark.series.kind != "band" and mark.values:
            (x0, y0), (x1, y1) = mark.values[0], mark.values[-1]
            text = f"{_name(mark)}: {format_value(y0)} at {format_value(x0)}"
            if len(mark.values) > 1:
                text += (
                    f" to {format_value(y1)} at {format_value(x1)} ({len(mark.values)} {mark.series.kind})"
                )
            parts.append(text + ".")
    return " ".join(parts)


def _axes(layout: PanelLayout) -> list[str]:
    left, top, right, bottom = layout.box
    font = layout.canvas.font
    out = ['<g class="grid">']
    out += [f'<path d="M{_px(left)} {_px(y)}H{_px(right)}"/>' for y, _ in layout.y_ticks]
    out.append('</g><g class="axis">')
    out.append(f'<path d="M{_px(left)} {_px(top)}V{_px(bottom)}H{_px(right)}"/>')
    ticks = [f"M{_px(x)} {_px(bottom)}v4" for x, _ in layout.x_ticks]
    ticks += [f"M{_px(x)} {_px(bottom)}v2.5" for x, _ in layout.x_minor]
    ticks += [f"M{_px(left)} {_px(y)}h-4" for y, _ in layout.y_ticks]
    ticks += [f"M{_px(left)} {_px(y)}h-2.5" for y, _ in layout.y_minor]
    out.append(f'<path d="{"".join(ticks)}"/></g><g class="words">')
    out += [f'<text x="{_px(x)}" y="{_px(bottom + 1.45 * font)}" text-anchor="middle">{_tick(t)}</text>'
            for x, t in layout.x_ticks]  # fmt: skip
    out += [f'<text x="{_px(left - 7)}" y="{_px(y + 0.35 * font)}" text-anchor="end">{_tick(t)}</text>'
            for y, t in layout.y_ticks]  # fmt: skip
    middle, y_label = (left + right) / 2, escape(layout.panel.y.label)
    out.append(f'<text class="label" x="{_px(middle)}" y="{_px(bottom + 2.9 * font)}" text-anchor="middle">'
               f"{escape(layout.panel.x.label)}</text>")  # fmt: skip
    out.append(f'<text class="label" x="2" y="{_px(1.1 * font)}">{y_label}</text></g>')
    return out


def _tick(tick: Tick) -> str:
    if tick.power is None:
        return tick.text
    power = str(tick.power).replace("-", "−")
    return f'{tick.text}<tspan dy="-0.45em" font-size="75%">{power}</tspan>'


def _reference_lines(layout: PanelLayout) -> list[str]:
    left, top, right, bottom = layout.box
    font = layout.canvas.font
    out = ['<g class="rule">']
    for rule in layout.reference_lines:
        at, text = _px(rule.at), escape(rule.text)
        if rule.direction == "x":
            out.append(f'<path d="M{at} {_px(top)}V{_px(bottom)}"/>')
            out.append(f'<text x="{_px(rule.at + 4)}" y="{_px(top + 0.9 * font)}">{text}</text>')
        else:
            out.append(f'<path d="M{_px(left)} {at}H{_px(right)}"/>')
            out.append(f'<text x="{_px(right - 3)}" y="{_px(rule.at - 4)}" text-anchor="end">{text}</text>')
    return [*out, "</g>"]


def _mark(mark: PlacedSeries, layout: PanelLayout, colour_class: ColourClass) -> str:
    series, style = mark.series, mark.series.style
    shade = colour_class(mark.curve.colour)
    if series.kind == "band":
        lower = " ".join(f"{_px(x)},{_px(y)}" for x, y in mark.at)
        back = zip(reversed(mark.at), reversed(mark.upper), strict=True)
        upper = " ".join(f"{_px(x)},{_px(y)}" for (x, _), y in back)
        return f'<polygon class="band {shade}" points="{lower} {upper}"/>'
    if series.kind == "line":
        points = " ".join(f"{_px(x)},{_px(y)}" for x, y in mark.at)
        return (
            f'<polyline class="line {style} {shade}" points="{points}" data-label="{escape(_name(mark))}" '
            f'data-v="{_hover_values(mark)}"/>'
        )
    radius = 0.31 * layout.canvas.font
    shapes: list[str] = []
    for i, ((x, y), (a, b)) in enumerate(zip(mark.at, mark.values, strict=True)):
        run = mark.runs[i] if mark.runs else ""
        title = (
            f"{_name(mark)}\n{layout.panel.x.label}: {format_value(a)}\n"
            f"{layout.panel.y.label}: {format_value(b, 5)}" + (f"\nrun {run}" if run else "")
        )
        link = f' data-run="{escape(run)}"' if run else ""
        shapes.append(
            f'<g class="point"{link}><title>{escape(title)}</title>{_shape(series, x, y, radius)}</g>'
        )
    filled = "filled" if series.filled else "hollow"
    return f'<g class="{filled} {shade}">{"".join(shapes)}</g>'


def _hover_values(mark: PlacedSeries) -> str:
    """The hover values along a line, vertex by vertex: x;y|x;y."""
    return "|".join(f"{format_value(a)};{format_value(b, 5)}" for a, b in mark.values)


def _shape(series: Series, x: float, y: float, radius: float) -> str:
    if series.marker == "square":
        side = _px(2 * radius)
        return f'<rect x="{_px(x - radius)}" y="{_px(y - radius)}" width="{side}" height="{side}"/>'
    if series.marker == "star":
        return f'<path d="M{_px(x)} {_px(y)}{_star(1.9 * radius)}"/>'
    return f'<circle cx="{_px(x)}" cy="{_px(y)}" r="{_px(radius)}"/>'


def _star(size: float) -> str:
    """A five-pointed star around the current point, in relative moves."""
    corners = [
        (length * size * math.sin(math.pi * k / 5), -length * size * math.cos(math.pi * k / 5))
        for k in range(10)
        for length in [1.0 if k % 2 == 0 else 0.42]
    ]
    moves = [corners[0], *((b[0] - a[0], b[1] - a[1]) for a, b in pairwise(corners))]
    return "m" + "l".join(f"{_px(a)} {_px(b)}" for a, b in moves) + "z"


def _labels(layout: PanelLayout, colour_class: ColourClass) -> list[str]:
    font = layout.canvas.font
    out = ['<g class="names">']
    for label in layout.labels:
        shade = colour_class(label.colour)
        if label.leader is not None:
            (ax, ay), (bx, by) = label.leader
            out.append(f'<path class="leader {shade}" d="M{_px(ax)} {_px(ay)}L{_px(bx)} {_px(by)}"/>')
        out.append(
            f'<text class="{shade}" x="{_px(label.x)}" y="{_px(label.y + 0.35 * font)}" '
            f'text-anchor="{label.anchor}">{escape(label.text)}</text>'
        )
    return [*out, "</g>"]


def _legend(layout: PanelLayout, colour_class: ColourClass) -> list[str]:
    font = layout.canvas.font
    out = ['<g class="key">']
    for x, y, entry in layout.legend:
        series, shade = entry.series, colour_class(entry.colour)
        end = x + 1.8 * font
        if series.kind == "band":
            out.append(f'<rect class="band {shade}" x="{_px(x)}" y="{_px(y - 0.4 * font)}" '
                       f'width="{_px(1.8 * font)}" height="{_px(0.8 * font)}"/>')  # fmt: skip
        elif series.kind == "line":
            out.append(f'<path class="line {series.style} {shade}" d="M{_px(x)} {_px(y)}H{_px(end)}"/>')
        else:
            filled = "filled" if series.filled else "hollow"
            out.append(f'<g class="{filled} {shade}">{_shape(series, (x + end) / 2, y, 0.31 * font)}</g>')
        out.append(f'<text x="{_px(x + 2.3 * font)}" y="{_px(y + 0.35 * font)}">{escape(entry.text)}</text>')
    return [*out, "</g>"]


def _name(mark: PlacedSeries) -> str:
    return series_name(mark.series, mark.curve)


def _px(value: float) -> str:
    text = f"{value:.1f}"
    return text.removesuffix(".0") if text != "-0.0" else "0"
