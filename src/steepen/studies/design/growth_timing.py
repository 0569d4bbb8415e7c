"""When to grow, at fixed depth and compute, and the affine law its token allocation follows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from steepen.model.arm import Arm
from steepen.recipe.flops import relative_costs
from steepen.recipe.recipe import GrowthLaw
from steepen.recipe.recipe_choice import RecipeFile
from steepen.studies.answer import Axis, Draft, Panel, Series, Study, StudyFit
from steepen.studies.cells import Cells, measure, table
from steepen.studies.context import Arms, StudyContext, find_growing_arms
from steepen.studies.drift import AffineLaw, fit_affine
from steepen.studies.plotting import family_curve, line, points, sweep_curves
from steepen.studies.sweeps import Optima, Optimum, find_optima, plan_growth_sweeps, vertices_by

SECTION = "Appendix A.2.3, Choosing the Growth Target and Transition"


def growth_timing(context: StudyContext, *, arms: Arms = ()) -> Study:
    """Appendix "Choosing the Growth Target and Transition", figure "Growth timing, token allocation…".

    At anchor depths and budgets ρ is swept with tokens adjusted to fixed compute. Parabolas of loss against
    ρ give ρ*; the tokens per parameter at the optimum against those without growth follow a line, whose
    coefficients (a, b) are the growth law a recipe uses.
    """
    chosen = find_growing_arms(arms or ("loop-grow", "untied-grow"), "growth-timing")
    grid = context.preset.grids.growth_timing
    plans, left_out = plan_growth_sweeps(context, chosen, grid.depths, grid.rho, grid.tpp)
    cells = yield from measure(context, plans, branches=True)
    draft = Draft(runs=cells.column("run"), warnings=left_out)
    every: list[Optimum] = []
    for arm in chosen:
        every += _report(draft, context, arm, cells.where(arm=arm.name))
    columns = {
        "arm": "arm", "depth": "depth", "TPP without growth": "tpp", "ρ*": "x", "inside": "interior",
        "TPP at ρ*": "tpp_at_optimum", "expansion": "expansion", "loss": "loss",
    }  # fmt: skip
    caption = "Both TPP count initial stored parameters. Not inside: the best measured, not an optimum."
    draft.tables.append(table("Optimal transitions", every, caption, columns))
    draft.method += [
        "Every run of a depth and budget has the same compute; tokens follow from ρ.",
        "The affine law is fitted to interior optima only: TPP at ρ* = a·TPP without growth + b.",
        context.sweep_flops_method,
    ]
    question = "When should a network grow, at fixed size and compute?"
    return draft.answer("growth-timing", question, SECTION)


def _report(draft: Draft, context: StudyContext, arm: Arm, cells: Cells) -> Optima:
    """Add one arm's law, sentence, panels and values; returns its optima."""
    optima = find_optima(cells, ("arm", "depth", "tpp"), "rho", log=False).map(
        lambda one: _at_optimum(context, arm, one)
    )
    inside = optima.where(interior=True)
    law = None
    if len(inside) >= 3 and len(inside.by("tpp")) >= 2:
        tpp = inside.array("tpp")
        law = fit_affine(tpp, inside.array("tpp_at_optimum"))
        fitted = GrowthLaw(law.a, law.b, (tpp.min().item(), tpp.max().item()))
        recipe = replace(context.recipe(arm), rho=None, listed_rho=(), growth_law=fitted)
        draft.recipes.append(RecipeFile(arm.name, recipe, context.preset.name))
        draft.fits.append(StudyFit(law, "tokens per parameter with growth", "tokens per parameter", arm.name))
    draft.findings.append(_sentence(arm.name, inside, law))
    draft.panels += [*_sweep_panels(arm.name, cells, optima), *_law_panels(arm.name, inside, law)]
    draft.warnings += [
        f"{arm.name} d{depth} at {tpp:g}: too few runs finished for a parabola"
        for depth, tpp in cells.by("depth", "tpp")
        if not optima.where(depth=depth, tpp=tpp)
    ]
    draft.values[arm.name] = {
        "law": law and {"a": law.a, "b": law.b, "r_squared": law.r_squared,
                        "a_interval": law.a_interval, "b_interval": law.b_interval},
        "anchors": optima.dicts("depth", "tpp", rho="x", interior="interior", expansion="expansion"),
    }  # fmt: skip
    return optima


