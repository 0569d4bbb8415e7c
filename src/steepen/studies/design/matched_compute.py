"""Matched-compute slices: the loss of each family of runs at common budgets, and the optimum over them.

Between rungs the loss is linear in compute, as in the authors' code, or log–log.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from steepen.errors import UsageError, require_one_of
from steepen.laws.fits.vertex import Vertex, find_vertex
from steepen.laws.ladder import Ladder
from steepen.utils.arrays import Array

RungInterpolation = Literal["linear", "log-log"]
RUNG_INTERPOLATIONS: tuple[RungInterpolation, ...] = ("linear", "log-log")


@dataclass(frozen=True)
class ComputeSlice:
    """Interpolated losses of every family that covers a budget, and the optimum over the families.

    `best.interior` is False (censored) where no parabola has its minimum inside the families present;
    `best.x` is then the best measured family. None if fewer than two families cover the budget.
    """

    budget: float
    losses: dict[float, float]
    best: Vertex | None


def loss_at(ladder: Ladder, budget: float, interpolation: RungInterpolation = "linear") -> float | None:
    """A ladder's loss at a budget, between its two nearest rungs; None outside its range.

    `linear` interpolates the loss in compute, `log-log` its logarithm in log compute.
    """
    require_one_of("interpolation", interpolation, RUNG_INTERPOLATIONS)
    if not ladder.flops[0] <= budget <= ladder.flops[-1]:
        return None
    if interpolation == "linear":
        return float(np.interp(budget, ladder.flops, ladder.loss))
    return float(np.exp(np.interp(math.log(budget), np.log(ladder.flops), np.log(ladder.loss))))


def convex_envelope(flops: Array, loss: Array) -> tuple[Array, Array]:
    """The lower convex envelope of runs of any family, as far as loss falls: (FLOPs, loss) of its corners.

    It is the frontier of what a mixture of the families reaches at a compute; both axes are linear.
    """
    order = np.lexsort((loss, flops))
    corners: list[tuple[float, float]] = []
    for x, y in zip(np.asarray(flops, float)[order], np.asarray(loss, float)[order], strict=True):
        while len(corners) > 1:
            (x0, y0), (x1, y1) = corners[-2:]
            if (x1 - x0) * (y - y0) > (y1 - y0) * (x - x0):
                break
            corners.pop()
        if not corners or x > corners[-1][0]:
            corners.append((float(x), float(y)))
    lowest = min(range(len(corners)), key=lambda i: corners[i][1])
    x, y = zip(*corners[: lowest + 1], strict=True)
    return np.array(x), np.array(y)


def envelope_compute(flops: Array, loss: Array, target: float) -> float:
    """The compute at which the lower convex envelope of runs reaches a loss; NaN outside its losses."""
    x, y = convex_envelope(flops, loss)
    if not y[-1] <= target <= y[0]:
        return math.nan
    return float(np.interp(-target, -y, x))


def slice_families(
    families: dict[float, Ladder],
    budgets: Array,
    confidence: float = 0.90,
    *,
    interpolation: RungInterpolation = "linear",
) -> list[ComputeSlice]:
    """Slice families (keyed by K, or any positive setting) at budgets; optima by parabolas in log K."""
    for key in families:
        if not key > 0:
            raise UsageError(
                f"a family is keyed {key}; keys must be positive numbers such as the number of passes."
            )
    found: list[ComputeSlice] = []
    for budget in np.asarray(budgets, float).tolist():
        every = {key: loss_at(ladder, budget, interpolation) for key, ladder in sorted(families.items())}
        losses = {key: value for key, value in every.items() if value is not None}
        found.append(ComputeSlice(budget, losses, _best(losses, budget, confidence)))
    return found


def _best(losses: dict[float, float], budget: float, confidence: float) -> Vertex | None:
    keys, values = np.array(list(losses)), np.array(list(losses.values()))
    if len(keys) >= 3:
        return find_vertex(keys, values, budget=budget, confidence=confidence)
    if len(keys) == 2:
        i = int(np.argmin(values))
        unbounded = (-math.inf, math.inf)
        return Vertex(budget, float(keys[i]), float(values[i]), False, unbounded, 0.0, 2, None, "quadratic")
    return None
