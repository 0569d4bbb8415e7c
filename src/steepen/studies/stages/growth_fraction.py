"""Stage 3: one fixed fraction of tokens after growth."""

from __future__ import annotations

import math
from typing import Any

from steepen.laws.fits.isoflop import IsoflopFit
from steepen.studies.answer import Axis, Draft, Panel, Study, StudyFit
from steepen.studies.cells import Cells, measure, table
from steepen.studies.context import Arms, StudyContext, find_growing_arms
from steepen.studies.drift import fit_growth_fraction
from steepen.studies.plotting import mark_mean, sweep_curves
from steepen.studies.sweeps import interior, mean_with_error, plan_growth_sweeps, vertices_of
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
    chosen = find_growing_arms(arms or ("untied-grow",), "growth-fraction")
    plans, left_out = plan_growth_sweeps(context, chosen, grid.depths, grid.rho)
    cells = yield from measure(context, plans, branches=True)
    draft = Draft(runs=cells.column("run"), warnings=left_out)
    rows = [_report(draft, arm.name, cells.where(arm=arm.name)) for arm in chosen]
    caption = "Empty where an anchor's optimum lies outside the sweep."
    draft.tables.append(table("Optimal growth fractions", rows, caption))
    draft.method += [
        f"Depths {', '.join(map(str, grid.depths))}, each at the compute its tokens per parameter give "
        f"without growth; ρ of {', '.join(f'{rho:g}' for rho in sorted(grid.rho))}.",
        "Parabolas of loss against ρ; censored optima take no part in the mean.",
        context.sweep_flops_method,
    ]
    question = "What fraction of the tokens should come after growth?"
    return draft.answer("growth-fraction", question, SECTION)


def adopted(fit: IsoflopFit) -> float | None:
    """The growth fraction a recipe would use; None if no anchor's optimum was inside its sweep."""
    rounded = json_safe(fit.rounded)
    return None if rounded is None else max(MIN_RHO, rounded)


def _report(draft: Draft, name: str, cells: Cells) -> dict[str, Any]:
    """Add one arm's fit, sentence, panel and values; returns its row of the table."""
    finished = cells.having("loss")
    fit = fit_growth_fraction(finished.array("budget"), finished.array("rho"), finished.array("loss"))
    rho, vertices = adopted(fit), vertices_of(fit, cells, "depth")
    draft.findings.append(_sentence(name, fit))
    draft.values[name] = {**fit.to_dict(), "rho": rho}
    draft.fits.append(StudyFit(fit, "growth fraction", "FLOPs", name))
    draft.panels.append(
        Panel(
            f"{name}: loss against the fraction of tokens after growth", Axis("ρ"), Axis("validation loss"),
            tuple(sweep_curves(cells, "rho", "loss", "depth", vertices, log=False)), mark_mean(fit.mean, 3),
            "Every run of a depth has the same compute.",
        )
    )  # fmt: skip
    draft.warnings += [f"{name}: {warning}" for warning in fit.warnings]
    if rho is not None and fit.rounded < MIN_RHO:
        draft.warnings.append(
            f"{name}: the mean rounds to {fit.rounded:g}; {MIN_RHO} is the smallest adopted"
        )
    known = {depth: vertex.x for depth, vertex in vertices.items() if vertex.interior}
    at = {f"ρ* at d{depth}": known.get(depth) for depth in cells.by("depth")}
    return {"arm": name, "mean ρ*": fit.mean, "adopted": rho, **at}


def _sentence(name: str, fit: IsoflopFit) -> str:
    known = interior(fit.vertices)
    if not known:
        return (
            f"{name}: no anchor's optimum lies inside the sweep, so no growth fraction is adopted; widen it."
        )
    cost = max(vertex.curvature / 2 * 0.1**2 for vertex in known)
    said = f"missing it by 0.1 costs at most {cost:.4f} in loss"
    unsure = sum(vertex.interval is None or not all(map(math.isfinite, vertex.interval)) for vertex in known)
    if unsure:
        said = f"{unsure} of these optima have no bounded interval, so other fractions may be as good"
    return (
        f"{name}: ρ = {adopted(fit):g} of the tokens after growth (mean optimum "
        f"{mean_with_error(fit, 3)} over {len(known)} of {len(fit.vertices)} anchors); {said}."
    )
