"""Results as text in a terminal: paragraphs, and tables that fit its width."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
