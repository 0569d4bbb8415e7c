"""The authors' measurements as records of the runs that studies ask for.

A study yields run specs and receives records. Here the record of a spec carries the loss (and FLOPs, seconds
and scores) that the authors measured for that arm, size and setting, so a study's own analysis and figures
work on their measurements. A run that they did not publish is None, as if it had diverged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from steepen.errors import UsageError
from steepen.evaluation.core.suite import CORE22
from steepen.model.arms import find_arm
from steepen.recipe.hyperparameters import Hyperparameters, full_name
from steepen.reproduction.tables import Row, table
from steepen.runs.record import RunRecord
from steepen.runs.spec import RunSpec
from steepen.studies.answer import Work
from steepen.studies.cells import lead
from steepen.studies.preset import SWEEPS
from steepen.studies.synthetic import fabricate_record, growth_fraction_of

T = TypeVar("T")
TOLERANCE = 0.02  # of tokens: budgets are equal, whole steps are not
LADDERS = {"fineweb_ladders": "fineweb", "fineweb_edu_ladders": "fineweb-edu"}  # the reported ones
NAMES = {  # of the authors' tables that are not ours, besides those `find_arm` knows
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


def our_knob(knob: str) -> str:
    """Our name of a hyperparameter of the authors' tables."""
    return {"alpha": "injection_weight", "eps": "adam_eps"}.get(knob, full_name(knob) if knob else knob)


@dataclass(frozen=True)
class TuningSweep:
    """A sweep of an arm's chain in the authors' table, which has the order of the values tried alone."""

    number: int  # of its round
    name: str
    incumbent: float | None  # its loss; None: not run again
    tries: tuple[tuple[str, float, float], ...]  # setting, place and loss


def tuning_sweeps(arm: str) -> list[TuningSweep]:
    """The sweeps of an arm of the authors' table, in order."""
    found: list[TuningSweep] = []
    for (number, sweep), rows in table("base_tuning").where(arm=arm).by("round", "sweep").items():
        again = rows.where(incumbent=True).column("val_loss")
        tries = tuple(
            (our_knob(row["knob"]), float(row["position"]), row["val_loss"])
            for row in rows.where(incumbent=False)
        )
        found.append(TuningSweep(number, our_knob(sweep), again[0] if again else None, tries))
    return sorted(found, key=lambda one: (one.number, SWEEPS.index(one.name)))


@dataclass(frozen=True)
class Measured:
    """What was published for one run."""

    loss: float
    flops: float | None = None  # None: those of the spec
    seconds: float | None = None
    evaluation: dict[str, Any] = field(default_factory=dict[str, Any])


Finder = Callable[[RunSpec], Measured | None]


def of_loss(loss: float | None) -> Measured | None:
    """What was published for a run of which only the loss was, if that."""
    return None if loss is None else Measured(loss)


@dataclass
class Replay:
    """Drives studies with published measurements and keeps the records it made."""

    records: dict[str, RunRecord] = field(default_factory=dict[str, RunRecord])

    def answer(self, study: Work[T], find: Finder) -> T:
        """Drive a study to its answer."""
        return lead(study, lambda specs: [self.record(spec, find) for spec in specs])

    def record(self, spec: RunSpec, find: Finder) -> RunRecord | None:
        """The record of a spec; None where nothing was published for it."""
        found = find(spec)
        if found is None:
            return None
        record = fabricate_record(spec, found.loss)
        record = replace(
            record,
            flops=found.flops or record.flops,
            seconds_training=found.seconds or record.seconds_training,
            hardware={"device": "cuda", "name": "8 × H100", "host": "published"},
            evaluation=found.evaluation,
        )
        known = self.records.get(spec.hash)
        if known is not None and known.evaluation and not found.evaluation:
            # Another table has this run, or a repetition of it: the one with scores is kept.
            return known if known.validation_loss == found.loss else record
        self.records[spec.hash] = record
        return record


def _scores(corpus: str, arm: str, depth: int) -> dict[str, Any]:
    """CORE, KL effective depth and passes at test time of a run as `steepen eval` writes them."""
    found: dict[str, Any] = {}
    for row in table("core_scores").where(corpus=corpus, arm=arm, depth=depth):
        tasks = {
            task["task"]: {"nll": task["answer_nll"], "centered": task["centered_accuracy"]}
            for task in table("core_task_scores").where(corpus=corpus, arm=arm, depth=depth)
        }
        found["core"] = {
            "convention": "authors", "core22": row["core_accuracy"],
            "core22_seed_sd": row["core_accuracy_std"], "core17": row["core17_accuracy"],
            "nll22": row["answer_nll"],
            "tasks": {label: tasks[label] for label in CORE22 if label in tasks},
        }  # fmt: skip
    if corpus != "fineweb":
        return found
    for row in table("effective_depth").where(arm=arm, depth=depth):
        found["kl_depth"] = {"depth": float(row["effective_depth"])}
    if passes := table("passes_at_test_time").where(arm=arm, depth=depth):
        trained = passes[0]["trained_passes"]
        losses = dict(sorted((row["eval_passes"], row["val_loss"]) for row in passes))
        found["test_time_passes"] = {
            "trained": trained, "trained_loss": losses[trained], "passes": list(losses),
            "losses": list(losses.values()),
            "differences": [loss - losses[trained] for loss in losses.values()],
        }  # fmt: skip
    return found


def ladder_runs(*tables: str) -> Finder:
    """Ladder runs by arm and depth, with the times and scores that were published for them."""

    def find(spec: RunSpec) -> Measured | None:
        for name in tables:
            for row in table(name).where(depth=spec.shape.depth):
                if our_name(row["arm"]) == spec.arm.name:
                    return measured(name, row)
        return None

    def measured(name: str, row: Row) -> Measured:
        loss, flops = row["val_loss"], row["compute_flops"]
        # Scores are of the reported ladders, and of the random passes; not of other recipes of an arm.
        if name not in LADDERS and row["arm"] != "loop-grow-random":
            return Measured(loss, flops)
        hours = table("timing").where(arm=row["arm"], depth=row["depth"])
        evaluation = _scores(LADDERS.get(name, "fineweb"), row["arm"], row["depth"])
        return Measured(loss, flops, 3600 * hours[0]["training_hours"] if hours else None, evaluation)

    return find


def by_key(rows: Iterable[Row], key: Callable[[Row], Any], of: Callable[[RunSpec], Any]) -> Finder:
    """Runs whose key in a table equals that of the spec."""
    losses = {key(row): row["val_loss"] for row in rows}
    return lambda spec: of_loss(losses.get(of(spec)))


def by_tokens(
    rows: Sequence[Row],
    key: Callable[[Row], Any],
    tokens: Callable[[Row], float],
    of: Callable[[RunSpec], Any],
) -> Finder:
    """Runs of a key with the nearest number of tokens, if it is within TOLERANCE."""

    def find(spec: RunSpec) -> Measured | None:
        own = [row for row in rows if key(row) == of(spec)]
        distances = [(abs(math.log(tokens(row) / spec.tokens)), row["val_loss"]) for row in own]
        nearest, loss = min(distances, default=(math.inf, None))
        return of_loss(loss) if nearest < TOLERANCE else None

    return find


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
    name = changed[0] if changed else ""
    return name, (after[name] / before[name] if before[name] else after[name]) if name else 1.0
