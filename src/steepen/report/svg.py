"""A scene as inline SVG for the page: classes for colours, a title on every point for the hover.

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


def panel_svg(scene: PanelLayout, name: str, colour_class: ColourClass, alt: str) -> Markup:
    """The scene; `name` makes its ids unique, `alt` is what a screen reader says of it."""
    left, top, right, bottom = scene.box
    width, font = scene.canvas.width, scene.canvas.font
    out: list[str] = [
        f'<svg viewBox="0 0 {_n(width)} {_n(scene.height)}" width="{_n(width)}" height="{_n(scene.height)}" '
        f'font-size="{_n(font)}" role="group" aria-label="{escape(alt)}">',
        f'<clipPath id="{name}"><rect x="{_n(left)}" y="{_n(top - 4)}" width="{_n(right - left + 4)}" '
        f'height="{_n(bottom - top + 8)}"/></clipPath>',
    ]
    out += _axes(scene)
    out += _rules(scene)
    out.append(f'<g clip-path="url(#{name})">')
    out += [_mark(mark, scene, colour_class) for mark in scene.marks]
    out.append("</g>")
    out += _labels(scene, colour_class)
    out += _key(scene, colour_class)
    out.append("</svg>")
    return Markup("".join(out))


def alt_text(panel: Panel, scene: PanelLayout) -> str:
    """The panel in words, for those who can't see it."""
    parts = [f"{panel.title}: {panel.y.label} against {panel.x.label}."]
    for mark in scene.marks:
        if mark.series.kind != "band" and mark.values:
            (x0, y0), (x1, y1) = mark.values[0], mark.values[-1]
            text = f"{_name(mark)}: {format_value(y0)} at {format_value(x0)}"
            if len(mark.values) > 1:
                text += (
                    f" to {format_value(y1)} at {format_value(x1)} ({len(mark.values)} {mark.series.kind})"
                )
            parts.append(text + ".")
    return " ".join(parts)


def _axes(scene: PanelLayout) -> list[str]:
    left, top, right, bottom = scene.box
    font = scene.canvas.font
    out = ['<g class="grid">']
    out += [f'<path d="M{_n(left)} {_n(y)}H{_n(right)}"/>' for y, _ in scene.y_ticks]
    out.append('</g><g class="axis">')
    out.append(f'<path d="M{_n(left)} {_n(top)}V{_n(bottom)}H{_n(right)}"/>')
    ticks = [f"M{_n(x)} {_n(bottom)}v4" for x, _ in scene.x_ticks]
    ticks += [f"M{_n(x)} {_n(bottom)}v2.5" for x, _ in scene.x_small]
    ticks += [f"M{_n(left)} {_n(y)}h-4" for y, _ in scene.y_ticks]
    ticks += [f"M{_n(left)} {_n(y)}h-2.5" for y, _ in scene.y_small]
    out.append(f'<path d="{"".join(ticks)}"/></g><g class="words">')
    out += [f'<text x="{_n(x)}" y="{_n(bottom + 1.45 * font)}" text-anchor="middle">{_tick(t)}</text>'
            for x, t in scene.x_ticks]  # fmt: skip
    out += [f'<text x="{_n(left - 7)}" y="{_n(y + 0.35 * font)}" text-anchor="end">{_tick(t)}</text>'
            for y, t in scene.y_ticks]  # fmt: skip
    middle, y_label = (left + right) / 2, escape(scene.panel.y.label)
    out.append(f'<text class="label" x="{_n(middle)}" y="{_n(bottom + 2.9 * font)}" text-anchor="middle">'
               f"{escape(scene.panel.x.label)}</text>")  # fmt: skip
    out.append(f'<text class="label" x="2" y="{_n(1.1 * font)}">{y_label}</text></g>')
    return out


def _tick(tick: Tick) -> str:
    if tick.power is None:
        return tick.text
    power = str(tick.power).replace("-", "−")
    return f'{tick.text}<tspan dy="-0.45em" font-size="75%">{power}</tspan>'


def _rules(scene: PanelLayout) -> list[str]:
    left, top, right, bottom = scene.box
    font = scene.canvas.font
    out = ['<g class="rule">']
    for rule in scene.rules:
        at, text = _n(rule.at), escape(rule.text)
        if rule.direction == "x":
            out.append(f'<path d="M{at} {_n(top)}V{_n(bottom)}"/>')
            out.append(f'<text x="{_n(rule.at + 4)}" y="{_n(top + 0.9 * font)}">{text}</text>')
        else:
            out.append(f'<path d="M{_n(left)} {at}H{_n(right)}"/>')
            out.append(f'<text x="{_n(right - 3)}" y="{_n(rule.at - 4)}" text-anchor="end">{text}</text>')
    return [*out, "</g>"]


