"""Matched-compute slices: the loss of each family of runs at common budgets, and the optimum over them.

A family of the studies is a ladder over depth with one number of passes. Between rungs the loss is linear in
compute, as in the authors' code, or log–log.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from steepen.errors import UsageError, require_one_of
from steepen.laws.fits.vertex import Vertex, find_vertex
from steepen.laws.ladder import Ladder, make_ladder
from steepen.model.arm import Arm
from steepen.model.arms import family_arm, find_arm
from steepen.studies.answer import Axis, Panel, Series, Table
from steepen.studies.cells import Cells, table
from steepen.studies.plotting import family_curve, joined_curves, optimum_curve, points
from steepen.utils.arrays import Array
from steepen.utils.formatting import format_flops

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
    families: dict[float, Ladder], budgets: Array, *, interpolation: RungInterpolation = "linear"
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
        found.append(ComputeSlice(budget, losses, _best(losses, budget)))
    return found


def _best(losses: dict[float, float], budget: float) -> Vertex | None:
    keys, values = np.array(list(losses)), np.array(list(losses.values()))
    if len(keys) >= 3:
        return find_vertex(keys, values, budget=budget)
    if len(keys) == 2:
        i = int(np.argmin(values))
        unbounded = (-math.inf, math.inf)
        return Vertex(budget, float(keys[i]), float(values[i]), False, unbounded, 0.0, 2, None, "quadratic")
    return None


def operator_arm(family: str, count: int) -> Arm:
    """K passes of a family with the operator (loop, untied); one pass is Operator-1 in both."""
    return find_arm("operator-1") if count == 1 else family_arm(family, count)


def pass_ladders(cells: Cells) -> dict[float, Ladder]:
    """Ladders over depth, one for each number of passes that two runs of have finished."""
    groups = cells.having("loss").by("passes")
    return {
        float(passes): make_ladder(f"K = {passes}", own.array("flops"), own.array("loss"))
        for passes, own in groups.items()
        if len(own) >= 2
    }


def matched_compute_slices(
    cells: Cells, count: int, interpolation: RungInterpolation = "log-log"
) -> list[ComputeSlice]:
    """Losses by number of passes, and the best number, at `count` budgets at matched compute.

    Budgets run from the lowest at which three numbers of passes are measured to the highest of the smallest
    number; larger numbers of passes take part at the budgets that their own runs span.
    `interpolation` between depths is log–log, closest to a power law, or linear in compute as the paper's
    authors do for repeated data.
    """
    ladders = pass_ladders(cells)
    if len(ladders) < 3:
        return []
    low = sorted(float(ladder.flops[0]) for ladder in ladders.values())[2]
    high = float(next(iter(ladders.values())).flops[-1])
    if low > high:
        return []
    # The ends are budgets of runs: shrunk by 1e-9, so that rounding does not put them outside.
    budgets = np.geomspace(low * (1 + 1e-9), high * (1 - 1e-9), count)
    return slice_families(ladders, budgets, interpolation=interpolation)


def loss_panel(title: str, cells: Cells) -> Panel:
    """Loss against compute, one line for each number of passes."""
    series = tuple(joined_curves(cells, "flops", "loss", "passes"))
    return Panel(title, Axis("compute (FLOPs)", "log"), Axis("validation loss"), series)


def slice_panel(title: str, slices: Sequence[ComputeSlice]) -> Panel:
    """Loss against passes at matched compute, with the parabolas' minima."""
    series: list[Series] = []
    for row in slices:
        # Two digits: families beside each other whose budgets differ by a step of training share a curve.
        label, curve = family_curve("budget", float(f"{row.budget:.2g}"))
        x, y = list(row.losses), list(row.losses.values())
        series += [points(label, x, y, **curve)] if x else []
        if row.best is not None:
            series += optimum_curve(label, x, y, row.best, True, {"note": "best"}, **curve)
    return Panel(
        title, Axis("passes K", "log"), Axis("validation loss", "log"), tuple(series),
        caption="Losses are interpolated between neighbouring depths; hollow stars are the best measured K.",
    )  # fmt: skip


def slice_table(title: str, slices: Sequence[ComputeSlice]) -> Table:
    """The optimum of each budget."""
    rows = [
        {
            "FLOPs": one.budget, "best K": one.best and one.best.x, "inside": one.best and one.best.interior,
            "loss there": one.best and one.best.loss, "loss at K = 1": one.losses.get(1.0),
        }
        for one in slices
    ]  # fmt: skip
    return table(title, rows)


def slice_values(slices: Sequence[ComputeSlice]) -> list[dict[str, Any]]:
    """The slices as JSON values."""
    return [
        {
            "budget": one.budget,
            "losses": {f"{passes:g}": loss for passes, loss in one.losses.items()},
            "best": one.best and one.best.x,
            "interior": one.best and one.best.interior,
        }
        for one in slices
    ]


def range_sentence(name: str, slices: Sequence[ComputeSlice]) -> str:
    """A sentence: the best number of passes at the lowest and at the highest budget."""
    known = [(one.budget, one.best) for one in slices if one.best is not None]
    if not known:
        return f"{name}: no budget is covered by two numbers of passes, so there is nothing to compare."
    (low, first), (high, last) = known[0], known[-1]
    mark = "" if all(best.interior for _, best in known) else " (some are best measured, not optima)"
    return (
        f"{name}: the best number of passes goes from {_optimum(first)} at {format_flops(low)} "
        f"FLOPs to {_optimum(last)} at {format_flops(high)}{mark}."
    )


def _optimum(best: Vertex) -> str:
    """An optimum with its interval, where the sweep gives a bounded one."""
    if best.censored:
        return f"{best.x:.2g}"
    if best.interval is None or not all(map(math.isfinite, best.interval)):
        return f"{best.x:.2g} (without an interval)"
    return f"{best.x:.2g} ({best.interval[0]:.2g} to {best.interval[1]:.2g})"
