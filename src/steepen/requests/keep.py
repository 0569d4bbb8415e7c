"""`keep`: should a change be kept? For automatic searches, which read the exit code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from steepen.requests.request import Option, Request, function
from steepen.requests.tables import ReadsTable
from steepen.results.keep import KeepResult
from steepen.utils.codec import Range, option
from steepen.utils.values import Level, Noise


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
