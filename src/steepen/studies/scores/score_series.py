"""Runs with scores as series: one for each arm, corpus and recipe, in order of compute."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from steepen.errors import UsageError
from steepen.evaluation.core.suite import CORE17
from steepen.laws.fits.downstream import Checkpoints
from steepen.laws.fits.solver import Array
from steepen.runs.record import RunRecord
from steepen.utils.series import SeriesRun, corpus_name, recipe_name, series_labels, split_recipes


@dataclass(frozen=True)
class PassesAtTestTime:
    """Loss differences L(k) − L(K trained) at k passes."""

    trained: int
    passes: tuple[int, ...]
    differences: tuple[float, ...]


@dataclass(frozen=True)
class ScoredCheckpoint:
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
    task_nll: Mapping[str, float] = field(default_factory=dict[str, float])
    task_centered: Mapping[str, float] = field(default_factory=dict[str, float])
    kl_depth: float | None = None
    passes: PassesAtTestTime | None = None

    @property
    def scored(self) -> bool:
        """Whether any score was evaluated."""
        return any(
            value is not None for value in (self.nll, self.core22, self.core17, self.kl_depth, self.passes)
        )


Metric = Callable[[ScoredCheckpoint], float | None]


@dataclass(frozen=True)
class ScoreSeries:
    """The runs of one series, in order of compute. `variant` tells it from other series of its arm."""

    label: str
    arm: str
    variant: str
    corpus: str
    runs: tuple[ScoredCheckpoint, ...]

    def column(self, metric: Metric) -> tuple[Array, Array, list[str]]:
        """(FLOPs, metric, runs) of the runs that have the metric."""
        rows = [(run.flops, value, run.run) for run in self.runs if (value := metric(run)) is not None]
        return (
            np.array([row[0] for row in rows], float),
            np.array([row[1] for row in rows], float),
            [row[2] for row in rows],
        )

    @property
    def curve(self) -> dict[str, Any]:
        """The fields of `Series` that give it its colour and label."""
        return {"arm": self.arm, "variant": self.variant}

    def checkpoints(self, tasks: Sequence[str]) -> Checkpoints | None:
        """The runs as arrays for `fit_downstream`; None unless four have every task and CORE."""
        runs = [
            run
            for run in self.runs
            if run.core22 is not None
            and all(task in run.task_nll and task in run.task_centered for task in tasks)
        ]
        if len(runs) < 4:
            return None
        return Checkpoints(
            np.array([run.flops for run in runs]),
            {task: np.array([run.task_nll[task] for run in runs]) for task in tasks},
            {task: np.array([run.task_centered[task] for run in runs]) for task in tasks},
            np.array([run.core22 for run in runs], float),
        )

    def without(self, held: Iterable[str]) -> ScoreSeries:
        """The series without some runs."""
        names = set(held)
        runs = tuple(run for run in self.runs if run.run not in names)
        return ScoreSeries(self.label, self.arm, self.variant, self.corpus, runs)


def checkpoint_of(record: RunRecord) -> ScoredCheckpoint:
    """The scores that evaluation has joined to a record."""
    spec, found = record.spec, record.evaluation
    values = spec.to_dict()
    core: dict[str, Any] = found.get("core") or {}
    tasks: dict[str, dict[str, Any]] = core.get("tasks") or {}
    passes = found.get("test_time_passes")
    deep = found.get("kl_depth")
    return ScoredCheckpoint(
        run=record.run,
        arm=spec.arm.name,
        depth=spec.shape.depth,
        flops=record.flops,
        loss=record.validation_loss,
        corpus=corpus_name(values["data"]),
        recipe=recipe_name(values),
        seed=spec.seed,
        nll=core.get("nll22"),
        core22=core.get("core22"),
        core17=core.get("core17"),
        core22_sd=core.get("core22_seed_sd"),
        task_nll={label: float(task["nll"]) for label, task in tasks.items()},
        task_centered={
            label: float(value)
            for label, task in tasks.items()
            if (value := task.get("centered")) is not None
        },
        kl_depth=None if deep is None else float(deep["depth"]),
        passes=None
        if passes is None
        else PassesAtTestTime(
            int(passes["trained"]),
            tuple(map(int, passes["passes"])),
            tuple(map(float, passes["differences"])),
        ),
    )  # fmt: skip


def group_series(
    runs: Sequence[ScoredCheckpoint], corpora: Mapping[str, str] | None = None
) -> list[ScoreSeries]:
    """The series of some runs: an arm has several where corpora or recipes differ.

    `corpora` gives names to corpora, which are otherwise the beginnings of content hashes.
    """
    named = corpora or {}
    recipes = split_recipes([SeriesRun(r.arm, r.corpus, r.recipe, r.depth, r.seed) for r in runs])
    places = [named.get(run.corpus, run.corpus) for run in runs]
    labels = series_labels([run.arm for run in runs], places, recipes)
    found: dict[str, list[ScoredCheckpoint]] = {}
    corpus: dict[str, str] = {}
    for label, place, run in zip(labels, places, runs, strict=True):
        found.setdefault(label, []).append(run)
        corpus[label] = place
    return [
        ScoreSeries(
            label,
            own[0].arm,
            label.removeprefix(own[0].arm).strip(" ()").removeprefix("corpus "),
            corpus[label],
            tuple(sorted(own, key=lambda run: run.flops)),
        )
        for label, own in found.items()
    ]


def held_out_runs(runs: Sequence[ScoredCheckpoint], prefixes: Sequence[str]) -> list[ScoredCheckpoint]:
    """The runs whose names begin with these; each must name one."""
    found: list[ScoredCheckpoint] = []
    for prefix in prefixes:
        own = [run for run in runs if run.run.startswith(prefix)]
        if len(own) != 1:
            raise UsageError(f"--hold-out {prefix!r} names {len(own)} of the scored runs; it must name one.")
        found += own
    return found


def common_tasks(series: Sequence[ScoreSeries]) -> list[str]:
    """The tasks of CORE17 that every run with answer NLLs has."""
    runs = [run for one in series for run in one.runs if run.task_nll]
    return [task for task in CORE17 if runs and all(task in run.task_nll for run in runs)]
