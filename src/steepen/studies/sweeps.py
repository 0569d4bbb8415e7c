"""Optima of sweeps: the vertex of every group of cells, and how an optimum drifts with size.

A sweep tries a few values of one thing at equal compute. Near its optimum log loss is a parabola of the
logarithm, so its vertex is better known than the best of the values tried. A vertex outside the values tried
is censored: it says only on which side the optimum lies. It is shown (hollow), and takes part in no mean and
no law, which its arbitrary distance would bias.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from steepen.errors import UsageError
from steepen.laws.fits.isoflop import IsoflopFit, PowerLawFit, fit_isoflop, fit_isoflop_runs
from steepen.laws.fits.vertex import MIN_POINTS, Vertex, find_vertex
from steepen.model.arm import Arm
from steepen.studies.cells import Cells, Plan, Row, plan_grid
from steepen.studies.context import StudyContext, starting_arm
from steepen.studies.drift import Drift, fit_drift
from steepen.utils.rows import Rows


def plan_growth_sweeps(
    context: StudyContext,
    arms: Iterable[Arm],
    depths: Sequence[int],
    rho: Iterable[float],
    tpp: Iterable[float] = (),
) -> tuple[list[Plan], list[str]]:
    """The runs of sweeps over ρ at fixed compute, and a warning of each depth at which an arm does not exist.

    A sweep has the compute of `tpp` tokens per parameter without growth, by default those of the recipe.
    """

    def plan(arm: Arm, depth: int, tpp: float, rho: float) -> Plan:
        flops = context.flops_at_tpp(arm, depth, tpp)
        run, realized = _growth_run(context, arm, depth, flops, rho)
        return run, {"budget": flops, **realized}

    plans, left_out = list[Plan](), list[str]()
    for arm in arms:
        possible, warnings = context.possible_depths(arm, depths)
        budgets = sorted(tpp) or [context.recipe(arm).tpp]
        plans += plan_grid(plan, arm=[arm], depth=possible, tpp=budgets, rho=sorted(rho))
        left_out += warnings
    return plans, left_out


def _growth_run(context: StudyContext, arm: Arm, depth: int, flops: float, rho: float) -> Plan:
    """A run of such a sweep, and the ρ it has: growth starts at a whole step.

    ρ = 0 is the network that the growing one starts as, under the growing arm's recipe.
    """
    recipe = context.recipe(arm)
    if all(stage.start is not None for stage in arm.passes.stages):
        raise UsageError(
            f"the starts of {arm.name}'s stages are given: leave out @ and what follows, to sweep ρ."
        )
    if rho == 0:
        start = starting_arm(arm)
        if arm.passes.axes != ("passes",):
            first = replace(arm.passes, stages=arm.passes.stages[:1])
            start = replace(arm, name=f"{arm.name}-start", passes=first)
        return context.run_at_flops(recipe, start, depth, flops), {"rho": 0.0}
    run = context.run_at_flops(recipe, arm, depth, flops, rho)
    return run, {"rho": 1 - (run.growth_step or 0) / run.steps}


@dataclass(frozen=True)
class Optimum(Row):
    """The optimum of one sweep. `values` are what its runs have in common, and what follows from it."""

    cells: Cells
    vertex: Vertex

    @property
    def x(self) -> float:
        """Where the optimum is; of a sweep that does not contain one, the best measured."""
        return self.vertex.x

    @property
    def loss(self) -> float:
        """The loss there."""
        return self.vertex.loss

    @property
    def interior(self) -> bool:
        """Whether the sweep contains its optimum."""
        return self.vertex.interior


Optima = Rows[Optimum]


def vertices_by(name: str, optima: Optima) -> dict[Any, Vertex]:
    """The vertex of every sweep, by a value that its runs have in common."""
    return {one[name]: one.vertex for one in optima}


def find_optima(
    cells: Cells, by: tuple[str, ...], x: str, y: str = "loss", log: bool = True, nearest: int | None = None
) -> Optima:
    """The optimum over x of every group of finished runs that a parabola can be put through.

    The parabola is of log y against log x, or with `log=False` of y against x; through the `nearest` lowest
    points where that is given.
    """
    found: list[Optimum] = []
    for key, own in cells.having(y).by(*by).items():
        if len(set(own.column(x))) >= MIN_POINTS:
            vertex = find_vertex(own.array(x), own.array(y), log_x=log, log_loss=log, nearest=nearest)
            values = dict(zip(by, key if len(by) > 1 else (key,), strict=True))
            found.append(Optimum(values, own, vertex))
    return Rows(found)


def vertices_of(fit: IsoflopFit, cells: Cells, by: str) -> dict[Any, Vertex]:
    """The vertex of every sweep of a fit, by another value of its runs than their budget."""
    return {
        level: vertex
        for level, own in cells.by(by).items()
        for vertex in fit.vertices
        if math.isclose(vertex.budget, own[0]["budget"], rel_tol=1e-6)
    }


def fit_token_sweeps(cells: Cells, x: str) -> IsoflopFit:
    """The optimal x of every budget, of finished runs; those of one trunk are resampled together."""
    columns, trunks = (cells.array("budget"), cells.array(x), cells.array("loss")), cells.column("trunk")
    return fit_isoflop(*columns) if len(set(trunks)) == len(trunks) else fit_isoflop_runs(*columns, trunks)


def fit_drift_over(cells: Cells, size: str) -> Drift | None:
    """The drift with size of a hyperparameter's best `multiple`; None if no size has runs for a parabola."""
    sweeps = {
        float(level): (own.array("multiple"), own.array("loss"))
        for level, own in cells.having("loss").by(size).items()
        if len(own) >= MIN_POINTS
    }
    return fit_drift(sweeps) if sweeps else None


def law_values(law: PowerLawFit | None) -> dict[str, Any]:
    """Exponent, standard error, p-value and detectable exponent of a law; two points have only the first."""
    if law is None or law.degrees_of_freedom < 1:
        return {"exponent": law and law.exponent, "error": None, "p": None, "detectable": None}
    known = {"error": law.standard_error, "p": law.p_value, "detectable": law.detectable}
    return {"exponent": law.exponent, **known}


def interior(vertices: Iterable[Vertex]) -> list[Vertex]:
    """The optima that lie inside their sweeps."""
    return [vertex for vertex in vertices if vertex.interior]


def mean_with_error(fit: IsoflopFit, digits: int) -> str:
    """The mean optimum in words, with its standard error if there is one."""
    error = error_of_mean(fit)
    return f"{fit.mean:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def error_of_mean(fit: IsoflopFit) -> float | None:
    """Standard error of the mean optimum of several sweeps, from their spread; None for fewer than two."""
    # Not from the parabolas' own errors: those know nothing of what differs from budget to budget.
    x = [vertex.x for vertex in interior(fit.vertices)]
    return float(np.std(x, ddof=1)) / math.sqrt(len(x)) if len(x) > 1 else None
