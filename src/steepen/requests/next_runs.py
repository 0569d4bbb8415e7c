"""`next`: the runs to make next, and whether they are worth it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np

from steepen.errors import UsageError
from steepen.requests.request import Option, Request, function
from steepen.requests.tables import ReadsTable
from steepen.results.next_runs import NextResult
from steepen.utils.codec import Range
from steepen.utils.console import spinner
from steepen.utils.values import Flops, Level, Noise

if TYPE_CHECKING:
    from steepen.laws.analysis import LadderAnalysis
    from steepen.laws.next_runs import Offer
    from steepen.tables.table import Table

COST = "Cost"


@dataclass(frozen=True, kw_only=True)
class Next(ReadsTable, Request[NextResult]):
    """The next runs to make, ranked by what they tell per FLOP, hour or dollar; or that none is worth it.

    Laws, noise and lack of fit are those of the table. Seeds of its rungs, rungs between them and above are
    compared. A test after every run finds too much: `steepen study ladder --until decided` counts its looks.
    """

    examples = (
        "steepen next runs.csv --reference base",
        "steepen next runs.csv --reference base --arm mine --question better --per hours --budget 40",
        "steepen next ladder-mini --reference vanilla",
    )
    tables = True

    reference: Annotated[str | None, Option("Arm that the others are judged against.")] = None
    arm: Annotated[tuple[str, ...], Option("Only this arm. Repeatable. Default: all.")] = ()
    question: Annotated[
        Literal["grows", "better"],
        Option("grows: does the gain grow with compute? better: is the arm better in the common range?"),
    ] = "grows"
    level: Annotated[Level, Option("Family-wise significance level of the question.")] = 0.05
    noise: Annotated[
        Noise | None, Option("Known standard deviation of a run's loss; default: from repeated seeds.")
    ] = None
    per: Annotated[
        Literal["flops", "hours", "dollars"],
        Option("What a run costs. Hours and dollars need a column of that name (or seconds).", COST),
    ] = "flops"
    dollars_per_hour: Annotated[float | None, Range(1e-9, 1e6), Option("Price of an hour.", COST)] = None
    budget: Annotated[
        float | None, Range(1e-300, 1e40), Option("The most that further runs may cost, in that unit.", COST)
    ] = None
    highest: Annotated[Flops | None, Option("Offer no rung above this compute.", COST)] = None
    studies: Annotated[Path, Option("Directory of studies, of which one may be named.")] = Path("studies")

    def run(self) -> NextResult:
        """Fit the table and rank the runs."""
        from steepen.laws.analysis import AnalysisRequest, analyse_table, choose_reference
        from steepen.laws.ladder import read_ladders
        from steepen.laws.next_runs import choose_next, table_offers

        request = self._of_study()
        table = request.read_table(("flops", "loss"))[""]
        reference = choose_reference(read_ladders(table), self.reference)
        settings = AnalysisRequest(
            reference=reference, method="joint", noise=self.noise, level=self.level, draws=100,
            unit=table.axis.unit,
        )  # fmt: skip
        with spinner("fitting"):
            analysis, _ = analyse_table(table, settings)
            arms = self._arms(analysis)
            price, unit = self._price(table)
            offers = [
                replace(offer, cost=price(offer.flops), depth=_depth(table, offer))
                for offer in table_offers(analysis.judge, arms, highest=self.highest)
            ]
            which = 0 if self.question == "better" else 1
            verdicts = {arm: analysis.verdicts[arm] for arm in arms}
            found = choose_next(
                analysis.judge, self.question, offers, unit=unit,
                words={arm: (one.better, one.growth)[which] for arm, one in verdicts.items()},
                levels={arm: one.levels[which] for arm, one in verdicts.items()},
                budget=float("inf") if self.budget is None else self.budget,
            )  # fmt: skip
        return NextResult(found, tuple(analysis.warnings)).with_problems(table.problems)

    def _of_study(self) -> Next:
        """The request with the runs of the study, where one is named."""
        from steepen.studies.driver.journal import JOURNAL

        if not isinstance(self.table, str | Path) or ":" in str(self.table):
            return self
        name = str(self.table)
        if not any((folder / JOURNAL).is_file() for folder in (self.studies / name, Path(name))):
            return self
        from steepen.results.study import open_study

        finished = [
            row for row in open_study(name, self.studies).runs.to_rows() if row["status"] == "finished"
        ]
        if not finished:
            raise UsageError(f"the study {name} has no finished runs yet.")
        return replace(self, table=finished)

    def _arms(self, analysis: LadderAnalysis) -> list[str]:
        from steepen.errors import nearest

        known = [name for name, one in analysis.verdicts.items() if one.flops_range is not None]
        for name in self.arm:
            if name not in known:
                near = f"the nearest are {nearest(name, known)}" if known else "there are none"
                raise UsageError(f"`arm` {name!r} is not among the arms that can be judged; {near}.")
        if not known:
            raise UsageError(
                "no arm can be judged: give at least two arms whose ladders overlap, with 4 rungs of the "
                "reference and 3 of the arm."
            )
        return list(dict.fromkeys(self.arm)) or known

    def _price(self, table: Table) -> tuple[Callable[[float], float], str]:
        """The cost of a run from its compute, and its unit: by a line through the table's own costs."""
        if self.per == "flops":
            return float, table.axis.unit
        hours = next(((name, factor) for name, factor in (("hours", 1.0), ("seconds", 1 / 3600))
                      if table.has(name)), None)  # fmt: skip
        if self.per == "dollars" and table.has("dollars"):
            costs = table.numbers("dollars")
        elif hours is not None:
            costs = table.numbers(hours[0]) * hours[1]
            if self.per == "dollars":
                if self.dollars_per_hour is None:
                    raise UsageError("dollars need a column dollars, or `dollars_per_hour`.")
                costs = costs * self.dollars_per_hour
        else:
            raise UsageError(f"the table has no column {self.per} (or seconds); name it with `columns`.")
        flops = table.numbers("flops")
        good = np.isfinite(costs) & (costs > 0)
        if not good.any():
            raise UsageError(f"the column for {self.per} has no positive number.")
        x, y = np.log(flops[good]), np.log(costs[good])
        slope = 1.0 if np.ptp(x) < 1e-6 else float(np.polyfit(x, y, 1)[0])
        middle = float(y.mean() - slope * x.mean())

        def price(compute: float) -> float:
            return float(np.exp(middle + slope * np.log(compute)))

        return price, self.per


def _depth(table: Table, offer: Offer) -> int | None:
    """The depth of the arm's runs at this compute, where the table has depths."""
    if not table.has("depth") or not table.has("arm"):
        return None
    depths, flops = table.numbers("depth"), table.numbers("flops")
    same = np.array([name == offer.arm for name in table.names("arm")]) & (
        np.abs(np.log(flops / offer.flops)) < 0.01
    )
    found = {int(depth) for depth in depths[same] if np.isfinite(depth)}
    return found.pop() if len(found) == 1 else None


next_runs = function(Next)
