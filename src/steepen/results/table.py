"""Tables: rows under column names, made from typed rows whose fields say how they are shown.

Files and pages have them as CSV with every digit, or as Markdown, LaTeX and HTML with rounded numbers. A new
format of files is a function here and a row of `WRITERS`.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
import json
import math
import operator
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any, Literal

from steepen.errors import UsageError
from steepen.utils.formatting import format_column, format_value, is_number


@dataclass(frozen=True)
class Column:
    """How one column is shown: its heading and the format of its values.

    In a class of rows it annotates a field, `gamma: Annotated[float, Column("γ")]`; with `value` it is a
    column by itself, computed from a row.
    """

    header: str = ""  # "": the field's name, with spaces
    format: str | Callable[[Any], str] = ""  # ".4f" or a function; "": one number of decimals for the column
    value: Callable[[Any], Any] | None = None
    shown: bool = True  # False: only where every column is wanted, as in CSV and frames
    stored: bool = True  # False: only where people read it
    align: Literal["", "left", "right"] = ""  # "": numbers to the right
    whole: bool = False  # text that is never broken over lines, such as a hash
    styles: Mapping[str, str] = field(default_factory=dict)  # colours of words in a terminal

    def of(self, row: Any) -> Any:
        """The column's value of a row."""
        assert self.value is not None
        return self.value(row)


@dataclass(frozen=True)
class Table:
    """Rows under column names. Cells hold numbers; renderers format them."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    caption: str = ""
    per_run: bool = False  # one row per run: written to the report, not to the terminal
    arm_column: int | None = None  # the column of arm names, which the report colours
    # How the columns are shown, where it is not left to the values; not part of the JSON.
    shown: tuple[Column, ...] = field(default=(), compare=False, metadata={"transient": True})
    rule: bool = field(default=True, compare=False, metadata={"transient": True})  # a line below the head

    @property
    def how(self) -> tuple[Column, ...]:
        """How every column is shown."""
        return self.shown or (Column(),) * len(self.columns)


@functools.cache
def columns_of(kind: type) -> dict[str, Column]:
    """The columns of a class of rows, by field."""
    hints = typing.get_type_hints(kind, include_extras=True)
    extras = {one.name: typing.get_args(hints[one.name])[1:] for one in dataclasses.fields(kind)}
    return named_columns(
        {
            name: next((one for one in own if isinstance(one, Column)), Column())
            for name, own in extras.items()
        }
    )


def named_columns(columns: Mapping[str, Column]) -> dict[str, Column]:
    """Columns whose heading and value, where they have none, are those of the attribute they are named by."""
    return {
        name: replace(
            column, header=column.header or name.replace("_", " "),
            value=column.value or operator.attrgetter(name),
        )
        for name, column in columns.items()
    }  # fmt: skip


def table_of(
    rows: Sequence[Any], columns: Sequence[Column], title: str = "", caption: str = "", rule: bool = True
) -> Table:
    """A table of typed rows."""
    cells = tuple(tuple(column.of(row) for column in columns) for row in rows)
    heads = tuple(column.header for column in columns)
    return Table(title, heads, cells, caption, shown=tuple(columns), rule=rule)


def formatted_rows(table: Table) -> list[list[str]]:
    """The rows as people read them, formatted column by column."""
    width = len(table.columns)
    rows = [[*row, *[None] * (width - len(row))][:width] for row in table.rows]
    columns = [_formatted(table, i, [row[i] for row in rows]) for i in range(width)]
    return [list(row) for row in zip(*columns, strict=True)] if rows else []


def _formatted(table: Table, index: int, values: list[Any]) -> list[str]:
    """A column by its own format, else with one number of decimals for all its values."""
    form = table.how[index].format
    if form == "":
        return format_column(values)
    if callable(form):
        return list(map(form, values))
    missing = format_value(None)
    return [missing if value is None or math.isnan(value) else format(value, form) for value in values]


def right_columns(table: Table) -> list[bool]:
    """Which columns are aligned to the right: those that say so, and those of numbers."""
    both = zip(table.how, numeric_columns(table), strict=True)
    return [column.align == "right" or (column.align == "" and numbers) for column, numbers in both]


def numeric_columns(table: Table) -> list[bool]:
    """Which columns hold numbers."""
    return [
        any(is_number(row[i]) for row in table.rows if i < len(row))
        and all(row[i] is None or is_number(row[i]) for row in table.rows if i < len(row))
        for i in range(len(table.columns))
    ]


def to_csv(table: Table) -> str:
    """Comma-separated: numbers in full precision, empty cells for None, lists as JSON."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([no_formula(name) for name in table.columns])
    writer.writerows([[_raw(no_formula(value)) for value in row] for row in table.rows])
    return text.getvalue()


