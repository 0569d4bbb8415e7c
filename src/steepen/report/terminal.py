"""Print an answer to the terminal, verdicts first."""

from __future__ import annotations

from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from steepen.laws.verdict.questions import Better, Growth
from steepen.report.colours import ARM_TITLES, arm_colour, arm_key
from steepen.report.curves import ladder_title
from steepen.results.render import formatted_rows, numeric_columns
from steepen.studies.answer import Answer, Table
from steepen.utils.console import SafeConsole

MAX_ROWS = 20  # rows of a table; the report has them all
MAX_PARTS = 3  # of a table that is wider than the terminal; wider ones are left to the report
STYLES: dict[Better | Growth, str] = {
    "better": "bold reverse green",
    "worse": "bold reverse red",
    "no difference": "bold reverse cyan",
    "not resolved": "bold dim",
    "grows": "bold reverse green",
    "constant": "bold reverse cyan",
    "shrinks": "bold reverse red",
    "undecided": "bold dim",
}


def print_answer(answer: Answer, console: Console | None = None) -> None:
    """Print the question, the verdicts, the other findings, the tables and the warnings.

    Tables with a row per run, and those too wide for the terminal, are left to the report. Brackets in names
    and sentences are not markup.
    """
    console = console or SafeConsole()
    _print(console, Text(answer.question, style="bold"))
    console.print()
    for judged in answer.primary_verdicts:
        verdict = judged.verdict
        line = _arm(judged.arm, judged.variant)
        line.append(" ")
        line.append(f" {verdict.better} ", style=STYLES[verdict.better])
        line.append(" ")
        line.append(f" {verdict.growth} ", style=STYLES[verdict.growth])
        if verdict.by_what:
            line.append(f" by {verdict.by_what}", style="bold")
        line.append("  ")
        if judged.part:
            line.append(f"({judged.part})", style="dim")
        _print(console, line)
        _print(console, Text(verdict.sentence), indent=2)
        for change in verdict.what_would_change:
            _print(console, Text(f"· {change}", style="dim"), indent=2)
    for finding in answer.findings:
        _print(console, Text(f"• {finding}"))
    left_out: list[str] = []
    for table in (table for table in answer.tables if not table.per_run):
        parts = _fitting(table, console.width)
        if len(parts) > MAX_PARTS:
            left_out.append(table.title)
            continue
        console.print()
        _print(console, Text(table.title, style="bold"))
        for part in parts:
            console.print(part)
        if len(table.rows) > MAX_ROWS:
            _print(console, Text(f"… and {len(table.rows) - MAX_ROWS} more rows.", style="dim"))
        if table.caption:
            _print(console, Text(table.caption, style="dim"))
    if left_out:
        console.print()
        _print(console, Text(f"Too wide for this terminal, so in the report only: {', '.join(left_out)}."))
    if answer.cautions or answer.warnings:
        console.print()
    for warning in (*answer.cautions, *answer.warnings):
        _print(console, Text.assemble(("warning", "yellow"), f": {warning}"))


def _print(console: Console, text: Text, indent: int = 0) -> None:
    console.print(Padding(text, (0, 0, 0, indent)), highlight=False)


def _arm(name: str, variant: str = "") -> Text:
    key = arm_key(name)
    # Vanilla uses the terminal's default colour: black or white could be invisible.
    style = "bold" if key == "vanilla" else f"bold {arm_colour(key).dark}"
    return Text(ladder_title(name, variant, ARM_TITLES), style=style)


def _fitting(table: Table, width: int) -> list[Grid]:
    """The table, split between columns to fit the terminal, each part with the first column."""
    rows = formatted_rows(table)[:MAX_ROWS]
    columns = [[name, *(row[i] for row in rows)] for i, name in enumerate(table.columns)]
    wide = [max(map(cell_len, column)) + 2 for column in columns]
    parts: list[list[int]] = [[]]
    for i in range(len(columns)):
        used = sum(wide[k] for k in parts[-1])
        if len(parts[-1]) > 1 and used + wide[i] > width:
            parts.append([0])
        parts[-1].append(i)
    return [_grid(table, rows, part) for part in parts]


def _grid(table: Table, rows: list[list[str]], chosen: list[int]) -> Grid:
    grid = Grid(box=None, header_style="dim", padding=(0, 2, 0, 0))
    right = numeric_columns(table)
    for i in chosen:
        grid.add_column(Text(table.columns[i]), justify="right" if right[i] else "left", overflow="fold")
    for row in rows:
        grid.add_row(*(_arm(row[i]) if i == table.arm_column else Text(row[i]) for i in chosen))
    return grid
