"""The authors' published measurements as records of runs that studies ask for.

A study yields run specs and receives records. Here the record of a spec carries the loss (and FLOPs, seconds
and scores) that the authors measured for that arm, size and setting, so a study's own analysis and figures
work on their measurements. A run that they did not publish is None, as if it had diverged.
"""

from __future__ import annotations

import csv
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from steepen.errors import UsageError
from steepen.evaluation.core.suite import CORE22
from steepen.model.arms import find_arm
from steepen.recipe.hyperparameters import Hyperparameters, full_name
from steepen.runs.record import RunRecord
from steepen.runs.spec import RunSpec
from steepen.studies.answer import Answer, Study
from steepen.studies.synthetic import fabricate_record, growth_fraction_of

Row = Mapping[str, str]
TOLERANCE = 0.02  # of tokens: budgets are equal, whole steps are not
H100_SECONDS = 3600.0

# Names of the authors' tables that are not ours, besides those `find_arm` knows.
NAMES = {
    "loop-grow-random": "random-loop-grow",
    "deep-vanilla-width-only": "width-only-deep-vanilla",
    "untied-2-width-only": "width-only-untied-2",
    "operator-1-1c2": "operator-1-1-c-2",
    "loop-2-no-coda-injection-2c3": "loop-2-nci-2-c-3",
}


def our_name(arm: str) -> str | None:
    """Our name of an arm of the authors' tables; None for a series that differs by its recipe alone."""
    try:
        return find_arm(NAMES.get(arm, arm)).name
    except UsageError:
        return None


@dataclass(frozen=True)
class Measured:
    """What was published for one run."""

    loss: float
    flops: float | None = None  # None: those of the spec
    seconds: float | None = None
    evaluation: dict[str, Any] = field(default_factory=dict[str, Any])


Finder = Callable[[RunSpec], Measured | None]


