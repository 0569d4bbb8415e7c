"""An answer in the terminal: the verdict first."""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from steepen.report.colours import ARM_TITLES, arm_colour, arm_key
from steepen.report.tables import cells, numeric
from steepen.report.verdicts import other_findings, verdicts_of
from steepen.studies.answer import Answer, Table


def print_answer(answer: Answer, console: Console | None = None, tables: bool = True) -> None:
    """Print the question, the verdicts, the other findings, the tables and the warnings.

    Names and sentences are printed as they are: brackets in them are not markup.
    """
    console = console or Console()
    verdicts = verdicts_of(answer)
    _say(console, Text(answer.question, style="bold"))
    console.print()
    for judged in (one for one in verdicts if one.main):
        line = _arm(judged.arm)
        line.append(f" {judged.word}  ", style="bold reverse" if judged.word == "steeper" else "bold")
        _say(console, line)
        _say(console, Text(judged.sentence), indent=2)
        for more in judged.would_decide:
            _say(console, Text(f"· {more}", style="dim"), indent=2)
    for finding in other_findings(answer, verdicts):
        _say(console, Text(f"• {finding}"))
    if tables:
        for table in answer.tables:
            console.print()
            console.print(_grid(table))
            if table.caption:
                _say(console, Text(table.caption, style="dim"))
    if answer.warnings:
        console.print()
    for warning in answer.warnings:
        _say(console, Text.assemble(("warning", "yellow"), f": {warning}"))


def _say(console: Console, text: Text, indent: int = 0) -> None:
    console.print(Padding(text, (0, 0, 0, indent)), highlight=False)


def _arm(name: str) -> Text:
    key = arm_key(name)
    # Black on a black terminal can't be read, nor white on white: Vanilla takes the terminal's own colour.
    style = "bold" if key == "vanilla" else f"bold {arm_colour(key).dark}"
    return Text(ARM_TITLES.get(key, name), style=style)


def _grid(table: Table) -> Grid:
    grid = Grid(title=Text(table.title, style="bold"), title_justify="left", box=None, header_style="dim")
    for name, number in zip(table.columns, numeric(table), strict=True):
        grid.add_column(Text(name), justify="right" if number else "left")
    for row in cells(table):
        grid.add_row(*(_arm(cell) if arm_key(cell) in ARM_TITLES else Text(cell) for cell in row))
    return grid
