"""What the loss does not explain: answer NLL about a pooled line, and tasks about the reference's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from steepen.evaluation.core.suite import CATEGORIES
from steepen.laws.fits.matched_metric import LossLine, TaskResidual, fit_loss_line, task_residuals
from steepen.studies.answer import Axis, Panel, Series, Table
from steepen.studies.plotting import line, points
from steepen.studies.scores.score_series import ScoreSeries, common_tasks

MIN_RUNS = 3
NLL_GROUP, TASK_GROUP = "Answer NLL against validation loss", "Task NLL about the reference's line"


@dataclass(frozen=True)
class PooledLine:
    """One line of answer NLL on loss for all runs, and each series' mean residual."""

    fit: LossLine
    means: dict[str, TaskResidual]


def pool_answer_nll(series: Sequence[ScoreSeries]) -> PooledLine | None:
    """The pooled line; None with fewer than three runs that have an answer NLL."""
    rows = [(run.loss, run.nll) for one in series for run in one.runs if run.nll is not None]
    if len(rows) < MIN_RUNS:
        return None
    loss, nll = np.array(rows, float).T
    fit = fit_loss_line(loss, nll)
    means: dict[str, TaskResidual] = {}
    for one in series:
        own = np.array([(run.loss, run.nll) for run in one.runs if run.nll is not None], float)
        if len(own):
            means[one.label] = task_residuals({"": fit}, own[:, 0], {"": own[:, 1]})[""]
    return PooledLine(fit, means)


def pooled_panels(series: Sequence[ScoreSeries], pooled: PooledLine) -> list[Panel]:
    """Answer NLL against loss with the pooled line, and the residuals; better is up and to the right."""
    above: list[Series] = []
    below: list[Series] = []
    losses: list[float] = []
    for one in series:
        known = [(run.loss, run.nll, run.run) for run in one.runs if run.nll is not None]
        x, y, runs = [r[0] for r in known], [r[1] for r in known], [r[2] for r in known]
        losses += x
        above.append(points(one.label, x, y, runs, **one.curve))
        left = [value - float(pooled.fit.predict(loss)) for loss, value in zip(x, y, strict=True)]
        below.append(points(one.label, x, left, runs, **one.curve))
    ends = [min(losses), max(losses)]
    fitted = [float(pooled.fit.predict(value)) for value in ends]
    above.append(line("one line for all runs", ends, fitted, role="fit", style="dashed"))
    axis = Axis("validation loss (nats per token)", reverse=True)
    caption = (
        f"NLL = {pooled.fit.intercept:.3f} + {pooled.fit.slope:.3f}·loss over {pooled.fit.count} runs of "
        f"equal weight; residual SD {pooled.fit.sd:.4f}. Both axes are reversed."
    )
    return [
        Panel(
            "answer NLL", axis, Axis("answer NLL (nats per token)", reverse=True), tuple(above),
            caption=caption, group=NLL_GROUP,
        ),
        Panel(
            "residual", axis, Axis("answer NLL − line", reverse=True), tuple(below), (("y", 0.0, ""),),
            "Below the line in NLL is up: a better answer NLL than the loss explains.", group=NLL_GROUP,
        ),
    ]  # fmt: skip


@dataclass(frozen=True)
class TaskBars:
    """Mean residuals of tasks about the reference's lines, by series, over some of the runs."""

    runs: str  # which runs: "all runs", "loss below 2.9"
    residuals: dict[str, dict[str, TaskResidual]]


def task_bars(series: Sequence[ScoreSeries], reference: ScoreSeries) -> list[TaskBars]:
    """Residuals over all runs, and over those in the lower half of the pooled range of loss."""
    tasks = common_tasks(series)
    base = [run for run in reference.runs if run.task_nll]
    if not tasks or len(base) < MIN_RUNS:
        return []
    x = np.array([run.loss for run in base])
    lines = {task: fit_loss_line(x, np.array([run.task_nll[task] for run in base])) for task in tasks}
    losses = [run.loss for one in series for run in one.runs if run.task_nll]
    middle = (min(losses) + max(losses)) / 2
    found: list[TaskBars] = []
    for name, below in (("all runs", None), (f"loss below {middle:.3g}", middle)):
        by_series: dict[str, dict[str, TaskResidual]] = {}
        for one in series:
            own = [run for run in one.runs if run.task_nll]
            values = {task: np.array([run.task_nll[task] for run in own]) for task in tasks}
            left = task_residuals(lines, np.array([run.loss for run in own]), values, below)
            if left and one is not reference:
                by_series[one.label] = left
        found.append(TaskBars(name, by_series))
    return found


def bar_panels(
    series: Sequence[ScoreSeries], reference: ScoreSeries, bars: Sequence[TaskBars]
) -> list[Panel]:
    """Bars by task, ordered by category; negative residuals (better) point up."""
    panels: list[Panel] = []
    curves = {one.label: one.curve for one in series}
    for one in bars:
        known = {task for left in one.residuals.values() for task in left}
        tasks = [task for tasks in CATEGORIES.values() for task in tasks if task in known]
        drawn: list[Series] = []
        for label, left in one.residuals.items():
            rows = [(place, left[task]) for place, task in enumerate(tasks) if task in left]
            y = [row.mean for _, row in rows]
            errors = [row.error or 0.0 for _, row in rows]
            drawn.append(
                Series(
                    label, "bars", tuple(float(place) for place, _ in rows), tuple(y),
                    low=tuple(v - e for v, e in zip(y, errors, strict=True)),
                    high=tuple(v + e for v, e in zip(y, errors, strict=True)),
                    texts=tuple(f"{tasks[place]}, {row.count} runs" for place, row in rows),
                    **curves[label],
                )
            )  # fmt: skip
        panels.append(
            Panel(
                one.runs,
                Axis("", names=tuple(tasks)),
                Axis(f"task NLL − line of {reference.label}", reverse=True),
                tuple(drawn),
                (("y", 0.0, ""), *_category_marks(tasks)),
                f"The mean of measured NLL minus a line of {reference.label}'s NLL on its loss, by task; "
                "whiskers are standard errors of the mean. Up is better.",
                group=TASK_GROUP,
                columns=1,
            )
        )
    return panels


def _category_marks(tasks: Sequence[str]) -> list[tuple[Literal["x", "y"], float, str]]:
    """A line before the first task of each category, with its name's first word."""
    owners = {task: name for name, own in CATEGORIES.items() for task in own}
    firsts = {owners[task]: place for place, task in reversed([*enumerate(tasks)])}
    return [("x", place - 0.5, name.partition("_")[0]) for name, place in firsts.items()]


def residual_table(bars: TaskBars) -> Table:
    """Mean residual of every task and series."""
    labels = list(bars.residuals)
    known = {task for left in bars.residuals.values() for task in left}
    rows = tuple(
        (
            task,
            category.replace("_", " "),
            *(left[task].mean if task in (left := bars.residuals[label]) else None for label in labels),
        )
        for category, tasks in CATEGORIES.items()
        for task in tasks
        if task in known
    )
    return Table(f"Task NLL about the reference's line, {bars.runs}", ("task", "category", *labels), rows)
