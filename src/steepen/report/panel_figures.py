"""Panels as figures for a paper: PDF with embedded fonts, SVG with outlines, PNG at 300 dots per inch."""

from __future__ import annotations

from typing import Any

from steepen.report.colours import NEUTRAL
from steepen.report.figure_style import Format, figure_bytes, figure_style
from steepen.report.layout import PAPER, PanelLayout, PlacedSeries, lay_out
from steepen.studies.answer import Panel, Series

_MARKERS = {"circle": "o", "square": "s", "star": "*"}
_DASHES: dict[str, Any] = {"solid": "-", "dashed": (0, (4, 2)), "dotted": (0, (1, 1.6))}


@figure_style()
def draw_panels(
    panels: list[Panel], titles: dict[str, str], formats: tuple[Format, ...]
) -> dict[Format, bytes]:
    """One figure of one or more panels, up to three beside each other, as the bytes of each format's file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    layouts = [lay_out(panel, PAPER, titles) for panel in panels]
    columns = min(3, len(layouts))
    rows = [layouts[i : i + columns] for i in range(0, len(layouts), columns)]
    row_heights = [max(layout.height for layout in row) for row in rows]
    width, height = columns * PAPER.width, sum(row_heights)
    figure = Figure(figsize=(width / 72, height / 72))
    FigureCanvasAgg(figure)
    top = 0.0
    for row, row_height in zip(rows, row_heights, strict=True):
        for i, layout in enumerate(row):
            _Painter(figure, width, height, i * PAPER.width, top).draw(layout)
        top += row_height
    return {kind: figure_bytes(figure, kind) for kind in formats}


def draw_panel(axes: Any, panel: Panel, titles: dict[str, str]) -> None:
    """Draw a panel into Axes of any figure, with a legend of its curves."""
    layout = lay_out(panel, PAPER, titles)
    axes.set(xscale=panel.x.scale, yscale=panel.y.scale, title=panel.title)
    axes.set(xlabel=panel.x.label, ylabel=panel.y.label)
    axes.set_xlim(*_limits(layout.x.low, layout.x.high, panel.x.reverse))
    axes.set_ylim(*_limits(layout.y.low, layout.y.high, panel.y.reverse))
    for mark in layout.marks:
        _draw_mark(axes, mark)
    for rule in layout.reference_lines:
        (axes.axvline if rule.direction == "x" else axes.axhline)(rule.value, color=NEUTRAL.light, lw=0.5)
    for label, colour in {mark.curve.label: mark.curve.colour.light for mark in layout.marks}.items():
        axes.plot([], [], color=colour, label=label)
    axes.legend()


class _Painter:
    """Draws laid-out panels into a figure, each at its offset (in points, from the top left)."""

    def __init__(self, figure: Any, width: float, height: float, left: float, top: float) -> None:
        self.figure, self.width, self.height, self.left, self.top = figure, width, height, left, top

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Points of the layout as fractions of the figure."""
        return (self.left + x) / self.width, 1 - (self.top + y) / self.height

    def draw(self, layout: PanelLayout) -> None:
        left, top, right, bottom = layout.box
        x0, y0 = self.place(left, bottom)
        x1, y1 = self.place(right, top)
        axes = self.figure.add_axes((x0, y0, x1 - x0, y1 - y0))
        axes.set(xscale=layout.panel.x.scale, yscale=layout.panel.y.scale)
        axes.set_xlim(*_limits(layout.x.low, layout.x.high, layout.panel.x.reverse))
        axes.set_ylim(*_limits(layout.y.low, layout.y.high, layout.panel.y.reverse))
        self._ticks(axes, layout)
        font = layout.canvas.font
        axes.set_xlabel(layout.panel.x.label, labelpad=2, parse_math=False)
        self._text(
            0.9 * font, (top + bottom) / 2, layout.panel.y.label, rotation=90, ha="center", va="center"
        )
        self._text(left, 0.95 * font, layout.panel.title, weight="bold", va="center")
        for mark in layout.marks:
            _draw_mark(axes, mark)
        for rule in layout.reference_lines:
            grey = NEUTRAL.light
            (axes.axvline if rule.direction == "x" else axes.axhline)(
                rule.value, color=grey, lw=0.5, ls=_DASHES["dotted"], zorder=1
            )
            if rule.direction == "x":
                self._text(rule.at + 2, top + 0.6 * font, rule.text, color=grey, size=6.2, va="center")
            else:
                self._text(
                    right - 2, rule.at - 0.5 * font, rule.text, color=grey, size=6.2, va="center", ha="right"
                )
        self._labels(layout)
        self._legend(layout)

    def _ticks(self, axes: Any, layout: PanelLayout) -> None:
        from matplotlib.ticker import FixedLocator, NullFormatter

        for axis, marks, minor in (
            (axes.xaxis, layout.x_ticks, layout.x_minor),
            (axes.yaxis, layout.y_ticks, layout.y_minor),
        ):
            labels = [
                tick.text
                if tick.power is None
                else rf"${tick.text}^{{{tick.power}}}$".replace("×", r"\times ")
                for _, tick in marks
            ]
            axis.set_major_locator(FixedLocator([tick.value for _, tick in marks]))
            axis.set_ticklabels(labels)
            axis.set_minor_locator(FixedLocator([value for _, value in minor]))
            axis.set_minor_formatter(NullFormatter())
            axis.set_tick_params(pad=2)

    def _labels(self, layout: PanelLayout) -> None:
        from matplotlib.lines import Line2D

        for label in layout.labels:
            colour = label.colour.light_text
            align = {"start": "left", "middle": "center", "end": "right"}[label.anchor]
            self._text(label.x, label.y, label.text, color=colour, ha=align, va="center_baseline")
            if label.leader is not None:
                (ax, ay), (bx, by) = (self.place(*end) for end in label.leader)
                line = Line2D([ax, bx], [ay, by], color=label.colour.light, lw=0.4, alpha=0.6)
                self.figure.add_artist(line)

    def _legend(self, layout: PanelLayout) -> None:
        from matplotlib.lines import Line2D
        from matplotlib.patches import Rectangle

        font = layout.canvas.font
        for x, y, entry in layout.legend:
            colour, series = entry.colour.light, entry.series
            (ax, ay), (bx, by) = self.place(x, y), self.place(x + 1.8 * font, y)
            if series.kind == "band":
                tall = 0.8 * font / self.height
                self.figure.add_artist(
                    Rectangle((ax, ay - tall / 2), bx - ax, tall, color=colour, alpha=0.18, lw=0)
                )
            elif series.kind == "line":
                self.figure.add_artist(
                    Line2D([ax, bx], [ay, by], color=colour, lw=1, ls=_DASHES[series.style])
                )
            else:
                middle = [(ax + bx) / 2], [ay]
                self.figure.add_artist(Line2D(*middle, **_marker(series, colour)))
            self._text(x + 2.2 * font, y, entry.text, color="#333333", va="center_baseline")

    def _text(self, x: float, y: float, text: str, **style: Any) -> None:
        # parse_math=False: do not interpret $ in labels as math.
        self.figure.text(*self.place(x, y), text, parse_math=False, **style)


def _limits(low: float, high: float, reverse: bool) -> tuple[float, float]:
    return (high, low) if reverse else (low, high)


def _draw_mark(axes: Any, mark: PlacedSeries) -> None:
    series, colour = mark.series, mark.curve.colour.light
    x, y = [v for v, _ in mark.values], [v for _, v in mark.values]
    if series.kind == "band":
        axes.fill_between(x, y, list(mark.upper_values), color=colour, alpha=0.14, lw=0, zorder=1.5)
    elif series.kind == "line":
        axes.plot(x, y, color=colour, lw=1, ls=_DASHES[series.style], zorder=2, solid_capstyle="round")
    else:
        axes.plot(x, y, **_marker(series, colour), zorder=3)


def _marker(series: Series, colour: str) -> dict[str, Any]:
    return {
        "linestyle": "none",
        "marker": _MARKERS[series.marker],
        "markersize": {"circle": 3.2, "square": 3.4, "star": 6.0}[series.marker],
        "markerfacecolor": colour if series.filled else "white",
        "markeredgecolor": "white" if series.filled else colour,
        "markeredgewidth": 0.3 if series.filled else 0.8,
    }