class Tables:
    """The authors' tables as rows of strings."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @functools.cache  # noqa: B019 (one object for one directory)
    def rows(self, name: str) -> list[Row]:
        """The rows of a table."""
        with (self.directory / f"{name}.csv").open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    def of(self, name: str, **values: object) -> list[Row]:
        """The rows whose columns have these values; numbers are compared as numbers."""
        return [row for row in self.rows(name) if all(_same(row[k], v) for k, v in values.items())]


def _same(text: str, value: object) -> bool:
    if isinstance(value, int | float):
        return text != "" and math.isclose(float(text), value, rel_tol=1e-9)
    return text == value


@dataclass
class Replay:
    """Drives studies with published measurements and keeps the records it made."""

    records: dict[str, RunRecord] = field(default_factory=dict[str, RunRecord])
    missing: int = 0

    def answer(self, study: Study, find: Finder) -> Answer:
        """Drive a study to its answer."""
        try:
            specs = list(next(study))
            while True:
                specs = list(study.send([self.record(spec, find) for spec in specs]))
        except StopIteration as end:
            return end.value

    def record(self, spec: RunSpec, find: Finder) -> RunRecord | None:
        """The record of a spec; None where nothing was published for it."""
        found = find(spec)
        if found is None:
            self.missing += 1
            return None
        record = fabricate_record(spec, found.loss)
        flops = record.flops if found.flops is None else found.flops
        record = replace(
            record,
            flops=flops,
            seconds_training=record.seconds_training if found.seconds is None else found.seconds,
            hardware={"device": "cuda", "name": "8 × H100", "host": "published"},
            evaluation=found.evaluation,
        )
        known = self.records.get(spec.hash)
        if known is not None and known.evaluation and not found.evaluation:
            # Another table has this run, or a repetition of it: the one with scores is kept.
            return known if known.validation_loss == found.loss else record
        self.records[spec.hash] = record
        return record


# Scores of a ladder's runs, as `steepen eval` writes them into records.


def core_scores(tables: Tables, corpus: str, arm: str, depth: int) -> dict[str, Any] | None:
    """CORE scores of a run. Tasks have centred accuracies for Vanilla and Untied Grow only."""
    rows = tables.of("core_scores", corpus=corpus, arm=arm, depth=depth)
    if not rows:
        return None
    row = rows[0]
    tasks: dict[str, dict[str, Any]] = {}
    for task in tables.of("core_task_scores", corpus=corpus, arm=arm, depth=depth):
        centered = float(task["centered_accuracy"]) if task["centered_accuracy"] else None
        tasks[task["task"]] = {"nll": float(task["answer_nll"]), "centered": centered}
    spread = row["core_accuracy_std"]
    return {
        "convention": "authors",
        "core22": float(row["core_accuracy"]),
        "core22_seed_sd": float(spread) if spread else None,
        "core17": float(row["core17_accuracy"]) if row["core17_accuracy"] else None,
        "nll22": float(row["answer_nll"]),
        "tasks": {label: tasks[label] for label in CORE22 if label in tasks},
    }


def scores(tables: Tables, corpus: str, arm: str, depth: int) -> dict[str, Any]:
    """CORE, KL effective depth and passes at test time of a run, where they were published."""
    found: dict[str, Any] = {}
    core = core_scores(tables, corpus, arm, depth)
    if core is not None:
        found["core"] = core
    if corpus == "fineweb":
        deep = tables.of("effective_depth", arm=arm, depth=depth)
        if deep:
            found["kl_depth"] = {"depth": float(deep[0]["effective_depth"])}
        passes = tables.of("passes_at_test_time", arm=arm, depth=depth)
        if passes:
            trained = int(passes[0]["trained_passes"])
            losses = {int(row["eval_passes"]): float(row["val_loss"]) for row in passes}
            found["test_time_passes"] = {
                "trained": trained,
                "trained_loss": losses[trained],
                "passes": sorted(losses),
                "losses": [losses[k] for k in sorted(losses)],
                "differences": [losses[k] - losses[trained] for k in sorted(losses)],
            }
    return found


# Finders: which published measurement belongs to a spec.


def ladder_runs(tables: Tables, table: str, corpus: str = "fineweb") -> Finder:
    """Ladder runs by arm and depth, with the times and scores that were published for them."""
    found = {(our_name(row["arm"]), int(row["depth"])): row for row in tables.rows(table)}
    times = {(row["arm"], row["depth"]): row for row in tables.rows("timing")}

    def find(spec: RunSpec) -> Measured | None:
        row = found.get((spec.arm.name, spec.shape.depth))
        if row is None:
            return None
        timed = times.get((row["arm"], row["depth"]))
        # Scores are of the reported ladders, and of the random passes; not of other recipes of an arm.
        scored = table in ("fineweb_ladders", "fineweb_edu_ladders") or row["arm"] == "loop-grow-random"
        evaluation = scores(tables, corpus, row["arm"], spec.shape.depth) if scored else {}
        seconds = None if timed is None or not scored else float(timed["training_hours"]) * H100_SECONDS
        return Measured(float(row["val_loss"]), float(row["compute_flops"]), seconds, evaluation)

    return find


def first_of(*finders: Finder) -> Finder:
    """The first finder that knows a spec."""

    def find(spec: RunSpec) -> Measured | None:
        for one in finders:
            found = one(spec)
            if found is not None:
                return found
        return None

    return find


def by_key(rows: Iterable[Row], key: Callable[[Row], Any], of: Callable[[RunSpec], Any]) -> Finder:
    """Runs whose key in a table equals that of the spec."""
    found = {key(row): row for row in rows}

    def find(spec: RunSpec) -> Measured | None:
        row = found.get(of(spec))
        return None if row is None else Measured(float(row["val_loss"]))

    return find


def by_tokens(
    rows: Sequence[Row],
    key: Callable[[Row], Any],
    tokens: Callable[[Row], float],
    of: Callable[[RunSpec], Any],
) -> Finder:
    """Runs of a key with the nearest number of tokens, if it is within TOLERANCE."""
    groups: dict[Any, list[tuple[float, Row]]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append((tokens(row), row))

    def find(spec: RunSpec) -> Measured | None:
        own = groups.get(of(spec), [])
        if not own:
            return None
        off, row = min(((abs(math.log(count / spec.tokens)), row) for count, row in own), key=lambda p: p[0])
        return Measured(float(row["val_loss"])) if off < TOLERANCE else None

    return find


def arm_and_depth(spec: RunSpec) -> tuple[str, int]:
    """Key of a spec: arm and depth."""
    return spec.arm.name, spec.shape.depth


def passes_and_depth(spec: RunSpec) -> tuple[int, int]:
    """Key of a spec: passes and depth."""
    return spec.schedule.final, spec.shape.depth


def rho_of(spec: RunSpec) -> float:
    """ρ of a spec to two decimals, as the authors' sweeps list it."""
    return round(growth_fraction_of(spec), 2)


def setting_of(values: Hyperparameters, base: Hyperparameters) -> tuple[str, float] | None:
    """The one hyperparameter that is not the base's and its multiple ("" and 1 for the base itself).

    None where several differ. A base of zero has no multiples: then the value is given.
    """
    before, after = base.to_dict(), values.to_dict()
    changed = [n for n in before if not math.isclose(before[n], after[n], rel_tol=1e-6, abs_tol=1e-15)]
    if len(changed) > 1:
        return None
    if not changed:
        return "", 1.0
    name = changed[0]
    return name, after[name] / before[name] if before[name] else after[name]


def long_name(knob: str) -> str:
    """Our name of a hyperparameter of the authors' tables."""
    return {"alpha": "injection_weight", "eps": "adam_eps"}.get(knob, full_name(knob) if knob else knob)
