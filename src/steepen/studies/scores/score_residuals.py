"""What the loss does not explain: answer NLL about a pooled line, and tasks about the reference's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from steepen.evaluation.core.suite import CATEGORIES, CORE17
from steepen.evaluation.scored_runs import ScoredRun, ScoreSeries
from steepen.results.panel import Lines
from steepen.studies.answer import Axis, Panel, Series, Table
from steepen.studies.cells import table
from steepen.studies.plotting import line
from steepen.studies.scores.score_ladders import score_curves
from steepen.utils.arrays import Array
from steepen.utils.rows import Rows

NLL_GROUP, TASK_GROUP = "Answer NLL against validation loss", "Task NLL about the reference's line"
MIN_RUNS = 3  # of a line through metrics


@dataclass(frozen=True)
class LossLine:
    """A metric as a straight line of the validation loss; `sd` is the residual standard deviation."""

    intercept: float
    slope: float
    sd: float
    r_squared: float
    count: int

    def predict(self, loss: float | Array) -> Array:
        """The metric at a validation loss."""
        return self.intercept + self.slope * np.asarray(loss, float)


def fit_loss_line(loss: Array, metric: Array) -> LossLine:
    """Least squares of a metric on the validation loss, every run with equal weight."""
    x, y = np.asarray(loss, float), np.asarray(metric, float)
    slope, intercept = (float(value) for value in np.polyfit(x, y, 1))
    left = y - (intercept + slope * x)
    spread = float(((y - y.mean()) ** 2).sum())
    explained = 1 - float((left**2).sum()) / spread if spread > 0 else 1.0
    sd = float(np.sqrt((left**2).sum() / max(len(y) - 2, 1)))
    return LossLine(intercept, slope, sd, explained, len(y))


@dataclass(frozen=True)
class Residual:
    """Mean of a metric minus a line of the loss, over `count` runs; `error` is of that mean."""

    mean: float
    error: float | None  # None for a single run
    count: int


def mean_residual(fit: LossLine, loss: Array, metric: Array) -> Residual | None:
    """The mean residual about a line, of the runs that have the metric; None where no run has it."""
    left = np.asarray(metric, float) - fit.predict(loss)
    left = left[np.isfinite(left)]
    if not len(left):
        return None
    error = float(left.std(ddof=1) / np.sqrt(len(left))) if len(left) > 1 else None
    return Residual(float(left.mean()), error, len(left))


def pool_answer_nll(series: Sequence[ScoreSeries]) -> tuple[LossLine, dict[str, float]] | None:
    """One line of answer NLL on loss for all runs, and each series' mean residual; None with too few runs."""
    scored = {one.label: one.runs.having("nll") for one in series}
    every = Rows(run for own in scored.values() for run in own)
    if len(every) < MIN_RUNS:
        return None
    fit = fit_loss_line(every.array("loss"), every.array("nll"))
    left = {label: mean_residual(fit, own.array("loss"), own.array("nll")) for label, own in scored.items()}
    return fit, {label: one.mean for label, one in left.items() if one is not None}


def pooled_panels(series: Sequence[ScoreSeries], fit: LossLine, suffix: str = "") -> list[Panel]:
    """Answer NLL against loss with the pooled line, and the residuals; better is up and to the right."""
    drawn = score_curves(series, "loss", "nll", join=False)
    losses = [x for curve in drawn for x in curve.x]
    ends = np.array([min(losses), max(losses)])
    fitted = line("one line for all runs", ends, fit.predict(ends), role="fit", style="dashed")
    left = [np.array(curve.y) - fit.predict(np.array(curve.x)) for curve in drawn]
    below = tuple(replace(curve, y=tuple(y.tolist())) for curve, y in zip(drawn, left, strict=True))
    axis = Axis("validation loss (nats per token)", reverse=True)
    caption = (
        f"NLL = {fit.intercept:.3f} + {fit.slope:.3f}·loss over {fit.count} runs of "
        f"equal weight; residual SD {fit.sd:.4f}. Both axes are reversed."
    )
    better = "Below the line in NLL is up: a better answer NLL than the loss explains."
    y, left_over = Axis("answer NLL (nats per token)", reverse=True), Axis("answer NLL − line", reverse=True)
    group = NLL_GROUP + suffix
    return [
        Panel("answer NLL", axis, y, (*drawn, fitted), caption=caption, group=group),
        Panel("residual", axis, left_over, below, (("y", 0.0, ""),), better, group=group),
    ]


