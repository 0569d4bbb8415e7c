"""Panels as figures for a paper: PDF with embedded fonts, SVG with outlines, PNG at 300 dots per inch."""

from __future__ import annotations

import io
from typing import Any, Literal

from steepen.report.colours import NEUTRAL
from steepen.report.layout import PAPER, PanelLayout, PlacedSeries, lay_out
from steepen.studies.answer import Panel, Series

Format = Literal["pdf", "svg", "png"]
FORMATS: tuple[Format, ...] = ("pdf", "svg", "png")

# Only fonts that come with matplotlib: the same figure on every machine. STIX suits Times; DejaVu fills gaps.
STYLE: dict[str, Any] = {
    "font.family": ["STIXGeneral", "DejaVu Sans"],
    "mathtext.fontset": "stix",
    "text.parse_math": False,  # a name with $ in it is a name
    "text.usetex": False,
    "font.size": PAPER.font,
    "axes.linewidth": 0.5,
    "axes.edgecolor": "#333333",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.major.width": 0.5,
    "ytick.major.width": 0.5,
    "xtick.minor.width": 0.35,
    "ytick.minor.width": 0.35,
    "xtick.major.size": 2.8,
    "ytick.major.size": 2.8,
    "xtick.minor.size": 1.6,
    "ytick.minor.size": 1.6,
    "pdf.fonttype": 42,
    "svg.fonttype": "path",
    "svg.hashsalt": "steepen",  # ids that do not change from one drawing to the next
    "savefig.dpi": 300,
    "figure.facecolor": "white",
}
# Without these, matplotlib writes the time of drawing into the file.
_METADATA: dict[Format, dict[str, Any]] = {
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    "svg": {"Date": None, "Creator": None},
    "png": {"Software": None},
}
_MARKERS = {"circle": "o", "square": "s", "star": "*"}
_DASHES: dict[str, Any] = {"solid": "-", "dashed": (0, (4, 2)), "dotted": (0, (1, 1.6))}


def draw_panels(
    panels: list[Panel], titles: dict[str, str], formats: tuple[Format, ...]
) -> dict[Format, bytes]:
    """One figure of one or more panels, up to three beside each other, as the bytes of each format's file."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    scenes = [lay_out(panel, PAPER, titles) for panel in panels]
    columns = min(3, len(scenes))
    rows = [scenes[i : i + columns] for i in range(0, len(scenes), columns)]
    heights = [max(scene.height for scene in row) for row in rows]
    width, height = columns * PAPER.width, sum(heights)
    style: dict[Any, Any] = {**mpl.rcParamsDefault, **STYLE, "backend": "agg"}
    with mpl.rc_context(style):
        figure = Figure(figsize=(width / 72, height / 72))
        FigureCanvasAgg(figure)
        top = 0.0
        for row, tall in zip(rows, heights, strict=True):
            for i, scene in enumerate(row):
                _Painter(figure, width, height, i * PAPER.width, top).draw(scene)
            top += tall
        return {kind: _save(figure, kind) for kind in formats}


def _save(figure: Any, kind: Format) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, metadata=_METADATA[kind])
    return buffer.getvalue()


class _Painter:
    """Draws scenes into a figure, each at its offset (in points, from the top left)."""

    def __init__(self, figure: Any, width: float, height: float, left: float, top: float) -> None:
        self.figure, self.width, self.height, self.left, self.top = figure, width, height, left, top

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Points of the layout as fractions of the figure."""
        return (self.left + x) / self.width, 1 - (self.top + y) / self.height

    def draw(self, scene: PanelLayout) -> None:
        left, top, right, bottom = scene.box
        x0, y0 = self.place(left, bottom)
        x1, y1 = self.place(right, top)
        axes = self.figure.add_axes((x0, y0, x1 - x0, y1 - y0))
        axes.set(xscale=scene.panel.x.scale, yscale=scene.panel.y.scale)
        axes.set_xlim(*_limits(scene.x.low, scene.x.high, scene.panel.x.reverse))
        axes.set_ylim(*_limits(scene.y.low, scene.y.high, scene.panel.y.reverse))
        self._ticks(axes, scene)
        font = scene.canvas.font
        axes.set_xlabel(scene.panel.x.label, labelpad=2)
        self._text(0.9 * font, (top + bottom) / 2, scene.panel.y.label, rotation=90, ha="center", va="center")
        self._text(left, 0.95 * font, scene.panel.title, weight="bold", va="center")
        for mark in scene.marks:
            _draw_mark(axes, mark)
        for rule in scene.rules:
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
        self._labels(scene)
        self._key(scene)

    def _ticks(self, axes: Any, scene: PanelLayout) -> None:
        from matplotlib.ticker import FixedLocator, NullFormatter

        for axis, marks, small in (
            (axes.xaxis, scene.x_ticks, scene.x_small),
            (axes.yaxis, scene.y_ticks, scene.y_small),
        ):
            words = [
                tick.text
                if tick.power is None
                else rf"${tick.text}^{{{tick.power}}}$".replace("×", r"\times ")
                for _, tick in marks
            ]
            axis.set_major_locator(FixedLocator([tick.value for _, tick in marks]))
            axis.set_ticklabels(words)
            for label in axis.get_ticklabels():
                label.set_parse_math(True)
            axis.set_minor_locator(FixedLocator([value for _, value in small]))
            axis.set_minor_formatter(NullFormatter())
            axis.set_tick_params(pad=2)

    def _labels(self, scene: PanelLayout) -> None:
        from matplotlib.lines import Line2D

        for label in scene.labels:
            colour = label.colour.light_text
            align = {"start": "left", "middle": "center", "end": "right"}[label.anchor]
            self._text(label.x, label.y, label.text, color=colour, ha=align, va="center_baseline")
            if label.leader is not None:
                (ax, ay), (bx, by) = (self.place(*end) for end in label.leader)
                line = Line2D([ax, bx], [ay, by], color=label.colour.light, lw=0.4, alpha=0.6)
                self.figure.add_artist(line)

    def _key(self, scene: PanelLayout) -> None:
        from matplotlib.lines import Line2D
        from matplotlib.patches import Rectangle

        font = scene.canvas.font
        for x, y, entry in scene.key:
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
        self.figure.text(*self.place(x, y), text, **style)


def _limits(low: float, high: float, reverse: bool) -> tuple[float, float]:
    return (high, low) if reverse else (low, high)


def _draw_mark(axes: Any, mark: PlacedSeries) -> None:
    series, colour = mark.series, mark.group.colour.light
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
