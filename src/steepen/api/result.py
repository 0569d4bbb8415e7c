"""What every result of the Python API can do: a short repr, a summary, a frame, LaTeX, HTML and a figure."""

from __future__ import annotations

import textwrap
from abc import ABC, abstractmethod
from html import escape
from pathlib import Path
from typing import Any

from steepen.errors import UsageError
from steepen.results.result import to_pandas


class Result(ABC):
    """A result with rows. Subclasses say what the rows, the one-line headline and the figure are."""

    @abstractmethod
    def to_rows(self) -> list[dict[str, Any]]:
        """The rows of the result as dicts of Python values."""

    @abstractmethod
    def headline(self) -> str:
        """The result in one line: what `repr` shows."""

    @abstractmethod
    def summary(self) -> str:
        """The result as text for a terminal."""

    @abstractmethod
    def plot(self, ax: Any = None) -> Any:
        """Draw the result into a matplotlib Axes (a new one where none is given) and return it."""

    def shown_columns(self) -> list[str] | None:
        """The columns that HTML and LaTeX show; None shows all."""
        return None

    def shown_rows(self) -> list[dict[str, Any]]:
        """The rows as HTML, LaTeX and Markdown show them."""
        return self.to_rows()

    def heading(self, column: str) -> str:
        """The heading of a column in HTML, LaTeX and Markdown."""
        return column.replace("delta_gamma", "Δγ").replace("gamma", "γ").replace("_", " ")

    def to_frame(self) -> Any:
        """A pandas DataFrame of the rows (`to_rows()` is for polars and others)."""
        return to_pandas(self.to_rows())

    def to_latex(self, caption: str = "", label: str = "") -> str:
        """A booktabs table of the rows, rounded for people; within a float where a caption is given."""
        from steepen.results.render import to_latex

        table = self._table(caption)
        notes = ""
        return notes + to_latex(table, label=label)

    def write_table(self, path: str | Path) -> Path:
        """Write the rows as .tex (booktabs), .md (both rounded) or .csv (every column and digit)."""
        from steepen.results.render import to_csv, to_markdown
        from steepen.studies.answer import Table
        from steepen.utils.files import write_atomically

        target = Path(path)
        kind = target.suffix.lower()
        if kind == ".tex":
            text = self.to_latex()
        elif kind == ".md":
            text = to_markdown(self._table())
        elif kind == ".csv":
            rows = self.to_rows()
            columns = list(rows[0]) if rows else []
            cells = tuple(tuple(row.get(column) for column in columns) for row in rows)
            text = to_csv(Table(self.headline(), tuple(columns), cells))
        else:
            raise UsageError(f"the table {target.name} must end in .tex, .csv or .md.")
        write_atomically(target, text)
        return target

    def _table(self, caption: str = "") -> Any:
        from steepen.studies.answer import Table

        rows = self.shown_rows()
        columns = self.shown_columns() or (list(rows[0]) if rows else [])
        cells = tuple(tuple(row.get(column) for column in columns) for row in rows)
        return Table(self.headline(), tuple(map(self.heading, columns)), cells, caption)

    def __repr__(self) -> str:
        return f"<{self.headline()}>"

    def __str__(self) -> str:
        return self.summary()

    def _repr_html_(self) -> str:
        from steepen.results.render import formatted_rows, numeric_columns

        table = self._table()
        right = [' style="text-align:right"' if numeric else "" for numeric in numeric_columns(table)]
        head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
        body = "".join(
            "<tr>"
            + "".join(f"<td{style}>{escape(cell)}</td>" for style, cell in zip(right, row, strict=True))
            + "</tr>"
            for row in formatted_rows(table)
        )
        return (
            f"<p>{escape(self.headline())}</p>"
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        )


def wrap(text: str, width: int = 80) -> str:
    """The text in lines of at most `width` characters; the rest of a line is indented as its beginning."""
    lines: list[str] = []
    for line in text.split("\n"):
        start = line[: len(line) - len(line.lstrip(" ·"))]
        wrapped = textwrap.wrap(
            line, width, subsequent_indent=" " * len(start), break_long_words=False, break_on_hyphens=False
        )
        lines += wrapped or [line]
    return "\n".join(lines)


def new_axes(ax: Any = None) -> Any:
    """The given Axes, or one of a new pyplot figure, which a notebook shows by itself."""
    if ax is not None:
        return ax
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(5.0, 3.6), layout="constrained")[1]