@dataclass(frozen=True)
class TaskBars:
    """Mean residuals of tasks about the reference's lines, by series, over some of the runs."""

    runs: str  # which runs: "all runs", "loss below 2.9"
    residuals: dict[str, dict[str, Residual]]

    @property
    def tasks(self) -> dict[str, str]:
        """The tasks, ordered by category, and their categories."""
        known = {task for left in self.residuals.values() for task in left}
        return {task: name for name, tasks in CATEGORIES.items() for task in tasks if task in known}

    @property
    def means(self) -> dict[str, dict[str, float]]:
        """The mean residual of each task, by series."""
        return {
            label: {task: row.mean for task, row in left.items()} for label, left in self.residuals.items()
        }


def task_bars(series: Sequence[ScoreSeries], reference: ScoreSeries) -> list[TaskBars]:
    """Residuals over all runs, and over those in the lower half of the pooled range of loss."""
    scored = {one.label: Rows(run for run in one.runs if run.tasks) for one in series}
    every = Rows(run for own in scored.values() for run in own)
    base = scored.pop(reference.label)
    if len(base) < MIN_RUNS:
        return []
    tasks = [task for task in CORE17 if all(run.has([task], "nll") for run in every)]
    lines = {task: fit_loss_line(base.array("loss"), _task_nll(base, task)) for task in tasks}
    middle = (min(every.column("loss")) + max(every.column("loss"))) / 2
    found: list[TaskBars] = []
    for name, limit in (("all runs", math.inf), (f"loss below {middle:.3g}", middle)):
        kept = {label: Rows(run for run in own if run.loss <= limit) for label, own in scored.items()}
        left = {label: _task_residuals(lines, own) for label, own in kept.items()}
        found.append(TaskBars(name, {label: own for label, own in left.items() if own}))
    return found if found[0].residuals else []


def _task_nll(runs: Rows[ScoredRun], task: str) -> Array:
    return np.array([run.tasks[task]["nll"] for run in runs])


def _task_residuals(lines: Mapping[str, LossLine], runs: Rows[ScoredRun]) -> dict[str, Residual]:
    left = {
        task: mean_residual(fit, runs.array("loss"), _task_nll(runs, task)) for task, fit in lines.items()
    }
    return {task: one for task, one in left.items() if one is not None}


def bar_panels(
    series: Sequence[ScoreSeries], reference: ScoreSeries, bars: Sequence[TaskBars], suffix: str = ""
) -> list[Panel]:
    """Bars by task, ordered by category; negative residuals (better) point up."""
    curves = {one.label: one.curve for one in series}
    caption = (
        f"The mean of measured NLL minus a line of {reference.label}'s NLL on its loss, by task; "
        "whiskers are standard errors of the mean. Up is better."
    )
    y = Axis(f"task NLL − line of {reference.label}", reverse=True)
    panels: list[Panel] = []
    for one in bars:
        drawn = tuple(_bars(name, left, one, curves[name]) for name, left in one.residuals.items())
        # A line before the first task of each category, with its name's first word.
        firsts = {name: place for place, name in reversed([*enumerate(one.tasks.values())])}
        marks: Lines = tuple(("x", place - 0.5, name.partition("_")[0]) for name, place in firsts.items())
        lines: Lines = (("y", 0.0, ""), *marks)
        x, group = Axis("", names=tuple(one.tasks)), TASK_GROUP + suffix
        panels.append(Panel(one.runs, x, y, drawn, lines, caption, group=group, columns=1))
    return panels


def _bars(label: str, left: Mapping[str, Residual], bars: TaskBars, curve: dict[str, Any]) -> Series:
    rows = [(float(place), task, left[task]) for place, task in enumerate(bars.tasks) if task in left]
    means, errors = [row.mean for _, _, row in rows], [row.error or 0.0 for _, _, row in rows]
    return Series(
        label, "bars", tuple(place for place, _, _ in rows), tuple(means),
        low=tuple(np.subtract(means, errors).tolist()), high=tuple(np.add(means, errors).tolist()),
        texts=tuple(f"{task}, {row.count} runs" for _, task, row in rows), **curve,
    )  # fmt: skip


def residual_table(bars: TaskBars, suffix: str = "") -> Table:
    """Mean residual of every task and series."""
    rows = [
        {
            "task": task,
            "category": category.replace("_", " "),
            **{label: left.get(task) for label, left in bars.means.items()},
        }
        for task, category in bars.tasks.items()
    ]
    return table(f"Task NLL about the reference's line, {bars.runs}{suffix}", rows)