def _at_optimum(context: StudyContext, arm: Arm, one: Optimum) -> Optimum:
    """With the compute-active expansion E_ρ*/E_2, those of ρ = 0 and ρ = 1, and TPP at ρ*."""
    first, grown = relative_costs(arm, arm.shape(one["depth"], context.size_rule), arm.passes)
    expansion = first + one.x * (grown - first)
    at_optimum = {"expansion": expansion, "tpp_at_optimum": one["tpp"] / expansion}
    return one.plus(first_expansion=first, full_expansion=grown, **at_optimum)


def _sentence(name: str, inside: Optima, law: AffineLaw | None) -> str:
    if not inside:
        return f"{name}: no optimum lies inside its sweep of ρ; widen it."
    rho = inside.column("x")
    sentence = f"{name}: ρ* runs from {min(rho):.2f} to {max(rho):.2f} over {len(rho)} depths and budgets"
    if law is None:
        return f"{sentence}; too few of them for the affine law."
    return (
        f"{sentence}; TPP at ρ* = {law.a:.3f}·TPP {law.b:+.3f} (90%: {law.a_interval[0]:.3f} to "
        f"{law.a_interval[1]:.3f}, and {law.b_interval[0]:+.3f} to {law.b_interval[1]:+.3f}; R² = "
        f"{law.r_squared:.4f}), so the expansion levels off at {1 / law.a:.3f}."
    )


def _sweep_panels(name: str, cells: Cells, optima: Optima) -> list[Panel]:
    """Loss against ρ, a panel for each depth."""
    axes, group = (Axis("ρ"), Axis("validation loss")), f"{name}: when to grow, at fixed size and compute"
    panels: list[Panel] = []
    for depth, own in cells.by("depth").items():
        vertices = vertices_by("tpp", optima.where(depth=depth))
        series = sweep_curves(own, "rho", "loss", "tpp", vertices, log=False)
        panels.append(Panel(f"d{depth}", *axes, tuple(series), group=group))
    return panels


def _law_panels(name: str, inside: Optima, law: AffineLaw | None) -> list[Panel]:
    """Tokens, expansion and ρ at the optimum against tokens per parameter without growth."""
    if not inside:
        return []
    drawn: dict[str, list[Series]] = {"tpp_at_optimum": [], "expansion": [], "x": []}
    grid = np.geomspace(min(inside.column("tpp")), max(inside.column("tpp")), 40)
    expansion = [] if law is None else [GrowthLaw(law.a, law.b).expansion(tpp) for tpp in grid]
    for depth, own in inside.by("depth").items():
        label, curve = family_curve("depth", depth)
        for y, series in drawn.items():
            series.append(points(label, own.column("tpp"), own.column(y), **curve))
        first, full = own[0]["first_expansion"], own[0]["full_expansion"]
        if law is not None and first != full:  # a longer context changes the FLOPs of attention only
            # ρ depends on the split of the blocks, which differs between depths: a line for each.
            implied = [(value - first) / (full - first) for value in expansion]
            note = "implied by the affine law"
            drawn["x"].append(line(label, grid, implied, role="fit", note=note, **curve))
    if law is not None:
        label = f"affine law, {law.a:.3f}·TPP {law.b:+.3f}"
        drawn["tpp_at_optimum"].append(line(label, grid, law.a * grid + law.b, role="fit"))
        drawn["expansion"].append(line(label, grid, expansion, role="fit"))
    axis = Axis("tokens per parameter without growth", "log")
    group = f"{name}: the best moment against tokens per parameter"
    titles = ("tokens at the optimum", "expansion", "growth fraction")
    axes = (Axis("TPP at ρ*", "log"), Axis("compute-active expansion at ρ*"), Axis("ρ*"))
    return [
        Panel(title, axis, y, tuple(series), group=group)
        for title, y, series in zip(titles, axes, drawn.values(), strict=True)
    ]