# Also full-width characters, and after the delimiters of other locales, where a new cell would begin.
_FORMULA = re.compile(r"(?:^|(?<=[;\t\r\n]))(?=\s*[=+\-@＝＋－＠]|[\t\r])")


def no_formula(value: Any) -> Any:
    """Text that a spreadsheet would take for a formula, with an apostrophe before it."""
    return _FORMULA.sub("'", value) if isinstance(value, str) else value


def to_markdown(table: Table) -> str:
    """A Markdown table under its title, with its caption."""
    lines = [f"**{_escape(table.title)}**", "", _row(table.columns)]
    lines.append("|" + "|".join(" ---: " if right else " --- " for right in right_columns(table)) + "|")
    lines += [_row(row) for row in formatted_rows(table)]
    if table.caption:
        lines += ["", _escape(table.caption)]
    return "\n".join(lines) + "\n"


def _row(values: Any) -> str:
    return "| " + " | ".join(_escape(str(value)) for value in values) + " |"


def _escape(text: str) -> str:
    for character in "\\`*_<>|[]":
        text = text.replace(character, "\\" + character)
    return " ".join(text.split())


def _raw(value: Any) -> Any:
    if value is None:
        return ""
    if isinstance(value, list | tuple | dict):
        return json.dumps(value, ensure_ascii=False)
    return repr(value) if isinstance(value, float) else value


def to_latex(table: Table, label: str = "") -> str:
    """A booktabs tabular, numbers rounded as in Markdown; within a table float where there is a caption."""
    align = "".join("r" if right else "l" for right in right_columns(table))
    lines = [f"\\begin{{tabular}}{{{align}}}", "\\toprule", _latex_row(table.columns), "\\midrule"]
    lines += [_latex_row(row) for row in formatted_rows(table)]
    lines += ["\\bottomrule", "\\end{tabular}"]
    if table.caption or label:
        named = [f"\\caption{{{latex_escape(table.caption)}}}"] if table.caption else []
        named += [f"\\label{{{label}}}"] if label else []
        lines = ["\\begin{table}", "\\centering", *lines, *named, "\\end{table}"]
    return "\n".join(["% needs \\usepackage{booktabs}", *lines]) + "\n"


def to_html(table: Table) -> str:
    """An HTML table without its title, numbers rounded as in Markdown."""
    right = [' style="text-align:right"' if right else "" for right in right_columns(table)]
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    rows = [
        "".join(f"<td{style}>{escape(cell)}</td>" for style, cell in zip(right, row, strict=True))
        for row in formatted_rows(table)
    ]
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


# By the ending of a file's name. CSV gets every column and digit, the others what a page has room for.
WRITERS: dict[str, Callable[[Table], str]] = {".tex": to_latex, ".csv": to_csv, ".md": to_markdown}
EVERY_COLUMN = {".csv"}
# By what is written.
ENDINGS = {"table": tuple(WRITERS), "figure": (".pdf", ".png", ".svg"), "report": (".html", ".htm")}


def check_ending(path: Path, kind: str) -> None:
    """Raise UsageError for a file that no table, figure or report (`kind`) is written as."""
    if path.suffix.lower() not in ENDINGS[kind]:
        *others, last = ENDINGS[kind]
        raise UsageError(f"the {kind} {path.name} must end in {', '.join(others)} or {last}.")


def _latex_row(values: Any) -> str:
    return " & ".join(latex_escape(str(value)) for value in values) + " \\\\"


def latex_escape(text: str) -> str:
    """Text for LaTeX, with Greek letters, powers of ten and minus signs as mathematics."""
    found = "".join(_LATEX.get(character, character) for character in " ".join(text.split()))
    found = re.sub(r"×10([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)", lambda m: rf"$\times 10^{{{m[1].translate(_DIGITS)}}}$", found)
    return re.sub(r"(?<=[a-z])\$\$(?=\\)", "", found)  # $\Delta$$\gamma$ is one formula


_DIGITS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
_LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"−": "$-$", "±": r"$\pm$", "∞": r"$\infty$", "–": "--", "≥": r"$\ge$", "≤": r"$\le$"},
    **{"γ": r"$\gamma$", "Δ": r"$\Delta$", "α": r"$\alpha$", "β": r"$\beta$", "ρ": r"$\rho$"},
    **{"σ": r"$\sigma$"},
}
