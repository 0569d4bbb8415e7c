"""Matched-compute slices: the loss of each family of runs at common budgets, and the optimum over them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from steepen.errors import UsageError
from steepen.laws.fits.solver import Array
from steepen.laws.fits.vertex import Vertex, find_vertex
from steepen.laws.ladder import Ladder


@dataclass(frozen=True)
class ComputeSlice:
    """Interpolated losses of every family that covers a budget, and the optimum over the families.

    `best.interior` is False (censored) where no parabola has its minimum inside the families present;
    `best.x` is then the best measured family. None where fewer than two families cover the budget.
    """

    budget: float
    losses: dict[float, float]
    best: Vertex | None


def loss_at(ladder: Ladder, budget: float) -> float | None:
    """A ladder's loss at a budget, log–log between its two nearest rungs; None outside its range."""
    if not ladder.flops[0] <= budget <= ladder.flops[-1]:
        return None
    return float(np.exp(np.interp(math.log(budget), np.log(ladder.flops), np.log(ladder.loss))))


def slice_families(
    families: dict[float, Ladder], budgets: Array, confidence: float = 0.90
) -> list[ComputeSlice]:
    """Slice families (keyed by K, or any positive setting) at budgets; optima by parabolas in log K."""
    for key in families:
        if not key > 0:
            raise UsageError(
                f"a family is keyed {key}; keys must be positive numbers such as the number of passes."
            )
    found: list[ComputeSlice] = []
    for budget in np.asarray(budgets, float):
        losses = {
            key: value
            for key, ladder in sorted(families.items())
            if (value := loss_at(ladder, budget)) is not None
        }
        found.append(ComputeSlice(float(budget), losses, _best(losses, float(budget), confidence)))
    return found


def _best(losses: dict[float, float], budget: float, confidence: float) -> Vertex | None:
    keys, values = np.array(list(losses)), np.array(list(losses.values()))
    if len(keys) >= 3:
        return find_vertex(keys, values, budget=budget, confidence=confidence)
    if len(keys) == 2:
        i = int(np.argmin(values))
        nowhere = (-math.inf, math.inf)
        return Vertex(budget, float(keys[i]), float(values[i]), False, nowhere, 0.0, 2, None, "quadratic")
    return None
