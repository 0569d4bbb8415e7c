"""Runs with CORE scores, read from their records and arranged as tables for task selection and forecasts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from steepen.errors import SteepenError, UsageError, nearest
from steepen.evaluation.core.conventions import convention_of
from steepen.evaluation.core.suite import CORE17, CORE22
from steepen.utils.series import SeriesRun, corpus_name, recipe_name, repeated, series_labels, split_recipes

if TYPE_CHECKING:
    from steepen.laws.fits.downstream import Checkpoints, TaskFilter


@dataclass(frozen=True)
class ScoredRun:
    """A run's arm, training amount and CORE scores."""

    run: str
    arm: str
    depth: int
    tokens: float
    flops: float
    core: dict[str, Any]
    seed: int = 0
    corpus: str = ""
    recipe: str = ""

    @property
    def tasks(self) -> dict[str, dict[str, Any]]:
        """Scores by task label."""
        return self.core["tasks"]

    @property
    def convention(self) -> str | None:
        """How CORE was scored: authors, nanochat, or None for scores of an earlier version."""
        return convention_of(self.core)

    @property
    def has_core(self) -> bool:
        """Whether all 22 tasks were evaluated."""
        return self.core.get("core22") is not None

    def mean_centered(self, labels: Sequence[str]) -> float:
        """Mean centred accuracy of some tasks."""
        return sum(self.score(label, "centered") for label in labels) / len(labels)

    def score(self, label: str, name: str) -> float:
        """A score of a task; raises SteepenError where the record does not have it."""
        value = self.tasks[label].get(name)
        if value is None:
            raise SteepenError(
                f"run {self.run} has no {name} of {label}: score it with `steepen eval --core`."
            )
        return float(value)


RunsByArm: TypeAlias = dict[str, list[ScoredRun]]


def read_scored_runs(paths: Sequence[Path]) -> list[ScoredRun]:
    """The runs with CORE scores among stores, run directories and record files, by increasing compute."""
    files: list[Path] = []
    for path in paths:
        if path.is_file():
            files.append(path)
        elif (path / "record.json").is_file():
            files.append(path / "record.json")
        elif path.is_dir():
            files += sorted(path.glob("*/record.json"))
        else:
            raise UsageError(f"{path} does not exist; give a store, a run directory or a record.json.")
    found = [run for file in dict.fromkeys(files) if (run := _read(file)) is not None]
    if not found:
        raise UsageError(
            f"none of the {len(files)} records has CORE scores; "
            "`steepen eval RUN --data … --core …` adds them."
        )
    _check_one_convention(found)
    return sorted(found, key=lambda run: run.flops)


def _check_one_convention(runs: Sequence[ScoredRun]) -> None:
    """Raise if runs were scored by different conventions: their answer NLLs are not comparable."""
    by_name = {run.convention: run.run for run in runs}
    if len(by_name) > 1:
        which = ", ".join(f"{run} by {name or 'an earlier version'}" for name, run in by_name.items())
        raise UsageError(
            f"the CORE scores follow different conventions ({which}) and cannot be compared; evaluate all "
            "runs with the same `steepen eval --convention`."
        )


def group_by_arm(runs: Sequence[ScoredRun], arms: Sequence[str] | None = None) -> RunsByArm:
    """Runs by series (arm, corpus, recipe), in order of compute; `arms` selects some arms or series.

    A series has its arm's name where the arm has only one. Raises UsageError if two runs of a series have
    the same depth and seed: they follow different recipes that only the user can tell apart.
    """
    recipes = split_recipes([SeriesRun(run.arm, run.corpus, run.recipe, run.depth, run.seed) for run in runs])
    labels = series_labels([run.arm for run in runs], [run.corpus for run in runs], recipes)
    for label, depth, seed in repeated((s, r.depth, r.seed) for s, r in zip(labels, runs, strict=True)):
        names = [
            r.run for s, r in zip(labels, runs, strict=True) if (s, r.depth, r.seed) == (label, depth, seed)
        ]
        raise UsageError(
            f"{label} has {len(names)} scored runs at depth {depth} with seed {seed} ({', '.join(names)}), "
            "which differ in learning rate or tokens; name only the runs of one recipe."
        )
    groups: RunsByArm = {}
    for label, run in zip(labels, runs, strict=True):
        groups.setdefault(label, []).append(run)
    if arms is None:
        return groups
    for name in arms:
        if all(name not in (label, group[0].arm) for label, group in groups.items()):
            raise UsageError(f"there is no scored run of {name!r}; scored arms are {', '.join(groups)}.")
    return {label: group for name in arms for label, group in groups.items() if name in (label, group[0].arm)}