def _mark(mark: PlacedSeries, scene: PanelLayout, colour_class: ColourClass) -> str:
    series, style = mark.series, mark.series.style
    shade = colour_class(mark.group.colour)
    if series.kind == "band":
        lower = " ".join(f"{_n(x)},{_n(y)}" for x, y in mark.at)
        back = zip(reversed(mark.at), reversed(mark.upper), strict=True)
        upper = " ".join(f"{_n(x)},{_n(y)}" for (x, _), y in back)
        return f'<polygon class="band {shade}" points="{lower} {upper}"/>'
    if series.kind == "line":
        points = " ".join(f"{_n(x)},{_n(y)}" for x, y in mark.at)
        return (
            f'<polyline class="line {style} {shade}" points="{points}" data-label="{escape(_name(mark))}" '
            f'data-v="{_hover_values(mark)}"/>'
        )
    radius = 0.31 * scene.canvas.font
    shapes: list[str] = []
    for i, ((x, y), (a, b)) in enumerate(zip(mark.at, mark.values, strict=True)):
        run = mark.runs[i] if mark.runs else ""
        title = (
            f"{_name(mark)}\n{scene.panel.x.label}: {format_value(a)}\n"
            f"{scene.panel.y.label}: {format_value(b, 5)}" + (f"\nrun {run}" if run else "")
        )
        link = f' data-run="{escape(run)}"' if run else ""
        shapes.append(
            f'<g class="point"{link}><title>{escape(title)}</title>{_shape(series, x, y, radius)}</g>'
        )
    filled = "filled" if series.filled else "hollow"
    return f'<g class="{filled} {shade}">{"".join(shapes)}</g>'


def _hover_values(mark: PlacedSeries) -> str:
    """What the hover says along a line, vertex by vertex: x;y|x;y."""
    return "|".join(f"{format_value(a)};{format_value(b, 5)}" for a, b in mark.values)


def _shape(series: Series, x: float, y: float, radius: float) -> str:
    if series.marker == "square":
        side = _n(2 * radius)
        return f'<rect x="{_n(x - radius)}" y="{_n(y - radius)}" width="{side}" height="{side}"/>'
    if series.marker == "star":
        return f'<path d="M{_n(x)} {_n(y)}{_star(1.9 * radius)}"/>'
    return f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}"/>'


def _star(size: float) -> str:
    """A five-pointed star around the pen's place, in relative moves."""
    corners = [
        (length * size * math.sin(math.pi * k / 5), -length * size * math.cos(math.pi * k / 5))
        for k in range(10)
        for length in [1.0 if k % 2 == 0 else 0.42]
    ]
    moves = [corners[0], *((b[0] - a[0], b[1] - a[1]) for a, b in pairwise(corners))]
    return "m" + "l".join(f"{_n(a)} {_n(b)}" for a, b in moves) + "z"


def _labels(scene: PanelLayout, colour_class: ColourClass) -> list[str]:
    font = scene.canvas.font
    out = ['<g class="names">']
    for label in scene.labels:
        shade = colour_class(label.colour)
        if label.leader is not None:
            (ax, ay), (bx, by) = label.leader
            out.append(f'<path class="leader {shade}" d="M{_n(ax)} {_n(ay)}L{_n(bx)} {_n(by)}"/>')
        out.append(
            f'<text class="{shade}" x="{_n(label.x)}" y="{_n(label.y + 0.35 * font)}" '
            f'text-anchor="{label.anchor}">{escape(label.text)}</text>'
        )
    return [*out, "</g>"]


def _key(scene: PanelLayout, colour_class: ColourClass) -> list[str]:
    font = scene.canvas.font
    out = ['<g class="key">']
    for x, y, entry in scene.key:
        series, shade = entry.series, colour_class(entry.colour)
        end = x + 1.8 * font
        if series.kind == "band":
            out.append(f'<rect class="band {shade}" x="{_n(x)}" y="{_n(y - 0.4 * font)}" '
                       f'width="{_n(1.8 * font)}" height="{_n(0.8 * font)}"/>')  # fmt: skip
        elif series.kind == "line":
            out.append(f'<path class="line {series.style} {shade}" d="M{_n(x)} {_n(y)}H{_n(end)}"/>')
        else:
            filled = "filled" if series.filled else "hollow"
            out.append(f'<g class="{filled} {shade}">{_shape(series, (x + end) / 2, y, 0.31 * font)}</g>')
        out.append(f'<text x="{_n(x + 2.3 * font)}" y="{_n(y + 0.35 * font)}">{escape(entry.text)}</text>')
    return [*out, "</g>"]


def _name(mark: PlacedSeries) -> str:
    return series_name(mark.series, mark.group)


def _n(value: float) -> str:
    text = f"{value:.1f}"
    return text.removesuffix(".0") if text != "-0.0" else "0"
