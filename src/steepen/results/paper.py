"""What `paper` returns: the list of the paper's figures, tables and claims, or one of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from steepen.results.panel import Panel
from steepen.results.result import Result
from steepen.results.table import Column, Table, columns_of, table_of
from steepen.results.text import Block, Paragraph
from steepen.utils.codec import to_builtins
from steepen.utils.formatting import pretty_exponents

AUTHORS = "the authors' runs"
MAX_CURVES = 30  # in the terminal, about; the figure and --json have all


@dataclass(frozen=True)
class ItemRow:
    """A figure or table of the paper."""

    number: str
    title: str
    label: Annotated[str, Column(shown=False)]
    command: Annotated[str, Column("for your own runs", shown=False)]
    note: Annotated[str, Column(shown=False)] = ""


@dataclass(frozen=True)
class ClaimRow:
    """A number that the paper prints, and the same from its authors' measurements."""

    claim: str
    arm: str
    item: Annotated[str, Column("in")]
    printed: Annotated[float, Column(format="g")]
    computed: Annotated[float, Column("from their runs", format=".5g")]
    tolerance: Annotated[float, Column(shown=False)]

    @property
    def holds(self) -> bool:
        """Whether the computed number is within the tolerance of the printed one."""
        return abs(self.computed - self.printed) <= self.tolerance


@dataclass(frozen=True)
class PointRow:
    """A point of a figure."""

    panel: str
    curve: str
    role: str
    x: float
    y: float


@dataclass(frozen=True)
class CurveRow:
    """A measured curve of a panel, as a terminal shows it."""

    curve: str
    points: int
    x: str
    y: str


@dataclass(frozen=True, eq=False, repr=False)
class PaperList(Result):
    """The paper's figures and tables, or its claims."""

    listed: Sequence[ItemRow] | Sequence[ClaimRow]
    claim_names: Mapping[str, str] = field(default_factory=dict[str, str])  # each with where it is shown

    @property
    def rows(self) -> Sequence[Any]:
        """The items or claims."""
        return self.listed

    def headline(self) -> str:
        """How many there are."""
        kind = "claims" if isinstance(self.rows[0], ClaimRow) else "figures and tables"
        return f"{len(self.rows)} {kind} of the paper"

    def blocks(self, width: int) -> Iterable[Block]:
        """The list, and how one of them is shown."""
        yield self.table()
        if isinstance(self.rows[0], ItemRow):
            if self.claim_names:
                yield Table("Claims", ("name", "shown in"), tuple(self.claim_names.items()))
            yield Paragraph("One of them: steepen paper figure 3, steepen paper claim NAME.")
        else:
            yield from outside(self.rows)


@dataclass(frozen=True, eq=False, repr=False)
class PaperItem(Result):
    """A figure or table of the paper, with the numbers that the paper prints for it."""

    item: ItemRow
    shown: Sequence[Panel | Table]
    claims: Sequence[ClaimRow] = ()  # none from one's own studies
    source: str = AUTHORS

    @property
    def rows(self) -> list[Any]:
        """The points of the figure; none of a table."""
        return [
            PointRow(panel.title, series.label, series.role, x, y)
            for panel in self.panels()
            for series in panel.series
            for x, y in zip(series.x, series.y, strict=True)
        ]

    @property
    def tables(self) -> list[Table]:
        """The tables."""
        return [one for one in self.shown if isinstance(one, Table)]

    def panels(self) -> Sequence[Panel]:
        """The panels of a figure."""
        return [one for one in self.shown if isinstance(one, Panel)]

    def headline(self) -> str:
        """Its printed number, title, and whose runs it shows."""
        return f"{self.item.number}: {self.item.title.rstrip('.')} (from {self.source})"

    def table(self, caption: str = "") -> Table:
        """A table of the paper; of a figure its points."""
        own = self.tables[0] if self.tables else super().table(caption)
        return replace(own, caption=caption or own.caption)

    def to_rows(self) -> list[dict[str, Any]]:
        """The rows of the table, or the points of the figure."""
        if not self.tables:
            return super().to_rows()
        return [dict(zip(one.columns, row, strict=True)) for one in self.tables[:1] for row in one.rows]

    def to_dict(self) -> dict[str, Any]:
        """The panels and tables with all their numbers, and the claims."""
        return {
            "item": to_builtins(self.item),
            "source": self.source,
            "panels": to_builtins(list(self.panels())),
            "tables": to_builtins(self.tables),
            "claims": to_builtins(list(self.claims)),
        }

    def blocks(self, width: int) -> Iterable[Block]:
        """The title, the tables or the curves, and the printed numbers beside the computed ones."""
        yield Paragraph(f" {self.item.title}", lead=f"{self.item.number}.", style="bold")
        if self.item.note:
            yield Paragraph(self.item.note)
        yield Paragraph(f"From {self.source}.")
        yield from self.tables
        shown = 0
        for panel in self.panels():
            curves = [
                CurveRow(series.label, len(series.x), _range(series.x), _range(series.y))
                for series in panel.series
                if series.role == "measured" and series.kind in ("points", "bars") and series.x
            ]
            if curves and shown < MAX_CURVES:
                names = {"x": panel.x.label, "y": panel.y.label}
                columns = [replace(one, header=names.get(key, one.header)) for key, one in CURVE.items()]
                yield table_of(curves, columns, panel.title)
            shown += len(curves)
        if shown > MAX_CURVES:
            yield Paragraph(f"{shown} curves in all; the figure and --json have them.")
        if self.claims:
            columns = [columns_of(ClaimRow)[name] for name in ("claim", "arm", "printed", "computed")]
            yield table_of(self.claims, columns, "What the paper prints")
            yield from outside(self.claims)
        if self.source == AUTHORS:
            yield Paragraph(f"From your own runs: {self.item.command}; then --data STUDY.")


def outside(rows: Iterable[Any]) -> Iterable[Block]:
    """A sentence on the claims that are not within their tolerance."""
    found = [row.claim for row in rows if not row.holds]
    if found:
        yield Paragraph(f"Outside their tolerance: {', '.join(found)}.")


def _range(values: Sequence[float]) -> str:
    ends = dict.fromkeys(pretty_exponents(f"{value:.4g}") for value in (values[0], values[-1]))
    return " to ".join(ends)


CURVE = columns_of(CurveRow)
