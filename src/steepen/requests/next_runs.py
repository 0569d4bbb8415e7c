"""`next`: the runs to make next, and whether they are worth it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from steepen.errors import UsageError
from steepen.requests.request import Request, function
from steepen.requests.tables import ReadsTable
from steepen.results.result import Result
from steepen.results.table import Column, table_of
from steepen.results.text import Block, Paragraph
from steepen.utils.codec import HelpPanel, Range, option
from steepen.utils.console import spinner
from steepen.utils.formatting import format_flops, percent
from steepen.utils.values import Flops, Level, Noise

if TYPE_CHECKING:
    from steepen.laws.next_runs import NextRun, NextRuns, Suspect
    from steepen.tables.table import Table

COST = HelpPanel("Cost")
TITLES = {
    "better": "Is the arm better in the common range?",
    "grows": "Does the gain grow with compute?",
    "by-what": "Does it grow by a larger exponent, or by a lower irreducible loss?",
}
WORDS = {
    "sweep": "re-sweep rate", "finish": "end its decay", "rung": "new rung", "seed": "another seed"
}  # fmt: skip
STYLES = {"settled": "bold green", "go on": "bold", "not worth going on": "yellow"}


def _what(run: NextRun) -> str:
    return WORDS[run.what if run.what != "run" else "rung" if run.new_rung else "seed"]


def _at(run: NextRun) -> str:
    return format_flops(run.flops) if run.depth is None else f"d{run.depth}"


@dataclass(frozen=True, eq=False, repr=False)
class NextResult(Result):
    """The next runs, ranked: `found` has them, the path they begin, and each arm's outlook."""

    row_columns: ClassVar = {
        "what": Column("make", value=_what),
        "arm": Column(),
        "at": Column(value=_at, stored=False, align="right"),
        "flops": Column(shown=False),
        "depth": Column(shown=False),
        "cost": Column("cost", format_flops),
        "gain": Column("less variance", ".1%"),
        "gain_per_cost": Column("per cost", ".2f"),
        "chance": Column("settles", ".0%"),
        "reason": Column(shown=False),
    }

    found: NextRuns
    cautions: tuple[str, ...] = ()

    @property
    def advice(self) -> str:
        """settled, go on, or not worth going on."""
        return self.found.advice

    @property
    def rows(self) -> Sequence[NextRun]:
        """One row per run, best first."""
        return self.found.ranked

    def headline(self) -> str:
        """The advice in one line."""
        return f"{TITLES[self.found.question]} {self.advice}"

    def to_dict(self) -> dict[str, Any]:
        """The advice, the outlooks, the ranking and the path."""
        return {"advice": self.advice, **asdict(self.found)}

    def blocks(self, width: int) -> Iterable[Block]:
        """The advice, the outlook of each arm, and the runs."""
        from steepen.laws.next_runs import HOPELESS

        found, unit = self.found, self.found.unit
        yield Paragraph(f" {TITLES[found.question]}", f"{self.advice}:", STYLES[self.advice])
        columns = [
            Column("arm", value=lambda one: one.arm),
            Column("now", value=lambda one: one.word),
            Column("after 1 run", ".0%", value=lambda one: one.chances[0]),
            Column("3", ".0%", value=lambda one: one.chances[1]),
            Column("10", ".0%", value=lambda one: one.chances[2]),
            Column("ever", ".0%", value=lambda one: one.reachable),
            Column("runs", ".0f", value=lambda one: one.runs_to_end),
            Column(unit, format_flops, value=lambda one: one.to_end),
        ]
        yield table_of(
            found.arms, columns, "Chance of an answer",
            f"at level {found.level:.2g}, along the cheapest path; ever: at its end; runs and {unit}: "
            "expected, to an answer or that end",
        )  # fmt: skip
        given_up = [one.arm for one in found.arms if one.advice == "not worth going on"]
        if given_up:
            yield Paragraph(
                f"Not worth going on for {', '.join(given_up)}: the runs that are offered and affordable "
                f"have less than a {percent(HOPELESS)} chance of an answer. Rungs further up may tell more."
            )
        doubts = [run.reason for run in found.ranked if run.what != "run"]
        yield from (Paragraph(f"· mistuned? {reason}") for reason in doubts)
        if self.rows and (doubts or self.advice == "go on"):
            caption = (
                f"less variance: of the open contrasts; per cost: per {unit}, relative to the best; settles: "
                "the chance of an answer right after it"
            )
            yield replace(self.table(caption), title="Runs to make, most variance removed per cost first")
        yield from (Paragraph(f"warning: {note}") for note in self.cautions[:3])


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

    reference: str | None = option("Arm that the others are judged against.")
    arm: tuple[str, ...] = option("Only this arm. Repeatable. Default: all.", ())
    question: Literal["grows", "better", "by-what"] = option(
        "Does the gain grow with compute (grows); if so, by a larger exponent or a lower irreducible loss "
        "(by-what); is the arm better in the common range (better).",
        "grows",
    )
    level: Level = option("Family-wise significance level of the question.", 0.05)
    noise: Noise | None = option("Known standard deviation of a run's loss; default: from repeated seeds.")
    per: Literal["flops", "hours", "dollars"] = COST(
        "What a run costs. Hours and dollars need a column of that name (or seconds).", "flops"
    )
    dollars_per_hour: float | None = COST("Price of an hour.", limits=Range(1e-9, 1e6))
    budget: float | None = COST(
        "The most that further runs may cost, in that unit.", limits=Range(1e-300, 1e40)
    )
    highest: Flops | None = COST("Offer no rung above this compute.")
    studies: Path = option("Directory of studies, of which one may be named.", Path("studies"))

    def run(self) -> NextResult:
        """Fit the table and rank the runs."""
        from steepen.laws.analysis import choose_reference, collect_warnings
        from steepen.laws.fits.compute_law import AnalysisRequest
        from steepen.laws.ladder import check_ladders, read_ladders
        from steepen.laws.next_runs import QUESTIONS, choose_next, table_offers
        from steepen.laws.verdict.judge import fit_ladders

        request, runs = self._own_runs()
        table = request.read_table(("flops", "loss"))[""]
        ladders = read_ladders(table)
        settings = AnalysisRequest(
            choose_reference(ladders, self.reference),
            noise=self.noise,
            level=self.level,
            unit=table.axis.unit,
        )
        with spinner("fitting"):
            given, short = check_ladders(ladders, settings.reference)
            judge = fit_ladders(given, settings)
            others = [name for name in judge.ladders if name != settings.reference]
            # The questions alone: a whole analysis also says how sure its verdicts are, which takes longer.
            asked = judge.ask([(settings.reference, name) for name in others])
            every = dict(zip(others, asked, strict=True))
            arms = self._arms([name for name, one in every.items() if one.span is not None])
            price, unit = self._price(table)
            offers = [
                replace(offer, cost=price(offer.flops))
                for offer in table_offers(judge, arms, self.highest or math.inf, _depths(table))
            ]
            which = QUESTIONS.index(self.question)
            answers = {arm: every[arm].answers(every[arm].levels)[which] for arm in arms}
            words = {arm: word for arm, word in answers.items() if word is not None}
            if not words:
                raise UsageError(
                    "by what a gain grows is asked of arms whose gain grows, and none is shown to: ask the "
                    "`question` grows first."
                )
            found = choose_next(
                judge, self.question, offers, unit=unit, words=words,
                levels={arm: every[arm].levels[which] for arm in words},
                budget=float("inf") if self.budget is None else self.budget,
                suspects=_suspects(table, runs, [settings.reference, *arms], price),
            )  # fmt: skip
            warnings = (*short, *collect_warnings(given, judge, judge.laws(), table.axis.unit))
        return NextResult(found, warnings).with_problems(table.problems)

    def _own_runs(self) -> tuple[Next, Path | None]:
        """The request with the runs of the study, where one is named, and the directory of our own runs."""
        from steepen.results.runs import Runs
        from steepen.studies.driver.journal import JOURNAL

        if isinstance(self.table, Runs):
            return self, self.table.directory
        if not isinstance(self.table, str | Path) or ":" in str(self.table):
            return self, None
        name, path = str(self.table), Path(str(self.table))
        # What is no file and has no ending of one is a study's name, or the beginning of it.
        is_file = path.exists() or name == "-" or bool(path.suffix)
        if is_file and not any((folder / JOURNAL).is_file() for folder in (self.studies / name, path)):
            return self, path
        from steepen.results.study import open_study

        runs = open_study(name, self.studies).runs
        finished = [row for row in runs.to_rows() if row["status"] == "finished"]
        if not finished:
            raise UsageError(f"the study {name} has no finished runs yet.")
        return replace(self, table=finished), runs.directory

    def _arms(self, known: list[str]) -> list[str]:
        from steepen.errors import nearest

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
        import numpy as np

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


