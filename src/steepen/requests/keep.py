"""`keep`: should a change be kept? For automatic searches, which read the exit code."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from steepen.requests.request import Option, Request, function
from steepen.requests.tables import ReadsTable
from steepen.results.result import Result
from steepen.results.table import Column
from steepen.results.text import Block, Paragraph
from steepen.utils.codec import Range, option
from steepen.utils.formatting import format_flops
from steepen.utils.values import Level, Noise

if TYPE_CHECKING:
    from steepen.laws.keep import KeepAnswer, ScaleGain

EXIT_CODES = {"yes": 0, "undecided": 3, "no": 4}
STYLES = {"yes": "bold green", "undecided": "yellow", "no": "bold red"}


@dataclass(frozen=True, eq=False, repr=False)
class KeepResult(Result):
    """Whether to keep a change: `found` has the answer, the reason and what to run next."""

    schema = "steepen.keep/1"
    row_columns: ClassVar = {
        "flops": Column("at", format_flops),
        "gain": Column("gain in loss", "+.4f"),
        # Where no seed was repeated there is no noise floor.
        "noise_floor": Column(format=lambda value: "unknown" if math.isinf(value) else f"{value:.4f}"),
        "p_value": Column("p", ".1g"),
        "answer": Column(),
        "seeds": Column(),
        "reference_seeds": Column("ref. seeds"),
    }

    found: KeepAnswer

    @property
    def exit_code(self) -> int:
        """0 for yes, 4 for no, 3 for undecided."""
        return EXIT_CODES[self.found.answer]

    @property
    def rows(self) -> Sequence[ScaleGain]:
        """One row per scale that both arms have."""
        return self.found.scales

    def headline(self) -> str:
        """The answer in one line."""
        return f"keep {self.found.arm} in place of {self.found.reference}? {self.found.answer}"

    def to_dict(self) -> dict[str, Any]:
        """The answer, the scales, and the verdict of the laws (null without one)."""
        found = self.found
        verdict = None if found.verdict is None else found.verdict.to_dict()
        return {**asdict(found), "scales": self.to_rows(), "verdict": verdict}

    def blocks(self, width: int) -> Iterable[Block]:
        """The answer and its reason, the scales, and what to run next."""
        found = self.found
        shared = f"level {found.level:.2g}" + f" (shared among {found.tried} changes)" * (found.tried > 1)
        if self.rows:
            by_laws = "; keep is answered by the fitted laws" * (found.verdict is not None)
            yield self.table(
                f"gains below the noise floor are not told from the noise of seeds; {shared}{by_laws}"
            )
        yield Paragraph(f" {found.reason}", f"{found.answer}:", STYLES[found.answer])
        if found.next_step:
            yield Paragraph(f" {found.next_step}", "next:", "bold")


@dataclass(frozen=True, kw_only=True)
class Keep(ReadsTable, Request[KeepResult]):
    """Keep this change? For programs: exit code 0 for yes, 4 for no, 3 for undecided, 2 for bad input.

    Yes needs a gain above the noise of seeds, at the largest scale and at another one (columns arm, flops,
    loss, seed). With 4 rungs of the reference and 3 of the arm, the laws answer, as `steepen fit` does.
    """

    examples = (
        "steepen keep runs.csv --reference baseline --arm my-change",
        "steepen keep runs.csv --reference baseline --arm my-change --tried 40 --json",
    )
    tables = True

    reference: Annotated[str, Option("Arm that the change is compared with.")]
    arm: str | None = option("The change. Default: the other arm of a table with two.")
    tried: int | None = option(
        "Changes that were tried so far, which share the level: of 40 without effect, one would pass at "
        "0.05. Default: the table's arms but the reference.",
        limits=Range(1, 1_000_000),
    )
    level: Level = option("Significance level, of all changes together.", 0.05)
    noise: Noise | None = option("Known standard deviation of a run's loss; default: from repeated seeds.")

    def run(self) -> KeepResult:
        """Read the table and answer."""
        from steepen.laws.keep import keep_change
        from steepen.laws.ladder import read_ladders

        table = self.read_table(("flops", "loss"))[""]
        found = keep_change(
            read_ladders(table), self.arm, self.reference, level=self.level, tried=self.tried,
            noise=self.noise, unit=table.axis.unit,
        )  # fmt: skip
        return KeepResult(found).with_problems(table.problems)


keep = function(Keep)
