"""Run ladders of arms and fit their laws: shared by every study that judges ladders."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal

import numpy as np

from steepen.errors import UsageError
from steepen.evaluation.scored_runs import ScoreSeries, scored_run
from steepen.laws.analysis import AnalysisRequest, LadderAnalysis, analyse
from steepen.laws.ladder import Ladder, group_rungs, read_ladders
from steepen.model.arm import Arm
from steepen.optim.config import OptimizerConfig
from steepen.recipe.flops import mean_flops_per_token
from steepen.recipe.recipe import PlannedRun, Recipe
from steepen.runs.record import RunRecord
from steepen.studies.answer import Work
from steepen.studies.cells import Plan, measure, records_of
from steepen.studies.context import StudyContext
from steepen.tables.table import MIN_ARM_RUNGS, MIN_REFERENCE_RUNGS, table_from
from steepen.utils.rows import Rows

Measure = Literal["flops", "seconds"]  # what ladders are compared by
DRAWS = 2000  # of the intervals of interpolated multipliers


@dataclass(frozen=True)
class LadderSpec:
    """One ladder of a study: an arm under a recipe, at some depths.

    `variant` tells it from other ladders of the same arm: "adamw", "vanilla recipe".
    """

    arm: Arm
    recipe: Recipe
    depths: tuple[int, ...]
    optimizer: OptimizerConfig | None = None  # None: the context's
    variant: str = ""

    @property
    def label(self) -> str:
        """The arm's name, with the variant in brackets."""
        return f"{self.arm.name} ({self.variant})" if self.variant else self.arm.name

    def run(self, context: StudyContext, depth: int) -> PlannedRun:
        """Its run at a depth, one of its own or another; raises UsageError where the arm does not exist."""
        return self.recipe.at(self.arm, depth, context.size_rule)

    def expected_flops(self, context: StudyContext, depth: int) -> float:
        """FLOPs of that run; of random passes, their mean."""
        run = self.run(context, depth)
        return mean_flops_per_token(self.arm, run.shape, run.schedule).total * run.tokens


@dataclass(frozen=True)
class MeasuredLadder:
    """The finished runs of one ladder, by depth; one record per seed."""

    spec: LadderSpec
    runs: dict[int, list[RunRecord]]

    def costs(self, by: Measure) -> list[float]:
        """The cost of every rung: its seeds' mean, as random passes make them differ."""
        return [fmean(cost_of(record, by) for record in records) for records in self.runs.values()]

    @property
    def depths_of_equal_time(self) -> bool:
        """Whether two depths took the same time, within the tolerance that makes runs seeds of one rung."""
        return len(group_rungs(np.array(self.costs("seconds")))) < len(self.runs)

    @property
    def curve(self) -> dict[str, Any]:
        """The fields of `Series` that give the ladder its colour and label."""
        return {"arm": self.spec.arm.name, "variant": self.spec.variant}

    @property
    def records(self) -> list[RunRecord]:
        """The records of all rungs and seeds."""
        return [record for records in self.runs.values() for record in records]

    @property
    def scores(self) -> ScoreSeries:
        """The scores of its runs, in order of compute."""
        runs = sorted(map(scored_run, self.records), key=lambda run: run.flops)
        return ScoreSeries(self.spec.label, self.spec.arm.name, self.spec.variant, "", Rows(runs))


def cost_of(record: RunRecord, by: Measure) -> float:
    """FLOPs of a run, or its seconds of training."""
    return record.flops if by == "flops" else record.seconds_training


def ladder_spec(context: StudyContext, arm: Arm, depths: Sequence[int] = ()) -> LadderSpec:
    """An arm's ladder under its own recipe, at the given depths or the preset's."""
    return LadderSpec(arm, context.recipe(arm), tuple(depths or context.preset.depths(arm)))


def drop_impossible_depths(ladder: LadderSpec, context: StudyContext) -> tuple[LadderSpec, list[str]]:
    """Drop depths at which the arm's allocation is not possible; also returns a warning that names them."""
    possible: list[int] = []
    for depth in ladder.depths:
        with contextlib.suppress(UsageError):
            ladder.run(context, depth)
            possible.append(depth)
    words = ", ".join(f"d{depth}" for depth in ladder.depths if depth not in possible)
    warning = f"{ladder.label} does not exist at {words}: it is measured on the other rungs"
    return replace(ladder, depths=tuple(possible)), [warning] if words else []