def _depths(table: Table) -> dict[str, dict[int, float]]:
    """The compute of every whole depth from an arm's lowest to two steps above its highest.

    Of arms whose compute grows with a depth that the table has: as measured, and by lines between depths.
    """
    import numpy as np

    from steepen.laws.ladder import MERGE_TOLERANCE, ladder_names
    from steepen.laws.next_runs import RUNGS_ABOVE

    if not table.has("depth"):
        return {}
    names, flops, depths = np.array(ladder_names(table)), table.numbers("flops"), table.numbers("depth")
    found: dict[str, dict[int, float]] = {}
    for name in dict.fromkeys(names.tolist()):
        own, compute = depths[names == name], flops[names == name]
        sizes = np.unique(own)
        if len(sizes) < 2 or not (np.isfinite(sizes).all() and sizes[0] >= 1 and (sizes % 1 == 0).all()):
            continue
        spans = [(compute[own == size].min(), compute[own == size].max()) for size in sizes]
        low, high = np.log(np.array(spans).T)
        if (high - low > MERGE_TOLERANCE).any() or (np.diff(low) <= MERGE_TOLERANCE).any():
            continue
        top, x = int(sizes[-1] + RUNGS_ABOVE * np.median(np.diff(sizes))), np.log(sizes)
        every = np.arange(int(sizes[0]), top + 1)
        slope = (low[-1] - low[-2]) / (x[-1] - x[-2])
        y = np.interp(np.log(every), x, low) + slope * np.maximum(np.log(every) - x[-1], 0.0)
        found[name] = dict(zip(every.tolist(), np.exp(y).tolist(), strict=True))
    return found


def _suspects(
    table: Table, runs: Path | None, arms: Sequence[str], price: Callable[[float], float]
) -> list[Suspect]:
    """What looks mistuned among the rungs of these arms, where the table is of runs with metrics."""
    from steepen.laws.ladder import ladder_names
    from steepen.laws.next_runs import Suspect
    from steepen.runs.store import RunStore
    from steepen.studies.mistuning import mistuned_runs

    if runs is None or not runs.is_dir() or not table.has("run"):
        return []
    rows = zip(table.names("run"), ladder_names(table), table.numbers("flops").tolist(), strict=True)
    places = {run: (arm, flops) for run, arm, flops in rows}
    own = [run.record() for run in RunStore(runs).runs() if run.path.name in places]
    return [
        Suspect(arm, flops, one.sentence, len(one.rates or [one]) * price(flops), one.depth, one.rates)
        for one in mistuned_runs(runs, [record for record in own if record and record.run in places])
        for arm, flops in [places[one.run]]
        if arm in arms
    ]


next_runs = function(Next)
