"""`Result`: what every verb returns, with every way to show it.

A subclass says what its rows, headline, blocks of text and panels are; text, JSON, frames, LaTeX, HTML,
files and figures are made of those here, once for all verbs, so that no two of them can disagree.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from steepen.errors import UsageError
from steepen.results import table as tables
from steepen.results.panel import Panel
from steepen.results.table import Column, Table, columns_of, named_columns
from steepen.utils.formatting import counted

if TYPE_CHECKING:
    from steepen.results.text import Block
    from steepen.studies.answer import Answer
    from steepen.tables.clean_table import Problem

STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}
MAX_PROBLEMS = 8  # shown in a terminal


class Result(ABC):
    """A result with typed rows. Subclasses say what its rows, its headline, its text and its panels are.

    `problems` are those of the table that it was computed from, with what was done about each.
    """

    problems: tuple[Problem, ...] = ()
    arm_titles: ClassVar[dict[str, str]] = {}  # names of arms in figures; others are as the table has them
    schema: ClassVar[str] = ""  # name and version of the JSON, where programs may rely on it
    row_columns: ClassVar[Mapping[str, Column]] = {}  # of rows whose class does not say how it is shown

    def with_problems(self, problems: tuple[Problem, ...]) -> Self:
        """The result with the problems of its table, which it prints first."""
        object.__setattr__(self, "problems", problems)
        return self

    @property
    def exit_code(self) -> int:
        """The exit code of the command."""
        return 0

    @property
    def rows(self) -> Sequence[Any]:
        """The rows: dataclasses whose fields say how they are shown, or objects that `row_columns` shows.

        By default there is one, the result itself.
        """
        return [self]

    @abstractmethod
    def headline(self) -> str:
        """The result in one line: what `repr` shows."""

    def blocks(self, width: int) -> Iterable[Block]:
        """What a terminal of so many columns shows, in order; by default the table of the rows."""
        return [self.table()]

    def panels(self) -> Sequence[Panel]:
        """What the figure shows; none by default."""
        return ()

    @property
    def notes(self) -> Sequence[str]:
        """Remarks that the command prints beside the result, on stderr."""
        return ()

    @property
    def failure(self) -> str:
        """Why the command ends with an error though there is a result to show; "" where it does not."""
        return ""

    def headings(self) -> Mapping[str, str]:
        """Headings by field, where they depend on the result ("γ 90% low")."""
        return {}

    def left_out(self) -> Collection[str]:
        """Fields that say nothing in this result: neither shown nor written."""
        return ()

    def legend(self) -> Sequence[str]:
        """What marks in the rows mean, one line each; below tables."""
        return ()

    def to_dict(self) -> Any:
        """Everything as nested dicts, lists and numbers, as `--json` prints it."""
        return {"rows": self.to_rows()}

    def table(self, caption: str = "") -> Table:
        """The rows as people read them: the columns that a page has room for."""
        own = self.headings()
        columns = [
            replace(column, header=own.get(name, column.header))
            for name, column in self._columns().items()
            if column.shown
        ]
        return tables.table_of(self.rows, columns, self.headline(), caption)

    def to_rows(self) -> list[dict[str, Any]]:
        """The rows as dicts of Python values, every column."""
        stored = {name: column for name, column in self._columns().items() if column.stored}
        return [{name: column.of(row) for name, column in stored.items()} for row in self.rows]

    def _columns(self) -> dict[str, Column]:
        """The columns by name, but for those that say nothing in this result."""
        own = named_columns(self.row_columns)
        found = (own or columns_of(type(self.rows[0]))) if self.rows else {}
        return {name: column for name, column in found.items() if name not in self.left_out()}

    def to_frame(self) -> Any:
        """A pandas DataFrame of the rows (`to_rows()` is for polars and others)."""
        return to_pandas(self.to_rows())

    def to_json(self) -> str:
        """The result as JSON text; NaN and infinities are null."""
        from steepen.utils.json_io import to_json

        found = self.to_dict()
        if self.schema:
            found = {"schema": self.schema, **found}
        if self.problems:
            found = {**found, "problems": [asdict(one) for one in self.problems]}
        return to_json(found)

    def to_latex(self, caption: str = "", label: str = "") -> str:
        """A booktabs table of the rows, rounded for people; within a float where a caption is given."""
        return "".join(f"% {line}\n" for line in self.legend()) + tables.to_latex(self.table(caption), label)

    def write_table(self, path: str | Path) -> Path:
        """Write the rows as .tex (booktabs), .md (both rounded) or .csv (every column and digit)."""
        from steepen.utils.files import write_atomically

        target = Path(path)
        tables.check_ending(target, "table")
        kind = target.suffix.lower()
        notes = "".join(f"% {line}\n" for line in self.legend()) if kind == ".tex" else ""
        if kind in tables.EVERY_COLUMN:
            rows = self.to_rows()
            names = tuple(rows[0]) if rows else ()
            table = Table(self.headline(), names, tuple(tuple(row.values()) for row in rows))
        else:
            table = self.table()
        write_atomically(target, notes + tables.WRITERS[kind](table))
        return target

    def plot(self, ax: Any = None, panel: int | str = 0) -> Any:
        """Draw a panel, by place or by the beginning of its title, into a matplotlib Axes and return that.

        Where no Axes is given a new one is made.
        """
        from steepen.report.figure import plot_panel
        from steepen.report.figure_options import FigureOptions

        panels = FigureOptions().apply(self.panels())
        if isinstance(panel, str):
            found = [one for one in panels if one.title.lower().startswith(panel.lower())]
        else:
            found = panels[panel:][:1]
        if not found:
            titles = "; ".join(one.title for one in panels) or "none"
            raise UsageError(f"there is no panel {panel!r}; the panels are {titles}.")
        if ax is None:
            from matplotlib import pyplot

            ax = pyplot.subplots(figsize=(5.0, 3.6), layout="constrained")[1]  # a notebook shows it
        plot_panel(ax, found[0], self.arm_titles)
        return ax

    def save_figure(self, path: str | Path, **options: Any) -> Path:
        """Write the figure of all panels as PDF, SVG or PNG; arms are named as they are in the table.

        `options` are those of `report.figure_options.FigureOptions`: panels, size, labels, colours, order.
        """
        from steepen.report.figure import save_panels
        from steepen.report.figure_options import figure_options

        tables.check_ending(Path(path), "figure")
        chosen = figure_options(options)
        panels = chosen.apply(self.panels())
        if not panels:
            raise UsageError("there is nothing to draw in this result: no figure was written.")
        save_panels(panels, Path(path), {**self.arm_titles, **chosen.titles}, chosen.size)
        return Path(path)

    def page_content(self) -> Answer:
        """What its page shows: sentences, figures and tables."""
        from steepen.results.text import WIDTH, Lines, Paragraph
        from steepen.studies.answer import Answer

        blocks = list(self.blocks(WIDTH))
        texts = (block.text for block in blocks if isinstance(block, Lines | Paragraph))
        return Answer(
            "fit", self.headline(), section="", values={},
            findings=tuple(line for text in texts for line in text.splitlines() if line.strip()),
            panels=tuple(self.panels()),
            tables=tuple(block for block in blocks if isinstance(block, Table)),
        )  # fmt: skip

    def write_report(self, path: str | Path, **options: Any) -> Path:
        """Write a page of HTML that needs nothing else: answers, problems of the table, figures and tables.

        `options` are those of `save_figure`.
        """
        from steepen.report.figure_options import figure_options
        from steepen.report.load_studies import LoadedStudy
        from steepen.report.page import render_page
        from steepen.utils.files import write_atomically

        target, chosen = Path(path), figure_options(options)
        tables.check_ending(target, "report")
        page = self.page_content()
        page = replace(page, panels=tuple(chosen.apply(page.panels)))
        if self.problems:
            rows = tuple((one.severity, one.place, one.what, one.done) for one in self.problems)
            listed = Table("Problems of the table", ("", "where", "what", "done"), rows)
            page = replace(page, tables=(listed, *page.tables))
        if count := sum(one.severity != "note" for one in self.problems):
            caution = f"The table had {counted(count, 'problem')}; what was done is in its list of problems."
            page = replace(page, cautions=(caution,))
        write_atomically(target, render_page([LoadedStudy("", page, {}, ())], titles=chosen.titles))
        return target

    def print(self) -> None:
        """Print the result to the terminal, in its width and with colours."""
        from steepen.results.text import print_blocks

        print_blocks(self._all_blocks)

    def summary(self) -> str:
        """The same as plain text of 80 columns."""
        from steepen.results.text import to_text

        return to_text(self._all_blocks)

    def _all_blocks(self, width: int) -> Iterable[Block]:
        """The problems of the table, worst first, then the result."""
        from steepen.results.text import Paragraph

        for one in self.problems[:MAX_PROBLEMS]:
            yield Paragraph(f" {one.sentence()}.", f"{one.severity}:", STYLES[one.severity])
        if len(self.problems) > MAX_PROBLEMS:
            yield Paragraph(f"… and {len(self.problems) - MAX_PROBLEMS} more, in the JSON")
        if self.problems:
            yield Paragraph()
        yield from self.blocks(width)

    def __repr__(self) -> str:
        return f"<{self.headline()}>"

    def __str__(self) -> str:
        return self.summary()

    def _repr_html_(self) -> str:
        below = "".join(f"<p>{escape(line)}</p>" for line in self.legend())
        return f"<p>{escape(self.headline())}</p>{tables.to_html(self.table())}{below}"


def to_pandas(rows: Sequence[Mapping[str, Any]]) -> Any:
    """A pandas DataFrame of rows; raises UsageError if pandas is not installed."""
    import importlib

    try:
        pandas = importlib.import_module("pandas")
    except ImportError:
        raise UsageError(
            "to_frame() makes a pandas DataFrame, and pandas is not installed: `pip install pandas`, or use "
            "to_rows(), which polars and others read."
        ) from None
    return pandas.DataFrame(list(rows))
