"""Panels and their legend as one matplotlib figure: the only drawing code, for files, page and notebooks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from steepen.report.colours import ARM_TITLES
from steepen.report.curves import (
    Curve,
    curve_label,
    curves_of,
    legend_curves,
    legend_entries,
    main_series,
    panel_with_titles,
)
from steepen.report.draw_panel import (
    DASHES,
    FONT,
    DrawnPanel,
    Limits,
    draw_panel,
    marker_style,
    panel_limits,
    wrapped,
)
from steepen.report.figure_style import Format, figure_bytes, figure_style, new_figure
from steepen.results.table import check_ending
from steepen.studies.answer import Panel, Series
from steepen.utils.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


SPACING = {"columnspacing": 1.2, "handlelength": 1.8, "handletextpad": 0.6, "borderpad": 0.1}  # × the font


def legend_handles(curves: Sequence[Curve]) -> tuple[list[Any], list[str]]:
    """Handles and labels: every named curve, then what kinds of lines and markers mean."""
    rows = [
        (_handle(curve.series, curve.colour.light), curve_label(curve)) for curve in legend_curves(curves)
    ]
    rows += [(_handle([entry.series], entry.colour.light), entry.text) for entry in legend_entries(curves)]
    return [one for one, _ in rows], [text for _, text in rows]


def _handle(series: Sequence[Series], colour: str) -> Any:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    line, point = main_series(series)
    if line is None and point is None:
        bars = series[0].kind == "bars"
        face = colour if series[0].filled else "#ffffff"
        return Patch(facecolor=face, alpha=None if bars else 0.2, edgecolor=colour if bars else "none")
    style: dict[str, Any] = {"color": colour, "lw": 1.2, "ls": DASHES[line.style] if line else "none"}
    if point is not None:
        marker = marker_style(point, colour)
        style |= {key: value for key, value in marker.items() if key != "linestyle"}
    return Line2D([], [], **style)


def legend_columns(labels: Sequence[str], inches: float) -> int:
    """The most columns whose labels fit a width, filled as matplotlib does: column by column."""
    extra = SPACING["handlelength"] + SPACING["handletextpad"] + SPACING["columnspacing"]
    for columns in range(len(labels), 1, -1):
        rows, longer = divmod(len(labels), columns)
        total, start = 0.0, 0
        for column in range(columns):
            count = rows + (column < longer)
            own = labels[start : start + count]
            start += count
            total += FONT * (extra + 0.48 * max(map(len, own)))
        if total <= 72 * inches:
            return columns
    return 1


MANY_NAMES = 11  # more of them do not fit under one column


def save_panels(
    panels: Sequence[Panel],
    path: Path,
    titles: dict[str, str] = ARM_TITLES,
    size: tuple[float, float] | None = None,
) -> None:
    """Write one figure of some panels, in the format of the file's name; `size` is in inches."""
    check_ending(path, "figure")
    kind = cast("Format", path.suffix.lower().removeprefix("."))
    write_atomically(path, figure_files(panels, titles, (kind,), size)[kind])


@figure_style()
def figure_files(
    panels: Sequence[Panel],
    titles: dict[str, str],
    formats: tuple[Format, ...],
    size: tuple[float, float] | None = None,
) -> dict[Format, bytes]:
    """One figure of one or more panels with a common legend, as the bytes of each format's file."""
    figure, _ = draw_figure(panels, titles, size=size)
    return {kind: figure_bytes(figure, kind) for kind in formats}


def plot_panel(axes: Axes, panel: Panel, titles: dict[str, str]) -> None:
    """Draw one panel into axes of the caller, with a legend and title of its own."""
    panel = panel_with_titles(panel, titles)
    curves = curves_of(panel, titles)
    draw_panel(axes, panel, curves)
    handles, labels = legend_handles(curves)
    axes.set_title(panel.title, parse_math=False)
    if labels:
        axes.legend(handles, labels)


