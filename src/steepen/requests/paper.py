"""`paper`: the paper's figures, tables and claims, from its authors' runs or from one's own studies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from steepen.errors import UsageError, nearest
from steepen.requests.request import Argument, Request, function
from steepen.results.panel import Panel
from steepen.results.result import Result
from steepen.results.table import Column, Table, columns_of, table_of
from steepen.results.text import Block, Paragraph
from steepen.utils.codec import option, to_builtins
from steepen.utils.console import spinner
from steepen.utils.formatting import pretty_exponents

if TYPE_CHECKING:
    from steepen.reproduction.claims import Claim
    from steepen.reproduction.items import Item
    from steepen.reproduction.paper_studies import PaperStudies

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
                (series.label, len(series.x), _range(series.x), _range(series.y))
                for series in panel.series
                if series.role == "measured" and series.kind in ("points", "bars") and series.x
            ]
            if curves and shown < MAX_CURVES:
                heads = ("curve", "points", panel.x.label, panel.y.label)
                yield Table(panel.title, heads, tuple(curves))
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


PaperResult: TypeAlias = PaperList | PaperItem


@dataclass(frozen=True)
class Paper(Request[PaperResult]):
    """List the paper's figures, tables and claims, or show one beside what the paper prints.

    Figures and tables are drawn from the runs that the paper's authors publish, which come with the package;
    with `data` from your own studies. A claim is a number that the paper prints, computed from their runs.
    """

    examples = (
        "steepen paper",
        "steepen paper figure 3 --figure figure3.png",
        "steepen paper figure 16a",
        "steepen paper table 7",
        "steepen paper claim multiplier_1e20",
        "steepen paper figure 3 --data ladder-mini --figure mine.png",
    )
    figure = tables = True

    kind: Annotated[Literal["figure", "table", "claim"] | None, Argument("figure, table or claim.")] = None
    name: Annotated[str | None, Argument("Printed number (3, 16a) or LaTeX label; of a claim its name.")] = (
        None
    )
    _: KW_ONLY
    data: tuple[str, ...] = option(
        "Draw from these studies of yours: directories, or names in `studies`. Repeatable.", ()
    )
    studies: Path = option("Directory of your studies.", Path("studies"))

    def check(self) -> None:
        """Reject data without a figure or table to draw."""
        if self.data and (self.kind not in ("figure", "table") or self.name is None):
            raise UsageError("`data` is drawn as a figure or table of the paper: give its number.")

    def run(self) -> PaperResult:
        """The list, the item or the claims."""
        from steepen.reproduction.claims import claims
        from steepen.reproduction.items import ITEMS, find_item
        from steepen.reproduction.paper_studies import PaperStudies

        studies = PaperStudies()
        if self.kind == "claim":
            named = dict.fromkeys(claim.name for claim in claims())
            if self.name is not None and self.name not in named:
                near = nearest(self.name, named)
                raise UsageError(f"the paper has no claim {self.name!r}; the nearest are {near}.")
            with spinner("computing"):
                found = [claim for claim in claims() if self.name in (None, claim.name)]
                return PaperList([_claim_row(claim, studies) for claim in found])
        if self.kind is None or self.name is None:
            wanted = "" if self.kind is None else self.kind.capitalize()
            names = {} if wanted else {claim.name: claim.item for claim in claims()}
            return PaperList([_item_row(item) for item in ITEMS if item.number.startswith(wanted)], names)
        item = find_item(self.kind, self.name)
        with spinner("computing"):
            if self.data:
                from steepen.report.load_studies import load_study

                answers = [load_study(name, self.studies).answer for name in self.data]
                return PaperItem(_item_row(item), item.show_own(answers), source=", ".join(self.data))
            printed = [_claim_row(claim, studies) for claim in claims() if claim.item == item.number]
            return PaperItem(_item_row(item), item.show(studies), printed)


def _item_row(item: Item) -> ItemRow:
    return ItemRow(item.number, item.title, item.label, item.command, item.note)


def _claim_row(claim: Claim, studies: PaperStudies) -> ClaimRow:
    value = claim.compute(studies)
    return ClaimRow(claim.name, claim.arm, claim.item, claim.printed, value, claim.tolerance)


paper = function(Paper)