def run_ladders(
    context: StudyContext, ladders: Sequence[LadderSpec], seeds: Sequence[int] | None = None
) -> Work[list[MeasuredLadder]]:
    """Run every rung and seed of some ladders."""
    runs = [(one, depth, one.run(context, depth)) for one in ladders for depth in one.depths]
    # Raises if the data are too few for the largest run, before anything is trained.
    context.spec(max((run for _, _, run in runs), key=lambda run: run.tokens))
    # Longest first: with few workers no single large run is left for the end.
    runs.sort(key=lambda planned: planned[2].flops.total, reverse=True)
    plans: list[Plan] = [
        (context.spec(run, seed=seed, optimizer=one.optimizer), {"ladder": one.label, "depth": depth})
        for one, depth, run in runs
        for seed in seeds or context.preset.seeds
    ]
    cells = yield from measure(context, plans, required=True)
    return [
        MeasuredLadder(
            one, {depth: records_of(cells.where(ladder=one.label, depth=depth)) for depth in one.depths}
        )
        for one in ladders
    ]


def to_ladders(measured: Sequence[MeasuredLadder], by: Measure = "flops") -> dict[str, Ladder]:
    """Measured ladders as `laws.ladder.Ladder`, by label."""
    rows = [
        (one.spec.label, cost, record.validation_loss, record.spec.seed, record.trunk or record.run)
        for one in measured
        for cost, records in zip(one.costs(by), one.runs.values(), strict=True)
        for record in records
    ]
    columns = dict(zip(["arm", "flops", "loss", "seed", "trunk"], zip(*rows, strict=True), strict=True))
    ladders = read_ladders(table_from(columns, "the study's runs"))
    unit = "FLOPs" if by == "flops" else by
    return {
        name: replace(one, row_labels=tuple(f"{name} at {x:.3g} {unit}" for x in one.flops))
        for name, one in ladders.items()
    }


def repeated_data_warnings(measured: Sequence[MeasuredLadder]) -> list[str]:
    """A warning where some runs saw their data more than once."""
    epochs = max(record.spec.data.epochs for one in measured for record in one.records)
    if epochs == 1:
        return []
    return [f"some runs repeat their data up to {epochs} times: this is not the fresh-data regime"]


def ladders_with_enough_rungs(
    context: StudyContext, ladders: Sequence[LadderSpec], reference: str
) -> tuple[list[LadderSpec], list[str]]:
    """The ladders at the depths where they exist, without those too short for a law; and warnings of both.

    A reference that is too short is rejected.
    """
    possible: list[LadderSpec] = []
    warnings: list[str] = []
    for requested in ladders:
        ladder, lost = drop_impossible_depths(requested, context)
        warnings += lost
        minimum = MIN_REFERENCE_RUNGS if ladder.label == reference else MIN_ARM_RUNGS
        if len(ladder.depths) >= minimum:
            possible.append(ladder)
        elif ladder.label == reference:
            raise UsageError(
                f"the reference {reference} has {len(ladder.depths)} rungs and a law needs at least "
                f"{minimum}; give more with `rungs`."
            )
        else:
            warnings.append(
                f"{ladder.label} is left out: {len(ladder.depths)} rungs, and a law needs {minimum}"
            )
    if len(possible) < 2:
        why = f" ({'; '.join(warnings)})" if warnings else ""
        raise UsageError(
            f"a ladder is judged against a reference: give at least one more arm with `arms`{why}."
        )
    return possible, warnings


def judge_ladders(
    context: StudyContext,
    measured: Sequence[MeasuredLadder],
    reference: str,
    by: Measure = "flops",
    hold_out: dict[str, Ladder] | None = None,
    noise: float | None = None,
    c0: float | None = None,
    lr_regret: float | None = None,
) -> LadderAnalysis:
    """Fit and judge ladders by the context's methods; by the joint one alone where the paper's fails.

    `c0` is in FLOPs, so it is not used for ladders by seconds.
    """
    ladders = to_ladders(measured, by)
    unit = "FLOPs" if by == "flops" else by
    request = AnalysisRequest(
        reference=reference, noise=noise, unit=unit, c0=c0 if by == "flops" else None, lr_regret=lr_regret,
        method=context.law_method, draws=context.draws or DRAWS,
    )  # fmt: skip
    return analyse(ladders, request, hold_out)
