"""Sensitivity of a verdict: what error of a recipe would change it, or explain the growth by itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from steepen.laws.model.laws import Array
from steepen.laws.model.table_fit import TableFit
from steepen.laws.verdict.questions import Contrasts, DecisionRule, p_values

DriftShape = Literal["top rung", "linear", "quadratic"]
DRIFT_SHAPES: tuple[DriftShape, ...] = get_args(DriftShape)
MAX_LOSS_PENALTY = 0.03
PENALTIES = 200  # sizes tried, up to the largest


@dataclass(frozen=True)
class MistuningTolerance:
    """The smallest loss penalty of a ladder's recipe that would change an answer; None above 3%.

    `shape` is how the penalty is distributed: at the top rung alone, or growing from zero at the lowest rung
    linearly or quadratically in log compute, as that of a rule that scales a hyperparameter wrongly does.
    Penalties are those at the top rung. A mistuned learning rate can only raise a loss, so the penalty is
    subtracted from the measured losses. `penalty_explaining_growth` is the penalty without which there would
    be no growth at all. `lr_factor` is the error of the learning rate that costs as much as the first of the
    two, where the loss penalty of a factor of 2 is known (`lr_regret`).
    """

    ladder: str
    flops: float
    shape: DriftShape
    penalty_changing_answer: float | None
    changed_better: str
    changed_growth: str
    penalty_explaining_growth: float | None
    lr_factor: float | None = None


def drift_profile(x: Array, shape: DriftShape) -> Array:
    """The penalty at each rung of a ladder (log compute `x`) relative to the one at its top rung."""
    if shape == "top rung":
        return (np.arange(len(x)) == np.argmax(x)).astype(float)
    place = (x - x.min()) / max(float(np.ptp(x)), 1e-12)
    return place if shape == "linear" else place**2


def mistuning_tolerance(
    fit: TableFit,
    found: Contrasts,
    rule: DecisionRule,
    levels: Sequence[float],
    ladders: dict[int, str],
    c0: float,
    lr_regret: float | None,
) -> tuple[MistuningTolerance, ...]:
    """For each of the two ladders (place in the table: name) and shape, the penalties that matter.

    The linearised model is refitted to losses without the penalty, its noise included.
    """
    tolerances: list[MistuningTolerance] = []
    for place, name in ladders.items():
        own = np.flatnonzero(fit.kept[0, place])
        x = fit.cells.x[place, own]
        top = int(own[np.argmax(x)])
        largest = MAX_LOSS_PENALTY * float(fit.loss[0, place, top])
        sizes = np.concatenate([[0.0], np.geomspace(3e-4, 1.0, PENALTIES)]) * largest
        for shape in DRIFT_SHAPES:
            direction = np.zeros(fit.cells.x.shape)
            direction[place, own] = drift_profile(x, shape)
            gain, slope = (fit.shifted(one, direction, sizes) for one in (found.gain_of, found.slope_of))
            p = p_values(found, rule, gain, slope)
            better, growth = p.better(levels[0]), p.growth(levels[1])
            changed = (better != better[0]) | (growth != growth[0])
            first = int(np.argmax(changed)) if changed.any() else None
            crossed = slope.mean * slope.mean[0] <= 0
            explains = growth[0] in ("grows", "shrinks") and bool(crossed.any())
            penalty = None if first is None else float(sizes[first])
            factor = None
            if penalty is not None and lr_regret is not None:  # the loss is a parabola in the log rate
                factor = 2 ** math.sqrt(penalty / lr_regret)
            tolerances.append(
                MistuningTolerance(
                    name, c0 * math.exp(float(x.max())), shape, penalty,
                    str(better[first or 0]), str(growth[first or 0]),
                    float(sizes[int(np.argmax(crossed))]) if explains else None, factor,
                )
            )  # fmt: skip
    return tuple(tolerances)
