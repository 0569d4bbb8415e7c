"""Downstream metrics along ladders: compute for an equal metric, and what the loss does not explain.

A metric either falls with compute (a loss, an answer NLL) or rises (an accuracy). Multipliers interpolate
between measurements, linear in log compute, and never extrapolate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from steepen.laws.ladder import make_ladder
from steepen.laws.verdict.multipliers import interpolate_compute
from steepen.utils.arrays import Array


@dataclass(frozen=True)
class MetricMultiplier:
    """How many times less compute a series needs for the reference's metric at `flops` of the reference."""

    flops: float
    metric: float
    value: float


def matched_metric(
    reference: tuple[Array, Array], series: tuple[Array, Array], *, rises: bool = False
) -> list[MetricMultiplier]:
    """Multipliers at the reference's rungs whose metric lies within the series' measured range.

    `reference` and `series` are (FLOPs, metric); runs within 1% of compute are averaged. A metric that
    fluctuates is taken as reached where the curve first crosses it.
    """
    sign = -1.0 if rises else 1.0
    base = make_ladder("reference", reference[0], sign * np.asarray(reference[1], float))
    other = make_ladder("series", series[0], sign * np.asarray(series[1], float))
    if len(other.flops) < 2:
        return []
    needed = interpolate_compute(other.flops, other.loss, base.loss)
    return [
        MetricMultiplier(float(c), float(sign * y), float(c / x))
        for c, y, x in zip(base.flops, base.loss, needed, strict=True)
        if np.isfinite(x)
    ]


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
class TaskResidual:
    """Mean of a task's metric minus a line of the loss, over `count` runs; `error` is of that mean."""

    mean: float
    error: float | None  # None for a single run
    count: int


def task_residuals(
    lines: Mapping[str, LossLine], loss: Array, tasks: Mapping[str, Array], below: float | None = None
) -> dict[str, TaskResidual]:
    """The mean residual of every task about its line, over the runs whose loss is at most `below`."""
    x = np.asarray(loss, float)
    keep = np.ones(len(x), bool) if below is None else x <= below
    found: dict[str, TaskResidual] = {}
    for task, line in lines.items():
        if task not in tasks or not keep.any():
            continue
        left = (np.asarray(tasks[task], float) - line.predict(x))[keep]
        left = left[np.isfinite(left)]
        if len(left):
            error = float(left.std(ddof=1) / np.sqrt(len(left))) if len(left) > 1 else None
            found[task] = TaskResidual(float(left.mean()), error, len(left))
    return found