def choose_tasks(names: str | Sequence[str], groups: RunsByArm) -> list[str]:
    """Task labels that every run has: "core17", "all" (CORE's 22), or labels."""
    runs = [run for group in groups.values() for run in group]
    if names in ("core17", "all"):
        if missing := [run.run for run in runs if not run.has_core]:
            raise UsageError(
                f"run {missing[0]} lacks some of the 22 tasks; evaluate it on the whole bundle first, or "
                "name tasks that every run has with --tasks."
            )
        return list(CORE17 if names == "core17" else CORE22)
    labels = list(dict.fromkeys([names] if isinstance(names, str) else names))
    known = dict.fromkeys(label for run in runs for label in run.tasks)
    for label in labels:
        if label not in known:
            raise UsageError(
                f"--tasks: {label!r} is neither a task of the records nor a file of labels; "
                f"the nearest tasks are {nearest(label, known)}."
            )
        if without := [run.run for run in runs if label not in run.tasks]:
            raise UsageError(
                f"--tasks: run {without[0]} has no score of {label!r}; evaluate it on that task first."
            )
    return labels


def hold_out(groups: RunsByArm, prefixes: Sequence[str] | None, min_runs: int) -> tuple[RunsByArm, RunsByArm]:
    """Split runs into (fitted, held out), by arm.

    `prefixes` are beginnings of run names; None holds out the largest run of every arm with more
    than `min_runs`.
    """
    held: RunsByArm = {}
    if prefixes is None:
        held = {name: [runs[-1]] for name, runs in groups.items() if len(runs) > min_runs}
    else:
        for prefix in prefixes:
            found = [
                (name, run) for name, runs in groups.items() for run in runs if run.run.startswith(prefix)
            ]
            if len(found) != 1:
                raise UsageError(
                    f"--hold-out {prefix!r} names {len(found)} of the scored runs; it must name one."
                )
            held.setdefault(found[0][0], []).append(found[0][1])
    fitted = {name: [run for run in runs if run not in held.get(name, [])] for name, runs in groups.items()}
    return fitted, held


def checkpoint_tables(
    groups: RunsByArm, labels: Sequence[str], score: Callable[[ScoredRun], float]
) -> dict[str, Checkpoints]:
    """Each arm's runs as arrays for `fit_downstream`: compute, task NLL, centred accuracy and score."""
    import numpy as np

    from steepen.laws.fits.downstream import Checkpoints

    def column(runs: list[ScoredRun], label: str, field: str) -> Any:
        return np.array([run.tasks[label][field] for run in runs], float)

    return {
        name: Checkpoints(
            np.array([run.flops for run in runs], float),
            {label: column(runs, label, "nll") for label in labels},
            {label: column(runs, label, "centered") for label in labels},
            np.array([score(run) for run in runs], float),
        )
        for name, runs in groups.items()
    }


def filter_scored_tasks(
    groups: RunsByArm, arm: str, min_gap: float, min_tau: float
) -> Mapping[str, TaskFilter]:
    """The paper's two criteria for each task that all runs of the reference arm have."""
    import numpy as np

    from steepen.laws.fits.downstream import filter_tasks

    if arm not in groups:
        raise UsageError(f"there is no scored run of {arm!r}; scored arms are {', '.join(groups)}.")
    runs = groups[arm]
    if len(runs) < 3:
        raise UsageError(f"{arm} has {len(runs)} scored runs; a rank correlation needs at least 3.")
    labels = [label for label in runs[0].tasks if all(label in run.tasks for run in runs)]
    return filter_tasks(
        np.array([run.tokens for run in runs], float),
        {label: np.array([run.score(label, "accuracy") for run in runs]) for label in labels},
        {label: runs[0].score(label, "baseline") for label in labels},
        min_gap=min_gap,
        min_tau=min_tau,
    )


def _read(file: Path) -> ScoredRun | None:
    from steepen.runs.record import RunRecord
    from steepen.utils.json_io import read_json

    try:
        record = RunRecord.from_dict(read_json(file))
    except (OSError, ValueError, SteepenError) as error:
        raise SteepenError(f"the record {file} cannot be read ({error}).") from error
    core = record.evaluation.get("core")
    if core is None:
        return None
    spec = record.spec
    values = spec.to_dict()
    return ScoredRun(
        record.run, spec.arm.name, spec.shape.depth, record.tokens, record.flops, core,
        seed=spec.seed, corpus=corpus_name(values["data"]), recipe=recipe_name(values),
    )  # fmt: skip
