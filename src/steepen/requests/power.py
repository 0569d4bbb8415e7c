"""`power`: how often a planned ladder answers right, and the cheapest ladder with a target power."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Any

from steepen.errors import UsageError
from steepen.requests.request import Request, function
from steepen.results.fit import ComputeResult
from steepen.results.panel import Axis, Panel, Series
from steepen.results.result import Result
from steepen.results.table import Column, Table, table_of
from steepen.results.text import Block, Paragraph
from steepen.utils.codec import HelpPanel, Range, option
from steepen.utils.console import spinner
from steepen.utils.formatting import format_flops, percent
from steepen.utils.values import Confidence, Flops, Level, Noise

if TYPE_CHECKING:
    from steepen.laws.next_runs import FurtherRuns, Question
    from steepen.laws.power import CheapestLadder, LadderPlan, Target
    from steepen.laws.power import Power as SimulatedPower

# Panels of --help.
TABLE = HelpPanel("Plan of a table")
LADDER = HelpPanel("Planned ladder")
LAWS = HelpPanel("Assumed laws")
TESTS = HelpPanel("Tests and search")

HIGHEST = 1.01e20  # of the paper's ladders
TARGET_TITLES: dict[Target, str] = {"growth": "growth of the gain", "exponent": "larger exponent"}


@dataclass(frozen=True)
class LadderRow:
    """A ladder, its cost and its power: the plan, or the cheapest one for a target."""

    ladder: str
    rungs: int
    seeds: int
    lowest: float
    highest: float
    cost_flops: float
    power_better: float
    power_growth: float
    power_exponent: float


@dataclass(frozen=True, eq=False, repr=False)
class PowerResult(Result):
    """Power of a planned ladder, and the cheapest ladder with a target power for each target."""

    power: SimulatedPower
    cheapest: tuple[CheapestLadder, ...] = ()
    further: FurtherRuns | None = None  # of the ladders of a table

    @property
    def rows(self) -> list[LadderRow]:
        """The plan and the cheapest ladders."""
        cheapest = [(f"cheapest for {one.target}", one.power) for one in self.cheapest]
        return [
            LadderRow(name, found.plan.rungs, found.plan.seeds, found.plan.lowest, found.plan.highest,
                      found.plan.cost, found.better, found.growth, found.exponent)
            for name, found in [("plan", self.power), *cheapest]
            if found is not None
        ]  # fmt: skip

    def headline(self) -> str:
        """The power of the two questions in one line."""
        plan = self.power.plan
        return (
            f"power at Δγ = {plan.delta_gamma:g}, {plan.rungs} rungs: {self.power.expected_better} "
            f"{self.power.better:.0%}, growth {self.power.growth:.0%}, exponent {self.power.exponent:.0%}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything as nested dicts and numbers, as `steepen power --json` prints it."""
        found = {**self.power.to_dict(), "cheapest": {one.target: one.to_dict() for one in self.cheapest}}
        if self.further is None:
            return found
        runs = [[step.offer.arm, step.offer.flops] for step in self.further.path]
        return {**found, "further_runs": runs, "further_power": self.further.power}

    def panels(self) -> list[Panel]:
        """How often the plan gives each answer."""
        answers = {**self.power.better_fractions, **self.power.growth_fractions}
        shares = {word: share for word, share in answers.items() if share > 0}
        blue = ("#2b7bba", "#6ab0ff")
        places = tuple(map(float, range(len(shares))))
        bars = Series("plan", "bars", tuple(shares.values()), places, colour=blue)
        x = Axis("fraction of simulated ladders", limits=(0.0, 1.0))
        return [Panel("Answers of the planned ladder", x, Axis("", names=tuple(shares)), (bars,))]

    def blocks(self, width: int) -> Iterable[Block]:
        """The plan, its outcomes, what could imitate the effect, and the cheapest ladders."""
        plan = self.power.plan
        yield Paragraph(
            f"{_size(plan)} × 2 arms, {format_flops(plan.lowest)} to {format_flops(plan.highest)} FLOPs"
            f" ({plan.decades:.2f} decades), noise {_noise(plan)}, lack of fit {plan.lack_of_fit:.3g},"
            f" Δγ = {plan.delta_gamma:+.3g}:"
            f" {format_flops(plan.cost)} FLOPs in total"
        )
        yield outcome_table(self.power)
        if plan.delta_gamma:
            penalty = self.power.confounding_penalty
            yield Paragraph(
                f"A mistuned recipe can imitate the effect: a loss {penalty['top rung']:.4f} too high at the"
                f" {self.power.confounding_ladder}'s top rung alone, or one that grows along its ladder"
                f" linearly to {penalty['linear']:.4f} or quadratically to {penalty['quadratic']:.4f} there,"
                " would look like the whole Δγ. Re-sweep the learning rate at the top."
            )
        yield from map(Paragraph, map(_found, self.cheapest))
        if self.further is not None:
            yield from _further(self.further)


def _noise(plan: LadderPlan) -> str:
    low, high = plan.run_noise[[0, -1]].tolist()
    return f"{low:.3g}" if math.isclose(low, high) else f"{low:.3g} to {high:.3g}"


