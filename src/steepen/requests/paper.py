"""`paper`: the paper's figures, tables and claims, from its authors' runs or from one's own studies."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from steepen.errors import UsageError, nearest
from steepen.requests.request import Argument, Request, function
from steepen.results.paper import ClaimRow, ItemRow, PaperItem, PaperList
from steepen.utils.codec import option
from steepen.utils.console import spinner

if TYPE_CHECKING:
    from steepen.reproduction.claims import Claim
    from steepen.reproduction.items import Item
    from steepen.reproduction.paper_studies import PaperStudies

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
            found = [claim for claim in claims() if self.name in (None, claim.name)]
            if not found:
                known = {claim.name for claim in claims()}
                raise UsageError(
                    f"the paper has no claim {self.name!r}; the nearest are {nearest(str(self.name), known)}."
                )
            with spinner("computing"):
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
