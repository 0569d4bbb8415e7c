"""Families of ladders by the number of passes, and their slices at matched compute: shared by two studies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from steepen.laws.fits.matched_compute import ComputeSlice, RungInterpolation, slice_families
from steepen.laws.fits.vertex import Vertex
from steepen.laws.ladder import Ladder, make_ladder
from steepen.studies.answer import Axis, Panel, Series, Table
from steepen.studies.plotting import family_curve, line, optimum_star, parabola_or_segments, points
from steepen.utils.formatting import format_flops


@dataclass(frozen=True)
class PassRun:
    """One run of a grid over depth and passes."""

    depth: int
    passes: int
    flops: float
    loss: float
    run: str
    kl_depth: float | None = None  # KL effective depth, where evaluation has joined it to the record


def pass_ladders(cells: Sequence[PassRun]) -> dict[float, Ladder]:
    """Ladders over depth, one for each number of passes."""
    found: dict[float, Ladder] = {}
    for passes in sorted({cell.passes for cell in cells}):
        own = [cell for cell in cells if cell.passes == passes and np.isfinite(cell.loss)]
        if len(own) >= 2:
            flops, loss = np.array([c.flops for c in own]), np.array([c.loss for c in own])
            found[float(passes)] = make_ladder(f"K = {passes}", flops, loss)
    return found


def matched_compute_slices(
    cells: Sequence[PassRun], count: int, interpolation: RungInterpolation = "log-log"
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


def loss_panel(title: str, cells: Sequence[PassRun]) -> Panel:
    """Loss against compute, one line for each number of passes."""
    series: list[Series] = []
    for passes in sorted({cell.passes for cell in cells}):
        own = sorted((c for c in cells if c.passes == passes and np.isfinite(c.loss)), key=lambda c: c.flops)
        label, curve = family_curve("passes", passes)
        x, y = [c.flops for c in own], [c.loss for c in own]
        series.append(points(label, x, y, [c.run for c in own], **curve))
        series.append(line(label, x, y, **curve))
    return Panel(title, Axis("compute (FLOPs)", "log"), Axis("validation loss"), tuple(series))


def slice_panel(title: str, slices: Sequence[ComputeSlice]) -> Panel:
    """Loss against passes at matched compute, with the parabolas' minima."""
    series: list[Series] = []
    for row in slices:
        label, curve = family_curve("FLOPs", row.budget)
        x, y = list(row.losses), list(row.losses.values())
        if not x:
            continue
        series.append(points(label, x, y, **curve))
        if row.best is not None:
            series += parabola_or_segments(label, x, y, row.best, log=True, **curve)
            series.append(optimum_star(label, row.best, note="best", **curve))
    return Panel(
        title, Axis("passes K", "log"), Axis("validation loss", "log"), tuple(series),
        caption="Losses are interpolated between neighbouring depths; hollow stars are the best measured K.",
    )  # fmt: skip


def slice_table(title: str, slices: Sequence[ComputeSlice]) -> Table:
    """The optimum of each budget."""
    rows = tuple(
        (row.budget, row.best.x if row.best else None, row.best.interior if row.best else None,
         row.best.loss if row.best else None, row.losses.get(1.0))
        for row in slices
    )  # fmt: skip
    return Table(title, ("FLOPs", "best K", "inside", "loss there", "loss at K = 1"), rows)


def slice_values(slices: Sequence[ComputeSlice]) -> list[dict[str, Any]]:
    """The slices as JSON values."""
    return [
        {
            "budget": row.budget,
            "losses": {f"{k:g}": loss for k, loss in row.losses.items()},
            "best": row.best.x if row.best else None,
            "interior": row.best.interior if row.best else None,
        }
        for row in slices
    ]


def range_sentence(name: str, slices: Sequence[ComputeSlice]) -> str:
    """A sentence: the best number of passes at the lowest and at the highest budget."""
    known = [row for row in slices if row.best is not None]
    if not known:
        return f"{name}: no budget is covered by two numbers of passes, so there is nothing to compare."
    first, last = known[0], known[-1]
    assert first.best is not None and last.best is not None
    mark = (
        ""
        if all(row.best and row.best.interior for row in known)
        else " (some are best measured, not optima)"
    )
    return (
        f"{name}: the best number of passes goes from {_optimum(first.best)} at {format_flops(first.budget)} "
        f"FLOPs to {_optimum(last.best)} at {format_flops(last.budget)}{mark}."
    )


def _optimum(best: Vertex) -> str:
    """An optimum with its interval, where the sweep gives a bounded one."""
    if best.censored:
        return f"{best.x:.2g}"
    if best.interval is None or not all(map(math.isfinite, best.interval)):
        return f"{best.x:.2g} (without an interval)"
    return f"{best.x:.2g} ({best.interval[0]:.2g} to {best.interval[1]:.2g})"