def _further(found: FurtherRuns) -> Iterable[Block]:
    goal = percent(found.goal)
    what = "that the arm is better or worse" if found.question == "better" else "that the gain changes"
    if not found.path:
        yield Paragraph(f"The ladders have {goal} power to show {what}: no further run is needed.")
        return
    if found.power < found.goal - 1e-6:
        yield Paragraph(
            f"The {len(found.path)} cheapest further runs reach {found.power:.0%} power to show {what}, not "
            f"{goal}."
        )
        return
    counts = Counter((step.offer.arm, step.offer.flops) for step in found.path)
    columns = [
        Column("arm", value=lambda run: run[0][0]),
        Column("FLOPs", value=lambda run: format_flops(run[0][1]), align="right"),
        Column("runs", value=lambda run: run[1]),
    ]
    yield Paragraph(
        f"Cheapest further runs that would show {what} with {goal} power, "
        f"{format_flops(found.path[-1].paid)} FLOPs (`steepen next` says how sure an answer is):"
    )
    yield table_of(sorted(counts.items()), columns)


def outcome_table(power: SimulatedPower) -> Table:
    """Every answer with the fraction of simulated tables that give it, and by what a growing gain grows."""
    rows = [(_right(word, power.expected_better), share) for word, share in power.better_fractions.items()]
    for word, share in power.growth_fractions.items():
        rows.append((_right(word, power.expected_growth), share))
        if word == "grows":
            expected = "exponent" if power.expected_growth == word else ""
            rows += [
                (f"  by {_right(cause, expected)}", part) for cause, part in power.by_what_fractions.items()
            ]
    title = f"{power.draws} simulated tables, judged at level {power.plan.rule.level:.2g}"
    columns = (Column("outcome"), Column("fraction", ".3f", align="right"))
    return Table(title, ("outcome", "fraction"), tuple(rows), shown=columns)


def _right(word: str, expected: str) -> str:
    return f"{word} (correct)" if word == expected else word


def _found(cheapest: CheapestLadder) -> str:
    target, goal = TARGET_TITLES[cheapest.target], percent(cheapest.goal)
    if cheapest.plan is None or cheapest.power is None:
        return f"No ladder up to 16 rungs, 5 seeds and 8 decades reaches {goal} power to show the {target}."
    plan = cheapest.plan
    reached = cheapest.power.exponent if cheapest.target == "exponent" else cheapest.power.growth
    return (
        f"Cheapest ladder with {goal} power to show the {target}: {_size(plan)}"
        f" up to {format_flops(plan.highest)} FLOPs ({plan.decades:.2f} decades):"
        f" {format_flops(plan.cost)} FLOPs in total, simulated power {reached:.3f}"
    )


def _size(plan: LadderPlan) -> str:
    return f"{plan.rungs} rungs × {plan.seeds} seed{'s' if plan.seeds > 1 else ''}"


