"""Stage 3: one fixed fraction of tokens after growth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from steepen.errors import UsageError
from steepen.laws.fits.drift import fit_growth_fraction
from steepen.laws.fits.isoflop import IsoflopFit
from steepen.model.arm import Arm
from steepen.studies.answer import Answer, Axis, Panel, Series, Study, StudyFit, Table
from steepen.studies.context import Arms, StudyContext, find_arms, growth_sweep_run, loss_or_inf
from steepen.studies.driver.run_concurrently import RunGenerator, run_concurrently
from steepen.studies.plotting import (
    family_curve,
    finite_or_none,
    mean_with_error,
    optimum_star,
    parabola_or_segments,
    points,
)
from steepen.utils.json_io import json_safe

SECTION = "Appendix A.4.3, Stage 3: Choose a Fixed Growth Fraction"
MIN_RHO = 0.1  # lower bound, so that a growing arm grows


def growth_fraction(context: StudyContext, *, arms: Arms = ()) -> Study:
    """Appendix "Stage 3: Choose a Fixed Growth Fraction".

    At three anchors, each at the compute that its stage-2 TPP gives without growth, ρ (the fraction of tokens
    after growth) is swept with tokens adjusted to that compute. A parabola of loss against ρ gives each
    anchor's optimum; their mean is rounded to one decimal.
    """
    grid = context.preset.grids.growth_fraction
    found: dict[str, IsoflopFit] = {}
    optima: dict[str, list[float | None]] = {}
    panels: list[Panel] = []
    runs: list[str] = []
    notes: list[str] = []

    def measured(arm: Arm) -> RunGenerator:
        if not arm.passes.grows:
            raise UsageError(
                f"{arm.name} does not grow, so there is no growth fraction to choose; try untied-grow."
            )
        recipe = context.recipe(arm)
        keys = [(depth, rho) for depth in grid.depths for rho in sorted(grid.rho)]
        budgets = {depth: context.flops_at_tpp(arm, depth, recipe.tpp) for depth in grid.depths}
        planned = [growth_sweep_run(context, recipe, arm, depth, budgets[depth], rho) for depth, rho in keys]
        specs = [context.spec(one) for one, _ in planned]
        losses = np.array([loss_or_inf(record) for record in (yield specs)])
        x = np.array([rho for _, rho in planned])
        budget = np.array([budgets[depth] for depth, _ in keys])
        good = np.isfinite(losses)
        fit = fit_growth_fraction(budget[good], x[good], losses[good])
        found[arm.name] = fit
        optima[arm.name] = [_at(fit, budgets[depth]) for depth in grid.depths]
        notes.extend(f"{arm.name}: {warning}" for warning in fit.warnings)
        names = [spec.hash for spec in specs]
        runs.extend(names)
        rows = list(zip((depth for depth, _ in keys), x.tolist(), losses.tolist(), names, strict=True))
        panels.append(_panel(arm.name, fit, budgets, rows))
        if finite_or_none(fit.rounded) is not None and fit.rounded < MIN_RHO:
            notes.append(f"{arm.name}: the mean rounds to {fit.rounded:g}; {MIN_RHO} is the smallest adopted")

    yield from run_concurrently([measured(arm) for arm in find_arms(arms or ("untied-grow",))])
    return Answer(
        study="growth-fraction",
        question="What fraction of the tokens should come after growth?",
        section=SECTION,
        findings=tuple(_sentence(name, fit) for name, fit in found.items()),
        values=json_safe({name: {**fit.to_dict(), "rho": adopted(fit)} for name, fit in found.items()}),
        fits=tuple(StudyFit(fit, "growth fraction", "FLOPs", name) for name, fit in found.items()),
        panels=tuple(panels),
        tables=(
            Table(
                "Optimal growth fractions",
                ("arm", "mean ρ*", "adopted", *(f"ρ* at d{depth}" for depth in grid.depths)),
                tuple(
                    (name, finite_or_none(fit.mean), adopted(fit), *optima[name])
                    for name, fit in found.items()
                ),
                "Empty where an anchor's optimum lies outside the sweep.",
                arm_column=0,
            ),
        ),
        warnings=tuple(notes),
        method=(
            f"Depths {', '.join(map(str, grid.depths))}, each at the compute its tokens per parameter give "
            f"without growth; ρ of {', '.join(f'{rho:g}' for rho in sorted(grid.rho))}.",
            "Parabolas of loss against ρ; censored optima take no part in the mean.",
            context.sweep_flops_method,
        ),
        runs=tuple(runs),
    )


def adopted(fit: IsoflopFit) -> float | None:
    """The growth fraction a recipe would use; None if no anchor's optimum was inside its sweep."""
    rounded = finite_or_none(fit.rounded)
    return None if rounded is None else max(MIN_RHO, rounded)


def _at(fit: IsoflopFit, budget: float) -> float | None:
    """The optimum at one budget, if it is inside the sweep."""
    found = [v.x for v in fit.vertices if v.interior and abs(v.budget / budget - 1) < 1e-6]
    return found[0] if found else None


def _sentence(name: str, fit: IsoflopFit) -> str:
    inside = [vertex for vertex in fit.vertices if vertex.interior]
    if not inside:
        return (
            f"{name}: no anchor's optimum lies inside the sweep, so no growth fraction is adopted; widen it."
        )
    cost = max(vertex.curvature / 2 * 0.1**2 for vertex in inside)
    return (
        f"{name}: ρ = {adopted(fit):g} of the tokens after growth (mean optimum "
        f"{mean_with_error(fit, 3)} over {len(inside)} of {len(fit.vertices)} anchors); missing it by 0.1 "
        f"costs at most {cost:.4f} in loss."
    )


def _panel(
    name: str,
    fit: IsoflopFit,
    budgets: dict[int, float],
    rows: Sequence[tuple[int, float, float, str]],
) -> Panel:
    series: list[Series] = []
    for depth, budget in budgets.items():
        finished = [row[1:] for row in rows if row[0] == depth and np.isfinite(row[2])]
        if not finished:
            continue
        x, losses, runs = zip(*finished, strict=True)
        label, curve = family_curve("depth", depth)
        series.append(points(label, x, losses, runs, **curve))
        for vertex in fit.vertices:
            if abs(vertex.budget / budget - 1) < 1e-6:
                series += parabola_or_segments(label, x, losses, vertex, log=False, **curve)
                series.append(optimum_star(label, vertex, **curve))
    mean = finite_or_none(fit.mean)
    marks: tuple[tuple[Literal["x", "y"], float, str], ...] = ()
    if mean is not None:
        marks = (("x", mean, f"mean {mean:.3f}"),)
    return Panel(
        f"{name}: loss against the fraction of tokens after growth", Axis("ρ"), Axis("validation loss"),
        tuple(series), marks, "Every run of a depth has the same compute.",
    )  # fmt: skip
