"""Ladders that are run batch by batch until their question is decided, given up, or the budget is spent."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from steepen.errors import UsageError
from steepen.launch.cost_estimate import Budget
from steepen.laws.next_runs import MAX_SEEDS, Offer
from steepen.laws.stopping import Look, Stopping, StoppingRule
from steepen.results.table import Table
from steepen.runs.record import RunRecord
from steepen.studies.answer import Draft, Work
from steepen.studies.cells import Plan, measure, records_of, table
from steepen.studies.context import StudyContext
from steepen.studies.ladders.ladder_runs import LadderSpec, MeasuredLadder, drop_impossible_depths, to_ladders
from steepen.utils.formatting import format_flops

START_RUNGS, START_SEEDS = 4, 2  # of every ladder, before the first look


@dataclass
class _Runs:
    """The runs of some ladders, as they are made."""

    context: StudyContext
    ladders: Sequence[LadderSpec]
    seeds: Sequence[int]
    limit: Budget
    done: dict[str, dict[int, list[RunRecord]]]  # by label and depth

    def make(self, wanted: Sequence[tuple[LadderSpec, int]], note: dict[str, Any]) -> Work[None]:
        """Make runs of ladders at depths, each with the rung's next seed; the journal has the note first."""
        plans: list[Plan] = []
        count: Counter[tuple[str, int]] = Counter()
        for ladder, depth in wanted:
            seed = self._seed(len(self.done[ladder.label].get(depth, ())) + count[ladder.label, depth])
            count[ladder.label, depth] += 1
            run = ladder.run(self.context, depth)
            plans.append((self.context.spec(run, seed=seed, optimizer=ladder.optimizer), {}))
        cells = yield from measure(self.context, plans, required=True, note=note)
        for (ladder, depth), record in zip(wanted, records_of(cells), strict=True):
            self.done[ladder.label].setdefault(depth, []).append(record)

    def _seed(self, number: int) -> int:
        """The seed of a rung's n-th run: those that were given, then the next numbers."""
        if number < len(self.seeds):
            return self.seeds[number]
        return max(self.seeds) + 1 + number - len(self.seeds)

    @property
    def measured(self) -> list[MeasuredLadder]:
        """The ladders so far."""
        return [MeasuredLadder(one, dict(sorted(self.done[one.label].items()))) for one in self.ladders]

    @property
    def records(self) -> list[RunRecord]:
        """The records so far."""
        return [record for own in self.done.values() for runs in own.values() for record in runs]

    @property
    def spent(self) -> float:
        """The cost of the runs so far."""
        by_time = self.limit.seconds is not None
        return sum(record.seconds_total if by_time else record.flops for record in self.records)

    def offers(self) -> list[Offer]:
        """The runs that could be made next: of every ladder, at its depths and those between them."""
        found: list[Offer] = []
        for ladder in self.ladders:
            every = range(min(ladder.depths), max(ladder.depths) + 1)
            for depth in drop_impossible_depths(replace(ladder, depths=tuple(every)), self.context)[0].depths:
                have = self.done[ladder.label].get(depth, [])
                if len(have) >= MAX_SEEDS:
                    continue
                flops = have[0].flops if have else ladder.expected_flops(self.context, depth)
                found.append(
                    Offer(ladder.label, flops, self._cost(flops), MAX_SEEDS - len(have), depth, not have)
                )
        return found

    def _cost(self, flops: float) -> float:
        """What a run would cost of the budget: FLOPs, or seconds by a line through those that were made."""
        if self.limit.seconds is None:
            return flops
        x = np.log([record.flops for record in self.records])
        y = np.log([max(record.seconds_total, 1e-3) for record in self.records])
        slope = float(np.polyfit(x, y, 1)[0]) if np.ptp(x) > 0 else 1.0
        return math.exp(float(y.mean()) + slope * (math.log(flops) - float(x.mean())))


