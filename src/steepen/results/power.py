"""What `power` returns: how often a planned ladder answers right, and the cheapest ladders that do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from steepen.results.panel import Axis, Panel, Series
from steepen.results.result import Result
from steepen.results.table import Column, Table, columns_of, table_of
from steepen.results.text import Block, Paragraph
from steepen.utils.formatting import format_flops, percent

if TYPE_CHECKING:
    from steepen.laws.next_runs import FurtherRuns
    from steepen.laws.power import CheapestLadder, LadderPlan, Power, Target

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
    power_better: float | None
    power_growth: float | None
    power_exponent: float | None


@dataclass(frozen=True)
class OutcomeRow:
    """How often one answer is given."""

    outcome: str
    fraction: Annotated[float, Column(format=".3f", align="right")]


@dataclass(frozen=True, eq=False, repr=False)
class PowerResult(Result):
    """Power of a planned ladder, and the cheapest ladder with a target power for each target."""

    power: Power
    cheapest: tuple[CheapestLadder, ...] = ()
    further: FurtherRuns | None = None  # of the ladders of a table

    @property
    def rows(self) -> list[LadderRow]:
        """The plan and the cheapest ladders."""
        found = [(f"cheapest for {one.target}", one.plan, one.power) for one in self.cheapest]
        return [
            LadderRow(
                name, plan.rungs, plan.seeds, plan.lowest, plan.highest, plan.cost,
                power.better if power else None, power.growth if power else None,
                power.exponent if power else None,
            )
            for name, plan, power in [("plan", self.power.plan, self.power), *found]
            if plan is not None
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
            f" ({plan.decades:.2f} decades), noise {plan.noise:g}, lack of fit {plan.lack_of_fit:g},"
            f" Δγ = {plan.delta_gamma:+g}:"
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
        yield from (Paragraph(_found(one)) for one in self.cheapest)
        if self.further is not None:
            yield from _further(self.further)


def _further(found: FurtherRuns) -> Iterable[Block]:
    """The further runs that would settle the question."""
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


def outcome_table(power: Power) -> Table:
    """Every answer with the fraction of simulated tables that give it, and by what a growing gain grows."""
    rows = [OutcomeRow(_right(word, power.expected_better), f) for word, f in power.better_fractions.items()]
    for word, fraction in power.growth_fractions.items():
        rows.append(OutcomeRow(_right(word, power.expected_growth), fraction))
        if word == "grows":
            rows += [
                OutcomeRow(f"  by {_right(cause, 'exponent' if power.expected_growth == word else '')}", part)
                for cause, part in power.by_what_fractions.items()
            ]
    title = f"{power.draws} simulated tables, judged at level {power.plan.rule.level:.2g}"
    return table_of(rows, list(columns_of(OutcomeRow).values()), title)


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
