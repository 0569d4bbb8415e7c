"""Results as text in a terminal: paragraphs, tables that fit its width, and charts of curves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import TypeAlias

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from steepen.results.table import Table, formatted_rows, right_columns
from steepen.utils.console import MANY_ROWS, SafeConsole, plain_table
from steepen.utils.formatting import printable

WIDTH = 80  # columns of a summary in Python, and of text that goes to a file


@dataclass(frozen=True)
class Paragraph:
    """A paragraph, wrapped to the terminal; `lead` is its beginning in a style of its own."""

    text: str = ""
    lead: str = ""
    style: str = ""  # of the lead
    indent: int = 0


@dataclass(frozen=True)
class Facts:
    """Names with their values, one per line, under a title."""

    pairs: Iterable[tuple[str, str]]
    title: str = ""


@dataclass(frozen=True)
class Lines:
    """Text whose lines are printed as they are; a terminal wraps them between words."""

    text: str


Block: TypeAlias = Paragraph | Facts | Lines | Table
Blocks: TypeAlias = Callable[[int], Iterable[Block]]  # of a terminal so many columns wide


def print_blocks(blocks: Blocks, console: Console | None = None) -> None:
    """Print paragraphs and tables to a console; to standard output where none is given."""
    console = console or SafeConsole()
    for block in blocks(console.width):
        if isinstance(block, Table) and len(block.rows) > MANY_ROWS:
            body = plain_table(block.columns, formatted_rows(block), right_columns(block))
            text = "\n".join(filter(None, (block.title, body, block.caption)))
            console.file.write(f"{printable(text)}\n")
        elif isinstance(block, Table):
            console.print(grid(block))
        elif isinstance(block, Facts):
            facts = Grid(
                title=Text(block.title) if block.title else None, title_justify="left", title_style="bold",
                box=None, show_header=False,
            )  # fmt: skip
            facts.add_column(no_wrap=True, style="dim", min_width=9)
            facts.add_column(overflow="fold")
            for name, value in block.pairs:
                facts.add_row(Text(name), Text(value))
            console.print(facts)
        elif isinstance(block, Lines):
            console.print(Text(block.text), soft_wrap=not console.is_terminal)
        else:
            text = Text.assemble((block.lead, block.style), block.text)
            console.print(Padding(text, (0, 0, 0, block.indent)) if block.indent else text)


def to_text(blocks: Blocks, width: int = WIDTH) -> str:
    """The same as plain text of at most `width` columns."""
    page = StringIO()
    print_blocks(blocks, SafeConsole(file=page, width=width, color_system=None))
    return "\n".join(line.rstrip() for line in page.getvalue().rstrip().split("\n"))


def grid(table: Table) -> Grid:
    """A table for a terminal, with a rule below its head unless it has none: words left, numbers right.

    Words wrap where the terminal is narrow; numbers are never cut.
    """
    found = Grid(
        title=Text(table.title) if table.title else None, title_justify="left", title_style="bold",
        caption=Text(table.caption) if table.caption else None, caption_justify="left", caption_style="",
        box=SIMPLE_HEAD if table.rule else None, show_header=any(table.columns),
        padding=(0, 1 if table.rule else 2, 0, 0), pad_edge=False,
    )  # fmt: skip
    for name, right, column in zip(table.columns, right_columns(table), table.how, strict=True):
        side = "right" if right else "left"
        found.add_column(Text(name), justify=side, no_wrap=right or column.whole, overflow="fold")
    for row in formatted_rows(table):
        pairs = zip(row, table.how, strict=True)
        found.add_row(*(Text(cell, column.styles.get(cell, "")) for cell, column in pairs))
    return found


def table_width(table: Table) -> int:
    """The columns of a terminal that the table takes without wrapping."""
    return SafeConsole(width=10_000).measure(grid(table)).maximum


MARKS = "•×+o"


def text_plot(
    curves: Sequence[tuple[Sequence[float], Sequence[float]]], width: int = 72, height: int = 12
) -> list[str]:
    """The lines of a chart of (x, y) curves, at most `width` characters wide, each with its own mark.

    Every column shows the mean of the points in it. Values that are not finite are left out.
    """
    import numpy as np

    points = [np.array(curve, float).reshape(2, -1) for curve in curves]
    points = [curve[:, np.isfinite(curve).all(axis=0)] for curve in points]
    every = np.concatenate([np.empty((2, 0)), *points], axis=1)
    if not every.size:
        return []
    (left, low), (right, high) = every.min(axis=1).tolist(), every.max(axis=1).tolist()
    labels = [f"{high:.3f}", f"{low:.3f}"]
    margin = max(map(len, labels))
    columns = max(8, width - margin - 2)
    grid = [[" "] * columns for _ in range(height)]
    for number, (x, y) in enumerate(points):
        places = np.rint((x - left) / ((right - left) or 1) * (columns - 1)).astype(int)
        for column in np.unique(places):
            share = (y[places == column].mean() - low) / (high - low) if high > low else 0.5
            grid[height - 1 - round(share * (height - 1))][column] = MARKS[number % len(MARKS)]
    lines = [
        f"{(labels[0] if row == 0 else labels[1] if row == height - 1 else '').rjust(margin)} │"
        + "".join(cells).rstrip()
        for row, cells in enumerate(grid)
    ]
    ends = f"{left:,.0f}".ljust(columns - len(f"{right:,.0f}")) + f"{right:,.0f}"
    return [*lines, f"{'':{margin}} └{'─' * columns}", f"{'':{margin}}  {ends}"]
