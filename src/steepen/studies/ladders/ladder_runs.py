"""Ladders: which runs they are, and what their laws say. Shared by every study that judges ladders."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from steepen.errors import UsageError
from steepen.laws.analysis import AnalysisRequest, LadderAnalysis, analyse
from steepen.laws.ladder import Ladder, read_ladders
from steepen.laws.table import MIN_ARM_RUNGS, MIN_REFERENCE_RUNGS, table_from
from steepen.model.arm import Arm
from steepen.optim.config import OptimizerConfig
from steepen.recipe.recipe import Recipe
from steepen.runs.record import RunRecord
from steepen.runs.spec import RunSpec
from steepen.studies.context import StudyContext, require_all_finished

BOOTSTRAP_DRAWS = 2000  # of the bootstraps behind a verdict

Runs = Generator[Sequence[RunSpec], Sequence[RunRecord | None], Any]


@dataclass(frozen=True)
class LadderSpec:
    """One ladder of a study: an arm under a recipe, at some depths. `label` tells it from its siblings."""

    label: str
    arm: Arm
    recipe: Recipe
    depths: tuple[int, ...]
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


@dataclass(frozen=True)
class MeasuredLadder:
    """A ladder's finished runs: by depth, all seeds."""

    spec: LadderSpec
    runs: dict[int, list[RunRecord]]

    def columns(self, by: str) -> dict[str, list[Any]]:
        """Rows for a table of ladders; a rung's compute is its seeds' mean (random passes differ)."""
        rows: dict[str, list[Any]] = {"arm": [], "flops": [], "loss": [], "seed": []}
        for records in self.runs.values():
            cost = fmean(cost_of(record, by) for record in records)
            for record in records:
                rows["arm"].append(self.spec.label)
                rows["flops"].append(cost)
                rows["loss"].append(record.validation_loss)
                rows["seed"].append(record.spec.seed)
        return rows

    @property
    def records(self) -> list[RunRecord]:
        """All of them."""
        return [record for records in self.runs.values() for record in records]


def cost_of(record: RunRecord, by: str) -> float:
    """What a run cost: FLOPs, or seconds of training."""
    return record.flops if by == "flops" else record.seconds_training


def ladder_spec(
    context: StudyContext, arm: Arm, depths: Sequence[int] | None = None, label: str = ""
) -> LadderSpec:
    """An arm's ladder under its own recipe."""
    return LadderSpec(
        label or arm.name, arm, context.recipe(arm), tuple(depths or context.preset.depths(arm))
    )


def drop_impossible_depths(entry: LadderSpec, context: StudyContext) -> tuple[LadderSpec, list[str]]:
    """The entry without depths at which its shape does not exist, and a warning where there were any."""
    kept: list[int] = []
    for depth in entry.depths:
        try:
            entry.recipe.at(entry.arm, depth, context.size_rule)
        except UsageError:
            continue
        kept.append(depth)
    lost = [depth for depth in entry.depths if depth not in kept]
    words = ", ".join(f"d{depth}" for depth in lost)
    warning = [f"{entry.label} does not exist at {words}: it is measured on the other rungs"] if lost else []
    return replace(entry, depths=tuple(kept)), warning


def run_ladders(
    context: StudyContext, entries: Sequence[LadderSpec], seeds: Sequence[int] | None = None
) -> Runs:
    """Run ladders, longest runs first across all of them; returns a list of `Measured`."""
    seeds = seeds or context.preset.seeds
    keys = [(i, depth, seed) for i, entry in enumerate(entries) for depth in entry.depths for seed in seeds]
    rungs = {
        (i, depth): entry.recipe.at(entry.arm, depth, context.size_rule)
        for i, entry in enumerate(entries)
        for depth in entry.depths
    }
    context.spec(
        max(rungs.values(), key=lambda rung: rung.tokens)
    )  # if data fall short, say it of the longest
    specs = {
        (i, depth, seed): context.spec(rungs[i, depth], seed=seed, optimizer=entries[i].optimizer)
        for i, depth, seed in keys
    }
    # Longest first: with few workers the batch then ends together instead of waiting for one last large run.
    order = sorted(keys, key=lambda key: rungs[key[:2]].flops.total, reverse=True)
    batch = [specs[key] for key in order]
    records = require_all_finished(batch, (yield batch))
    found = dict(zip(order, records, strict=True))
    return [
        MeasuredLadder(entry, {depth: [found[i, depth, seed] for seed in seeds] for depth in entry.depths})
        for i, entry in enumerate(entries)
    ]


def to_ladders(measured: Sequence[MeasuredLadder], by: str = "flops") -> dict[str, Ladder]:
    """Ladders for the laws, by label."""
    parts = [one.columns(by) for one in measured]
    columns: dict[str, Sequence[Any]] = {
        name: [value for part in parts for value in part[name]] for name in ("arm", "flops", "loss", "seed")
    }
    return read_ladders(table_from(columns, "the study's runs"))


def repeated_data_warnings(measured: Sequence[MeasuredLadder]) -> list[str]:
    """A warning where some runs saw their data more than once."""
    most = max(record.spec.data.epochs for one in measured for record in one.records)
    if most == 1:
        return []
    return [f"some runs repeat their data up to {most} times: this is not the fresh-data regime"]


def check_ladders(
    context: StudyContext, entries: Sequence[LadderSpec], reference: str
) -> tuple[list[LadderSpec], list[str]]:
    """Ladders on the rungs at which they exist; one too short for a law is left out. Warnings tell of both.

    The reference is needed.
    """
    kept: list[LadderSpec] = []
    warnings: list[str] = []
    for asked in entries:
        entry, lost = drop_impossible_depths(asked, context)
        warnings += lost
        least = MIN_REFERENCE_RUNGS if entry.label == reference else MIN_ARM_RUNGS
        if len(entry.depths) >= least:
            kept.append(entry)
        elif entry.label == reference:
            raise UsageError(
                f"the reference {reference} has {len(entry.depths)} rungs and a law needs at least {least}; "
                "give more with --rungs."
            )
        else:
            warnings.append(f"{entry.label} is left out: {len(entry.depths)} rungs, and a law needs {least}")
    if len(kept) < 2:
        why = f" ({'; '.join(warnings)})" if warnings else ""
        raise UsageError(
            f"a ladder is judged against a reference: give at least one more arm with --arms{why}."
        )
    return kept, warnings


@dataclass(frozen=True)
class JudgedLadders:
    """The laws' report on ladders, the ladders, and what to know about the fit."""

    analysis: LadderAnalysis
    ladders: dict[str, Ladder]
    notes: tuple[str, ...] = ()


def judge_ladders(
    measured: Sequence[MeasuredLadder],
    reference: str,
    by: str = "flops",
    hold_out: dict[str, Ladder] | None = None,
    noise: float | None = None,
) -> JudgedLadders:
    """Fit and judge ladders, jointly and the paper's way; jointly alone where the latter does not exist."""
    ladders = to_ladders(measured, by)
    # Per second only the table and the curves are shown: fewer draws will do.
    draws = BOOTSTRAP_DRAWS if by == "flops" else max(100, BOOTSTRAP_DRAWS // 10)
    unit = "FLOPs" if by == "flops" else by
    request = AnalysisRequest(reference=reference, noise=noise, draws=draws, unit=unit)
    try:
        return JudgedLadders(analyse(ladders, request, hold_out), ladders)
    except UsageError as problem:
        report = analyse(ladders, replace(request, method="joint"), hold_out)
        return JudgedLadders(
            report, ladders, (f"only the joint fit is given, as the paper's way failed: {problem}",)
        )