def draw_figure(
    panels: Sequence[Panel], titles: dict[str, str], *, size: tuple[float, float] | None = None
) -> tuple[Figure, list[DrawnPanel]]:
    """The panels in a grid, the names of all curves under it. Call it inside `figure_style()`."""
    panels = [panel_with_titles(panel, titles) for panel in panels]
    columns = grid_columns(panels)
    width = _width(panels, columns) if size is None else size[0] / columns
    # Bars beside their names need room for each.
    names = [max(len(one.y.names) for one in panels[i : i + columns]) for i in range(0, len(panels), columns)]
    heights = [max(0.72 * min(width, 3.5), 0.55 + 0.15 * count) for count in names]
    curves = figure_curves(panels, titles)
    handles, labels = legend_handles(curves)
    per_row = legend_columns(labels, columns * width)
    legend_height = 0.165 * math.ceil(len(labels) / per_row)
    if size is not None:
        scale = max(size[1] - legend_height, 0.5) / sum(heights)
        heights = [scale * height for height in heights]
    figure = new_figure(columns * width, sum(heights) + legend_height, w_pad=0.06, h_pad=0.05, wspace=0.03)
    grid = figure.add_gridspec(len(heights), columns, height_ratios=heights)
    drawn: list[DrawnPanel] = []
    for i, (panel, limits) in enumerate(zip(panels, figure_limits(panels), strict=True)):
        row, column = divmod(i, columns)
        axes = figure.add_subplot(grid[row, column])
        drawn.append(draw_panel(axes, panel, curves, limits, inches=(width, heights[row])))
        title = wrapped(panel.title, 0.92 * width)
        axes.set_title(title, loc="left", weight="bold", parse_math=False)
    if labels:
        box = figure.legend(
            handles, labels, loc="outside lower left", ncols=per_row, labelspacing=0.35, **SPACING
        )
        for text in box.get_texts():
            text.set_parse_math(False)
    figure.draw_without_rendering()  # lays out; the files and the page then share the positions
    figure.set_layout_engine(None)
    return figure, drawn


def grid_columns(panels: Sequence[Panel]) -> int:
    """Columns of a figure's grid: as its first panel says, or 1 to 4 by the number of panels."""
    count = len(panels)
    if panels[0].columns:
        return min(panels[0].columns, count)
    if any(is_wide(panel) for panel in panels):
        return 1
    return count if count <= 3 else 2 if count == 4 else 3 if count <= 9 else 4


def figure_curves(panels: Sequence[Panel], titles: dict[str, str]) -> list[Curve]:
    """The curves of a figure; a curve has one colour in all of its panels."""
    return curves_of(replace(panels[0], series=tuple(s for panel in panels for s in panel.series)), titles)


def figure_limits(panels: Sequence[Panel]) -> list[tuple[Limits, Limits]]:
    """The range of x and y of every panel; panels that share an axis have the union of theirs."""
    found = [panel_limits(panel) for panel in panels]
    for index, name in enumerate(("x", "y")):
        sharing = [i for i, panel in enumerate(panels) if name in panel.share]
        if sharing:
            low, high = min(found[i][index][0] for i in sharing), max(found[i][index][1] for i in sharing)
            for i in sharing:
                found[i] = ((low, high), found[i][1]) if index == 0 else (found[i][0], (low, high))
    return found


def is_wide(panel: Panel) -> bool:
    """Whether a panel needs the width of a page: many names stand under it."""
    return len(panel.x.names) > MANY_NAMES


def _width(panels: Sequence[Panel], columns: int) -> float:
    """Inches of a column: 3.5 is one of a page with two columns, 7 a whole page."""
    width = {1: 3.5, 2: 3.4, 3: 2.7, 4: 2.2}.get(columns, 1.8)
    if any(is_wide(panel) for panel in panels):
        return max(width, 7.0)
    if any(panel.y.names for panel in panels):
        return max(width, 4.8 / math.sqrt(columns))
    return width
