"""Runs with scores: read from records and tables, grouped into series, named and held out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from steepen.errors import SteepenError, UsageError, nearest
from steepen.evaluation.core.suite import CORE17, CORE22
from steepen.laws.fits.downstream import Checkpoints, TaskFilter, filter_tasks
from steepen.model.arms import find_arm
from steepen.runs.record import RunRecord
from steepen.tables.read_table import read_table
from steepen.tables.table import Table
from steepen.utils.arrays import Array
from steepen.utils.json_io import read_json
from steepen.utils.rows import Rows
from steepen.utils.series import SeriesRun, corpus_name, recipe_name, repeated, series_labels, split_recipes

TASK_SCORES = ("nll", "centered", "accuracy", "baseline")
# Columns of a table of scores, by our names of them, besides arm, flops and loss.
SCORE_COLUMNS = {
    "nll": ("nll", "answer_nll", "nll22"),
    "core22": ("core22", "core", "core_accuracy"),
    "core17": ("core17", "core17_accuracy"),
    "core22_sd": ("core22_sd", "core_accuracy_std", "core22_seed_sd"),
    "kl_depth": ("kl_depth", "effective_depth", "kl_effective_depth"),
}
TASK_COLUMNS = {"nll": ("nll", "answer_nll"), "centered": ("centered", "centered_accuracy")}


@dataclass(frozen=True)
class PassesAtTestTime:
    """Loss differences L(k) − L(K trained) at k passes."""

    trained: int
    passes: tuple[int, ...]
    differences: tuple[float, ...]


@dataclass(frozen=True)
class ScoredRun:
    """What was measured of one finished run; None where a score was not evaluated."""

    run: str
    arm: str
    depth: int
    flops: float
    loss: float
    corpus: str = ""
    recipe: str = ""
    seed: int = 0
    nll: float | None = None  # answer NLL, mean of the 22 tasks
    core22: float | None = None
    core17: float | None = None
    core22_sd: float | None = None  # over the seeds of the demonstrations
    tasks: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])
    kl_depth: float | None = None
    passes: PassesAtTestTime | None = None
    record: RunRecord | None = None  # None: read from a table

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    @property
    def scored(self) -> bool:
        """Whether any score was evaluated, that of a task apart."""
        scores = (self.nll, self.core22, self.core17, self.kl_depth, self.passes)
        return any(score is not None for score in scores)

    def has(self, tasks: Iterable[str], *names: str) -> bool:
        """Whether every task has all these scores."""
        return all(name in self.tasks.get(task, {}) for task in tasks for name in names)

    def score(self, task: str, name: str) -> float:
        """A score of a task; raises SteepenError where it was not evaluated."""
        if not self.has([task], name):
            raise SteepenError(
                f"run {self.run} has no {name} of {task}: score it with `steepen eval --core`."
            )
        return self.tasks[task][name]

    def mean_centered(self, tasks: Sequence[str]) -> float:
        """Mean centred accuracy of some tasks."""
        return sum(self.score(task, "centered") for task in tasks) / len(tasks)


def scored_run(record: RunRecord) -> ScoredRun:
    """The scores that evaluation has joined to a record."""
    spec, found = record.spec, record.evaluation
    values = spec.to_dict()
    core: Mapping[str, Any] = found.get("core") or {}
    passes, deep = found.get("test_time_passes"), found.get("kl_depth")
    return ScoredRun(
        record.run, spec.arm.name, spec.shape.depth, record.flops, record.validation_loss,
        corpus_name(values["data"]), recipe_name(values), spec.seed,
        core.get("nll22"), core.get("core22"), core.get("core17"), core.get("core22_seed_sd"),
        tasks={
            label: {name: float(task[name]) for name in TASK_SCORES if task.get(name) is not None}
            for label, task in (core.get("tasks") or {}).items()
        },
        kl_depth=None if deep is None else float(deep["depth"]),
        passes=None if passes is None else PassesAtTestTime(
            int(passes["trained"]), tuple(map(int, passes["passes"])),
            tuple(map(float, passes["differences"])),
        ),
        record=record,
    )  # fmt: skip


Score: TypeAlias = Callable[[ScoredRun], float | None]


@dataclass(frozen=True)
class ScoreSeries:
    """The runs of one series, in order of compute. `variant` tells it from other series of its arm."""

    label: str
    arm: str
    variant: str
    corpus: str
    runs: Rows[ScoredRun]

    @property
    def curve(self) -> dict[str, Any]:
        """The fields of `Series` that give it its colour and label."""
        return {"arm": self.arm, "variant": self.variant}

    def metric(self, name: str) -> tuple[Array, Array]:
        """(FLOPs, metric) of the runs that have the metric."""
        known = self.runs.having(name)
        return known.array("flops"), known.array(name)

    def checkpoints(self, tasks: Sequence[str], score: Score = lambda run: run.core22) -> Checkpoints:
        """The runs that have every task and the score, as arrays for `fit_downstream`."""
        runs = Rows(run for run in self.runs if score(run) is not None and run.has(tasks, "nll", "centered"))
        nll, centered = (
            {task: np.array([run.tasks[task][name] for run in runs], float) for task in tasks}
            for name in ("nll", "centered")
        )
        return Checkpoints(runs.array("flops"), nll, centered, np.array([score(run) for run in runs], float))

    def without(self, runs: Iterable[ScoredRun]) -> ScoreSeries:
        """The series without some runs."""
        names = {run.run for run in runs}
        return replace(self, runs=Rows(run for run in self.runs if run.run not in names))


def group_series(
    runs: Sequence[ScoredRun], arms: Sequence[str] = (), corpora: Mapping[str, str] | None = None
) -> list[ScoreSeries]:
    """The series of some runs: an arm has several where corpora or recipes differ.

    `arms` selects arms, or series by their label; `corpora` gives names to corpora, which are otherwise the
    beginnings of content hashes. Two runs of a series with the same size and seed are rejected: they follow
    different recipes that only the user can tell apart.
    """
    named = corpora or {}
    recipes = split_recipes([SeriesRun(r.arm, r.corpus, r.recipe, r.depth, r.seed) for r in runs])
    places = [named.get(run.corpus, run.corpus) for run in runs]
    labels = series_labels([run.arm for run in runs], places, recipes)
    rows = list(zip(labels, places, runs, strict=True))
    for label, depth, seed in repeated((s, r.depth, r.seed) for s, _, r in rows if r.record is not None):
        names = [r.run for s, _, r in rows if (s, r.depth, r.seed) == (label, depth, seed)]
        raise UsageError(
            f"{label} has {len(names)} scored runs at depth {depth} with seed {seed} ({', '.join(names)}), "
            "which differ in learning rate or tokens; name only the runs of one recipe."
        )
    found: dict[str, ScoreSeries] = {}
    for label, place, run in sorted(rows, key=lambda row: row[2].flops):
        variant = label.removeprefix(run.arm).strip(" ()").removeprefix("corpus ")
        own = found.get(label, ScoreSeries(label, run.arm, variant, place, Rows()))
        found[label] = replace(own, runs=Rows((*own.runs, run)))
    series = [found[label] for label in dict.fromkeys(labels)]
    return [one for name in arms for one in find_series(series, name)] if arms else series


def find_series(series: Sequence[ScoreSeries], name: str) -> list[ScoreSeries]:
    """The series of an arm, or the one with a label; raises UsageError if there is none."""
    arm = known_arm(name)
    found = [one for one in series if name == one.label or arm == one.arm]
    if not found:
        known = dict.fromkeys(one.arm for one in series)
        raise UsageError(f"there is no scored run of {name!r}; the nearest are {nearest(arm, known)}.")
    return found


def known_arm(name: str) -> str:
    """The name that records have for an arm of the table, whichever of its names is given."""
    try:
        return find_arm(name).name
    except UsageError:
        return name  # a custom arm


def find_runs(runs: Iterable[ScoredRun], prefixes: Sequence[str]) -> list[ScoredRun]:
    """The runs whose names begin with these; each must name one."""
    every, found = list(runs), list[ScoredRun]()
    for prefix in prefixes:
        own = [run for run in every if run.run.startswith(prefix)]
        if len(own) != 1:
            raise UsageError(f"`hold_out` {prefix!r} names {len(own)} of the scored runs; it must name one.")
        found += own
    return found


def choose_tasks(names: str | Sequence[str], runs: Sequence[ScoredRun]) -> list[str]:
    """Task labels that every run has: "core17", "all" (CORE's 22), or labels."""
    if names in ("core17", "all"):
        if missing := [run.run for run in runs if run.core22 is None]:
            raise UsageError(
                f"run {missing[0]} lacks some of the 22 tasks; evaluate it on the whole bundle first, or "
                "name tasks that every run has with `tasks`."
            )
        return list(CORE17 if names == "core17" else CORE22)
    labels = list(dict.fromkeys([names] if isinstance(names, str) else names))
    known = dict.fromkeys(label for run in runs for label in run.tasks)
    for label in labels:
        if label not in known:
            raise UsageError(
                f"`tasks`: {label!r} is neither a task of the records nor a file of labels; "
                f"the nearest tasks are {nearest(label, known)}."
            )
        if without := [run.run for run in runs if label not in run.tasks]:
            raise UsageError(
                f"`tasks`: run {without[0]} has no score of {label!r}; evaluate it on that task first."
            )
    return labels


def require_core(runs: Sequence[ScoredRun]) -> list[ScoredRun]:
    """The runs that have scores of CORE tasks; raises UsageError if there is none."""
    found = [run for run in runs if run.tasks]
    if not found:
        raise UsageError(
            f"none of the {len(runs)} records has CORE scores; "
            "`steepen eval RUN --data … --core …` adds them."
        )
    return found


def filter_scored_tasks(
    runs: Sequence[ScoredRun], arm: str, min_gap: float, min_tau: float
) -> tuple[int, Mapping[str, TaskFilter]]:
    """The paper's two criteria for each task that all runs of the reference arm have, and their number."""
    (series, *others) = find_series(group_series(require_core(runs)), arm)
    if others:
        raise UsageError(
            f"{arm} has several series; name one of {', '.join(s.label for s in (series, *others))}."
        )
    own = series.runs
    if len(own) < 3:
        raise UsageError(f"{arm} has {len(own)} scored runs; a rank correlation needs at least 3.")
    labels = [label for label in own[0].tasks if all(label in run.tasks for run in own)]
    found = filter_tasks(
        np.array([run.record.tokens if run.record else run.flops for run in own], float),
        {label: np.array([run.score(label, "accuracy") for run in own]) for label in labels},
        {label: own[0].score(label, "baseline") for label in labels},
        min_gap=min_gap,
        min_tau=min_tau,
    )
    return len(own), found


def read_scored_runs(paths: Sequence[Path]) -> list[ScoredRun]:
    """Runs with the scores they have, each once; those of records by increasing compute.

    A path is a store, a run directory, a record.json, or a table of scores: one row for each run, or, where
    it has a column `task`, for each run and task of the runs of another table.
    """
    records: dict[str, RunRecord] = {}
    runs: list[ScoredRun] = []
    tasks: list[Table] = []
    for path in paths:
        if path.is_file() and path.name != "record.json":
            table = read_table(path)
            if table.has("task", aliases=False):
                tasks.append(table)
            else:
                runs += _from_table(table)
        else:
            records |= {record.run: record for record in map(_record, _record_files(path))}
    for table in tasks:
        runs = _with_tasks(runs, table)
    found = [scored_run(record) for record in sorted(records.values(), key=lambda record: record.flops)]
    _check_one_convention(found)
    return runs + found


def _check_one_convention(runs: Sequence[ScoredRun]) -> None:
    """Raise if runs were scored by different conventions: their answer NLLs are not comparable."""
    scored = [
        (run.record.evaluation["core"], run.run) for run in runs if run.record is not None and run.tasks
    ]
    by_name = {core.get("convention"): run for core, run in scored}
    if len(by_name) > 1:
        which = ", ".join(f"{run} by {name or 'an earlier version'}" for name, run in by_name.items())
        raise UsageError(
            f"the CORE scores follow different conventions ({which}) and cannot be compared; evaluate all "
            "runs with the same `steepen eval --convention`."
        )


def _record_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if (path / "record.json").is_file():
        return [path / "record.json"]
    if path.is_dir():
        return sorted(path.glob("*/record.json"))
    raise UsageError(f"{path} does not exist; give a store, a run directory, a record.json or a table.")


def _record(file: Path) -> RunRecord:
    try:
        return RunRecord.from_dict(read_json(file))
    except (OSError, ValueError, SteepenError) as error:
        raise SteepenError(f"the record {file} cannot be read ({error}).") from error


def _from_table(table: Table) -> list[ScoredRun]:
    flops, loss = table.numbers("flops"), table.numbers("loss")
    found: list[ScoredRun] = []
    for i, arm in enumerate(table.names("arm")):
        depth, corpus = int(_number(table, i, "depth") or 0), _text(table, i, "corpus")
        scores: dict[str, Any] = {ours: _number(table, i, *names) for ours, names in SCORE_COLUMNS.items()}
        name = "-".join(filter(None, (arm, f"d{depth}" if depth else f"{flops[i]:.3g}", corpus)))
        found.append(ScoredRun(name, arm, depth or i, float(flops[i]), float(loss[i]), corpus, **scores))
    return found


def _with_tasks(runs: Sequence[ScoredRun], table: Table) -> list[ScoredRun]:
    """The runs with the task scores of a table, joined by corpus, arm and depth."""
    table.require(["arm", "task"])
    if "depth" not in table.columns or not any(name in table.columns for name in TASK_COLUMNS["nll"]):
        raise UsageError(f"{table.source} needs columns arm, depth, task and answer_nll.")
    found: dict[tuple[str, str, int], dict[str, dict[str, float]]] = {}
    for i, arm in enumerate(table.names("arm")):
        place = (_text(table, i, "corpus"), arm, int(_number(table, i, "depth") or 0))
        values = {ours: _number(table, i, *names) for ours, names in TASK_COLUMNS.items()}
        known = {name: value for name, value in values.items() if value is not None}
        found.setdefault(place, {})[_text(table, i, "task")] = known
    return [replace(run, tasks=found.get((run.corpus, run.arm, run.depth), {})) for run in runs]


def _number(table: Table, row: int, *names: str) -> float | None:
    """A row's number in the first of these columns that the table has; None for an empty cell."""
    for name in names:
        if name in table.columns:
            cell = table.columns[name][row]
            try:
                return None if cell is None or not str(cell).strip() else float(cell)
            except ValueError:
                raise UsageError(f"{table.place(row)}: {name} is {cell!r}, not a number.") from None
    return None


def _text(table: Table, row: int, name: str) -> str:
    return str(table.columns[name][row] or "") if name in table.columns else ""