def run_until_decided(
    draft: Draft,
    context: StudyContext,
    ladders: Sequence[LadderSpec],
    seeds: Sequence[int],
    rule: StoppingRule,
    limit: Budget,
    noise: float | None = None,
) -> Work[tuple[list[MeasuredLadder], Stopping]]:
    """Make the lowest rungs, then batch after batch until every arm is decided, given up or out of budget.

    Without a limit the budget is the cost of the same ladders with every rung and seed. Which runs follow
    depends on the records alone, so that a study that was killed goes on as it would have.
    """
    fixed = len(seeds) * sum(one.expected_flops(context, depth) for one in ladders for depth in one.depths)
    if limit.seconds is None:
        most, what = (fixed, "the whole ladder") if limit.flops is None else (limit.flops, "the `budget`")
        rule = replace(rule, budget=most)
        lowest = [(one, depth) for one in ladders for depth in sorted(one.depths)[:START_RUNGS]]
        first = START_SEEDS * sum(one.expected_flops(context, depth) for one, depth in lowest)
        if first > 1.001 * most:
            raise UsageError(
                f"the first batch of a ladder that runs `until` decided, {START_RUNGS} rungs with "
                f"{START_SEEDS} seeds each, costs {format_flops(first)} FLOPs, {what} {format_flops(most)}; "
                "give more `rungs` or `seeds`, or a larger `budget`."
            )
    runs = _Runs(context, ladders, seeds, limit, {one.label: {} for one in ladders})
    # Raises if the data are too few for the largest run that may be asked for.
    every = [one.run(context, depth) for one in ladders for depth in one.depths]
    context.spec(max(every, key=lambda run: run.tokens))
    start = [
        (one, depth)
        for one in ladders
        for depth in sorted(one.depths)[:START_RUNGS]
        for _ in range(START_SEEDS)
    ]
    asked = asdict(rule) | {"budget": rule.budget if math.isfinite(rule.budget) else None}
    plan = {**asked, "unit": "FLOPs" if limit.seconds is None else "seconds", "start": len(start)}
    yield from runs.make(start, {"plan": plan})
    by_label = {one.label: one for one in ladders}
    stopping = Stopping(rule, noise)
    while True:
        look = stopping.look(to_ladders(runs.measured), runs.offers(), runs.spent)
        if not look.batch:
            break
        batch = [(by_label[offer.arm], offer.depth or 0) for offer in look.batch]
        yield from runs.make(batch, {"look": look.to_dict()})
    draft.findings += _findings(stopping, sum(record.flops for record in runs.records) / fixed)
    draft.tables.append(_looks_table(stopping))
    draft.values["looks"] = [look.to_dict() for look in stopping.looks]
    return runs.measured, stopping


def _looks_table(stopping: Stopping) -> Table:
    """Every look at every arm."""
    rows = [
        {
            "look": look.number, "runs": look.runs, "arm": one.arm, "information": one.fraction,
            "level": one.nominal, "p": one.p_fixed, "answer": one.word,
            "p, looks counted": one.p_value if one.closed else None, "stopped": one.closed or "",
        }
        for look in stopping.looks for one in look.arms
    ]  # fmt: skip
    caption = (
        "Information is the part of what was planned for the effect asked; a look answers where p is below "
        "its level. Levels follow O'Brien and Fleming's spending; the p-value that counts looks orders "
        "results by stage."
    )
    return table("Looks", rows, caption)


def _findings(stopping: Stopping, part: float) -> list[str]:
    """A sentence for every arm: its answer, when it came, and what it cost of the fixed ladder."""
    last: Look = stopping.looks[-1]
    rule = stopping.rule
    found: list[str] = []
    for one in stopping.closed.values():
        look = next(look for look in stopping.looks if one in look.arms)
        answer = f"{one.word} (p = {one.p_value:.2g}, looks counted)"
        if one.closed != "decided":
            why = {
                "no effect of this size": f"an effect of {rule.effect:g}× would have shown by now",
                "out of reach": "the runs that the budget allows would not settle it",
                "budget": "the budget is spent", "no further runs": "no further run can be made",
            }[str(one.closed)]  # fmt: skip
            answer = f"{one.word}; stopped because {why}"
        found.append(f"{one.arm}, {rule.question}: {answer} at look {look.number}, after {look.runs} runs.")
    return [*found, f"{last.runs} runs, {part:.0%} of the FLOPs of the fixed ladder."]
