"""What `fit` returns with `by`: one result for each value of a column, such as the data set."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from steepen.results.panel import Panel
from steepen.results.result import Result
from steepen.results.table import Column, Table
from steepen.results.text import Block, Paragraph

if TYPE_CHECKING:
    from steepen.studies.answer import StudyVerdict


@dataclass(frozen=True, eq=False, repr=False)
class FitsBy(Result):
    """Results by the value of the column `by`; `left_out_parts` says which values could not be fitted."""

    schema = "steepen.fit.by/1"

    by: str
    results: Mapping[str, Result]
    left_out_parts: tuple[str, ...] = ()

    def __getitem__(self, value: str) -> Any:
        """The result of a value."""
        return self.results[value]

    @property
    def exit_code(self) -> int:
        """That of the first result with another than 0."""
        return max(one.exit_code for one in self.results.values())

    @property
    def verdicts(self) -> dict[str, Any]:
        """The verdicts by arm and value, where the law has some."""
        return {
            f"{arm} ({value})": verdict
            for value, one in self.results.items()
            for arm, verdict in getattr(one, "verdicts", {}).items()
        }

    def study_verdicts(self) -> Sequence[StudyVerdict]:
        """The verdicts of all results, each with its value."""
        return [
            replace(judged, part=value)
            for value, one in self.results.items()
            for judged in one.study_verdicts()
        ]

    def page_title(self) -> str:
        """The first result's, and what the results are by."""
        first = next(iter(self.results.values()))
        return f"{first.page_title()} By {self.by}"

    def page_tables(self) -> Sequence[Table]:
        """The tables of every result under its value."""
        return [
            replace(table, title=f"{value}: {table.title}")
            for value, one in self.results.items()
            for table in one.page_tables()
        ]

    @property
    def rows(self) -> Sequence[Any]:
        """The rows of all results."""
        return [row for one in self.results.values() for row in one.rows]

    def to_rows(self) -> list[dict[str, Any]]:
        """The rows of all results, with the value of the column."""
        return [{self.by: value, **row} for value, one in self.results.items() for row in one.to_rows()]

    def table(self, caption: str = "") -> Table:
        """The tables of all results as one, with the value of the column first."""
        inner = {value: one.table() for value, one in self.results.items()}
        first = next(iter(inner.values()))
        rows = tuple((value, *row) for value, one in inner.items() for row in one.rows)
        shown = (Column(self.by), *first.shown)
        return Table(self.headline(), (self.by, *first.columns), rows, caption, shown=shown)

    def headline(self) -> str:
        """The headline of every result."""
        return "; ".join(f"{value}: {one.headline()}" for value, one in self.results.items())

    def warnings(self) -> Sequence[str]:
        """The warnings of all results, and the values that could not be fitted."""
        of_results = [f"{value}: {line}" for value, one in self.results.items() for line in one.warnings()]
        return [*self.left_out_parts, *of_results]

    def to_dict(self) -> dict[str, Any]:
        """The JSON of every result by value."""
        found = {value: json.loads(one.to_json()) for value, one in self.results.items()}
        return {"by": self.by, "results": found, "left_out": list(self.left_out_parts)}

    def panels(self) -> Sequence[Panel]:
        """The panels of all results."""
        return [
            replace(panel, title=f"{value}: {panel.title}", group=panel.group and f"{value}: {panel.group}")
            for value, one in self.results.items()
            for panel in one.panels()
        ]

    def blocks(self, width: int) -> Iterable[Block]:
        """Every result under its value."""
        for sentence in self.left_out_parts:
            yield Paragraph(f" {sentence}", "left out:", "yellow")
        for value, one in self.results.items():
            yield Paragraph(f" {value}", f"{self.by}:", "bold")
            yield from one.blocks(width)
            yield Paragraph()
