"""What `next` returns: the runs to make next, and the outlook of every arm."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

from steepen.results.result import Result
from steepen.results.table import Column, table_of
from steepen.results.text import Block, Paragraph
from steepen.utils.formatting import format_flops, percent

if TYPE_CHECKING:
    from steepen.laws.next_runs import NextRuns

QUESTIONS = {"better": "Is the arm better in the common range?", "grows": "Does the gain grow with compute?"}
WORDS = {
    "sweep": "re-sweep rate", "finish": "end its decay", "rung": "new rung", "seed": "another seed"
}  # fmt: skip
STYLES = {"settled": "bold green", "go on": "bold", "not worth going on": "yellow"}


@dataclass(frozen=True)
class NextRow:
    """A run that could be made next."""

    what: Annotated[str, Column("make")]
    arm: str
    flops: Annotated[float, Column("at", format_flops)]
    depth: Annotated[int | None, Column(shown=False)]
    cost: Annotated[float, Column("cost", format_flops)]
    gain: Annotated[float, Column("less variance", ".1%")]
    gain_per_cost: Annotated[float, Column("per cost", ".2f")]
    chance: Annotated[float, Column("settles", ".0%")]
    reason: Annotated[str, Column(shown=False)]


@dataclass(frozen=True, eq=False, repr=False)
class NextResult(Result):
    """The next runs, ranked: `found` has them, the path they begin, and each arm's outlook."""

    found: NextRuns
    cautions: tuple[str, ...] = ()

    @property
    def advice(self) -> str:
        """settled, go on, or not worth going on."""
        return self.found.advice

    @property
    def rows(self) -> list[NextRow]:
        """One row per run, best first."""
        return [
            NextRow(
                WORDS[run.what if run.what != "run" else "rung" if run.new_rung else "seed"],
                run.arm, run.flops, run.depth, run.cost, run.gain, run.gain_per_cost, run.chance, run.reason,
            )
            for run in self.found.ranked
        ]  # fmt: skip

    def headline(self) -> str:
        """The advice in one line."""
        return f"{QUESTIONS[self.found.question]} {self.advice}"

    def to_dict(self) -> dict[str, Any]:
        """The advice, the outlooks, the ranking and the path."""
        return {"advice": self.advice, **asdict(self.found)}

    def blocks(self, width: int) -> Iterable[Block]:
        """The advice, the outlook of each arm, and the runs."""
        found, unit = self.found, self.found.unit
        yield Paragraph(f" {QUESTIONS[found.question]}", f"{self.advice}:", STYLES[self.advice])
        columns = [
            Column("arm", value=lambda one: one.arm),
            Column("now", value=lambda one: one.word),
            Column("after 1 run", ".0%", value=lambda one: one.chances[0]),
            Column("3", ".0%", value=lambda one: one.chances[1]),
            Column("10", ".0%", value=lambda one: one.chances[2]),
            Column("ever", ".0%", value=lambda one: one.reachable),
            Column("runs to the end", ".0f", value=lambda one: one.runs_to_end),
            Column(unit, format_flops, value=lambda one: one.to_end),
        ]
        yield table_of(
            found.arms, columns, "Chance of an answer",
            f"at level {found.level:.2g}, along the cheapest path; ever: at its end",
        )  # fmt: skip
        given_up = [one.arm for one in found.arms if one.advice == "not worth going on"]
        if given_up:
            worst = max(one.reachable for one in found.arms if one.arm in given_up)
            yield Paragraph(
                f"Not worth going on for {', '.join(given_up)}: no runs that are offered have more than a "
                f"{percent(max(worst, 0.01))} chance of an answer. Ask for a larger effect, or climb higher."
            )
        doubts = [run.reason for run in found.ranked if run.what != "run"]
        yield from (Paragraph(f"· mistuned? {reason}") for reason in doubts)
        if self.rows and (doubts or self.advice == "go on"):
            yield self.table(
                f"less variance: of the open contrasts; per cost: per {unit}, relative to the best; settles: "
                "the chance of an answer right after it"
            )
        yield from (Paragraph(f"warning: {note}") for note in self.cautions[:3])
