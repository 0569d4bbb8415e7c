"""Families of ladders by the number of passes, cut at matched compute: shared by two studies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from steepen.laws.fits.matched_compute import ComputeSlice, slice_families
from steepen.laws.ladder import Ladder, make_ladder
from steepen.studies.answer import Axis, Panel, Series, Table
from steepen.studies.plotting import line, optimum_star, parabola, points, shade_levels
from steepen.utils.formatting import format_flops


@dataclass(frozen=True)
class Cell:
    """One run of a grid over depth and passes."""

    depth: int
    passes: int
    flops: float
    loss: float
    run: str


def pass_ladders(cells: Sequence[Cell]) -> dict[float, Ladder]:
    """Ladders over depth, one for each number of passes."""
    found: dict[float, Ladder] = {}
    for passes in sorted({cell.passes for cell in cells}):
        own = [cell for cell in cells if cell.passes == passes and np.isfinite(cell.loss)]
        if len(own) >= 2:
            flops, loss = np.array([c.flops for c in own]), np.array([c.loss for c in own])
            found[float(passes)] = make_ladder(f"K = {passes}", flops, loss)
    return found


def matched_compute_cuts(cells: Sequence[Cell], count: int) -> list[ComputeSlice]:
    """The best number of passes at budgets from where three families are measured to where the fewest
    passes end; families with more passes join where their ranges reach.
    """
    ladders = pass_ladders(cells)
    if len(ladders) < 3:
        return []
    low = sorted(float(ladder.flops[0]) for ladder in ladders.values())[2]
    high = float(next(iter(ladders.values())).flops[-1])
    if low > high:
        return []
    # Ends of the range are runs' own budgets: a hair inside them, so that rounding leaves none outside.
    return slice_families(ladders, np.geomspace(low * (1 + 1e-9), high * (1 - 1e-9), count))


def loss_panel(title: str, cells: Sequence[Cell]) -> Panel:
    """Loss against compute, one line for each number of passes."""
    shade = shade_levels([np.log(cell.passes) for cell in cells])
    series: list[Series] = []
    for passes in sorted({cell.passes for cell in cells}):
        own = sorted((c for c in cells if c.passes == passes and np.isfinite(c.loss)), key=lambda c: c.flops)
        curve: dict[str, Any] = {"level": shade[np.log(passes)]}
        x, y = [c.flops for c in own], [c.loss for c in own]
        series.append(points(f"K = {passes}", x, y, [c.run for c in own], **curve))
        series.append(line(f"K = {passes}", x, y, **curve))
    return Panel(title, Axis("compute (FLOPs)", "log"), Axis("validation loss"), tuple(series))


def cut_panel(title: str, cuts: Sequence[ComputeSlice]) -> Panel:
    """Loss against passes at matched compute, with the parabolas' minima."""
    shade = shade_levels([cut.budget for cut in cuts])
    series: list[Series] = []
    for cut in cuts:
        curve: dict[str, Any] = {"level": shade[cut.budget]}
        label = f"{format_flops(cut.budget)} FLOPs"
        x, y = list(cut.losses), list(cut.losses.values())
        if not x:
            continue
        series.append(points(label, x, y, **curve))
        if cut.best is not None:
            series += parabola(label, cut.best, min(x), max(x), log_x=True, log_loss=True, **curve)
            series.append(optimum_star(label, cut.best, note="best", **curve))
    return Panel(
        title, Axis("passes K", "log"), Axis("validation loss", "log"), tuple(series),
        caption="Losses are interpolated between neighbouring depths; hollow stars are the best measured K.",
    )  # fmt: skip


def cut_table(title: str, cuts: Sequence[ComputeSlice]) -> Table:
    """The optimum of each budget."""
    rows = tuple(
        (cut.budget, cut.best.x if cut.best else None, cut.best.interior if cut.best else None,
         cut.best.loss if cut.best else None, cut.losses.get(1.0))
        for cut in cuts
    )  # fmt: skip
    return Table(title, ("FLOPs", "best K", "inside", "loss there", "loss at K = 1"), rows)


def cut_values(cuts: Sequence[ComputeSlice]) -> list[dict[str, Any]]:
    """Plain data of cuts."""
    return [
        {
            "budget": cut.budget,
            "losses": {f"{k:g}": loss for k, loss in cut.losses.items()},
            "best": cut.best.x if cut.best else None,
            "interior": cut.best.interior if cut.best else None,
        }
        for cut in cuts
    ]


def range_sentence(name: str, cuts: Sequence[ComputeSlice]) -> str:
    """Where the best number of passes goes as compute grows."""
    known = [cut for cut in cuts if cut.best is not None]
    if not known:
        return f"{name}: no budget is covered by two numbers of passes, so there is nothing to compare."
    first, last = known[0], known[-1]
    assert first.best is not None and last.best is not None
    mark = (
        ""
        if all(cut.best and cut.best.interior for cut in known)
        else " (some are best measured, not optima)"
    )
    return (
        f"{name}: the best number of passes goes from {first.best.x:.2g} at {format_flops(first.budget)} "
        f"FLOPs to {last.best.x:.2g} at {format_flops(last.budget)}{mark}."
    )