@dataclass(frozen=True)
class Power(Request[PowerResult]):
    """Estimate the power of a planned ladder, and find the cheapest one.

    The plan is simulated, and what `steepen fit` would answer is counted. Two targets of the search:
    growth, the gain grows with compute; exponent, it is also shown to grow by a larger exponent and not by a
    lower E, which takes far more compute. Defaults are the ladder and the Vanilla law of the paper.
    """

    examples = (
        "steepen power --delta-gamma 0.0027 --noise 1e-3",
        "steepen power --from runs.csv --reference base --arm mine",
        "steepen power --delta-gamma 0.01 --rungs 6 --span 3 --seeds 2 --no-search",
    )
    figure = tables = True

    delta_gamma: float | None = option(
        "Expected difference in exponent, e.g. 0.0027. Default: that of `table`.", limits=Range(-1, 1)
    )
    _: KW_ONLY
    table: Any = TABLE(
        "Table of runs, as `steepen fit` reads it: the plan has its laws, noise and ladders, and the "
        "cheapest further runs are listed.",
        flag="--from",
        metavar="<path>",
        python="Also a frame, a dict of columns or a list of dicts.",
    )
    where: tuple[str, ...] = TABLE("Use only these rows of it, as `steepen fit` does. Repeatable.", ())
    reference: str | None = TABLE("Arm of the table to compare with.")
    arm: str | None = TABLE("Arm of the table to plan for. Default: that of a table with two.")
    rungs: int = LADDER("Rungs of each ladder.", 8, Range(3, 1_000))
    lowest: Flops = LADDER("FLOPs of the lowest rung.", 3.25e17)
    highest: Flops | None = LADDER("FLOPs of the highest rung. Default: 1.01e20, or by `span`.")
    span: float | None = LADDER(
        "Decades from lowest to highest, instead of `highest`.", limits=Range(0.01, 40)
    )
    noise: Noise = LADDER("Standard deviation of a run's loss.", 1e-3)
    lack_of_fit: float = LADDER(
        "Standard deviation of a rung about its law, whatever its seeds.", 0.0, Range(0, 100)
    )
    seeds: int = LADDER("Seeds (runs) per rung.", 1, Range(1, 1_000))
    gamma: float = LAWS("The reference's exponent γ.", 0.1113, Range(0.001, 10))
    irreducible_loss: float = LAWS("The irreducible loss E, the same for both arms.", 1.83, Range(0, 1_000))
    constant: float = LAWS("A of the reference, for C0 = 1e18 FLOPs.", 1.5, Range(1e-6, 1e6))
    multiplier: float = LAWS("The arm's compute multiplier at the lowest rung.", 1.1, Range(1e-3, 1e3))
    level: Level = TESTS("Family-wise significance level of each question.", 0.05)
    margin: float = TESTS("Largest |Δγ|/γ that still counts as a constant gain.", 0.025, Range(0, 10))
    comparisons: int = TESTS(
        "Arms that are compared with the reference and share the level (Holm).", 1, Range(1, 10_000)
    )
    goal: Confidence = TESTS("Target power of the cheapest ladder.", 0.90)
    search: bool = TESTS("Search for the cheapest ladder.", True)
    draws: int = TESTS("Simulated pairs of ladders.", 1000, Range(1, 1_000_000))

    def check(self) -> None:
        """Reject a plan without an effect, and two ways to say where the ladder ends."""
        if self.delta_gamma is None and self.table is None:
            raise UsageError("give `delta_gamma`, or a `table` to take it from.")
        if self.span is not None and self.highest is not None:
            raise UsageError("give `highest` or `span`, not both.")

    def run(self) -> PowerResult:
        """Simulate the plan, then search."""
        from steepen.laws.power import TARGETS, LadderPlan, cheapest_ladder, simulate_power

        top = self.highest or (HIGHEST if self.span is None else self.lowest * 10**self.span)
        plan = LadderPlan(
            delta_gamma=self.delta_gamma or 0.0, rungs=self.rungs, lowest=self.lowest, highest=top,
            noise=self.noise, lack_of_fit=self.lack_of_fit, seeds=self.seeds, gamma=self.gamma,
            irreducible_loss=self.irreducible_loss, constant=self.constant, multiplier=self.multiplier,
            level=self.level, margin=self.margin, arms=self.comparisons,
        )  # fmt: skip
        further: FurtherRuns | None = None
        if self.table is not None:
            plan, further = self._plan_of_table(plan)
        with spinner("simulating ladders"):
            power = simulate_power(plan, self.draws)
            if self.table is not None:
                return PowerResult(power, further=further if self.search else None)
            targets = TARGETS if self.search and plan.delta_gamma != 0 else ()
            found = [cheapest_ladder(plan, target, self.goal, draws=self.draws) for target in targets]
        return PowerResult(power, tuple(found))

    def _plan_of_table(self, plan: LadderPlan) -> tuple[LadderPlan, FurtherRuns]:
        """The plan with the ladders, laws and noise of the table, and the runs that are still needed."""
        from steepen.laws.next_runs import runs_for_power
        from steepen.requests.fit import Fit

        found = Fit(self.table, where=self.where, reference=self.reference, method="joint", draws=100).run()
        assert isinstance(found, ComputeResult)
        arm = self.arm or next(iter(found.verdicts), "")
        if not arm or (self.arm is None and len(found.verdicts) > 1):
            raise UsageError(f"name the arm to plan for with `arm`; there are {', '.join(found.verdicts)}.")
        verdict, analysis = found[arm], found.analysis
        law, ladder = analysis.primary_fit.arms[analysis.request.reference], found.ladders[arm]
        if verdict.flops_range is None:
            raise UsageError(
                f"the ladders of '{arm}' and the reference never overlap: add runs where they do."
            )
        low, high = verdict.flops_range
        noise = analysis.seed_noise[-1][1] if analysis.seed_noise else analysis.lack_of_fit
        planned = replace(
            plan, delta_gamma=verdict.delta_gamma if self.delta_gamma is None else self.delta_gamma,
            rungs=max(4, len(ladder.flops)), lowest=low, highest=high, noise=noise or plan.noise,
            noise_at=tuple(one for one in analysis.seed_noise if one[1] > 0),
            lack_of_fit=analysis.lack_of_fit if analysis.seed_noise else 0.0,
            seeds=int(statistics.median(ladder.seeds.tolist())), gamma=law.gamma.value,
            irreducible_loss=law.e.value,
            constant=math.exp(law.log_a.value) * (1e18 / law.c0) ** -law.gamma.value,
            arms=len(found.verdicts),
        )  # fmt: skip
        # The gain is the mean over the range, which the plan has at its lowest rung.
        steeper = planned.delta_gamma / (planned.gamma + planned.delta_gamma)
        planned = replace(planned, multiplier=verdict.gain.value * (high / low) ** (-steeper / 2))
        question: Question = "better" if verdict.better == "not resolved" else "grows"
        effect = abs(math.log(verdict.gain.value)) if question == "better" else abs(planned.delta_gamma)
        return planned, runs_for_power(analysis.judge, arm, question, effect, self.goal, planned.rule.level)


power = function(Power)
