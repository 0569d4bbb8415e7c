"""When to grow, at fixed depth and compute, and the affine law its token allocation follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from steepen.errors import UsageError
from steepen.laws.fits.drift import AffineLaw, fit_affine
from steepen.laws.fits.vertex import Vertex, find_vertex
from steepen.model.arm import Arm
from steepen.recipe.flops import compute_active_parameters
from steepen.recipe.growth_law import GrowthLaw
from steepen.recipe.recipe import Recipe
from steepen.recipe.recipe_file import RecipeFile
from steepen.studies.answer import Answer, Axis, Panel, Series, Study, StudyFit, Table
from steepen.studies.context import Arms, StudyContext, find_arms, growth_sweep_run, loss_or_inf
from steepen.studies.driver.run_concurrently import RunGenerator, run_concurrently
from steepen.studies.plotting import family_curve, line, points, sweep_series
from steepen.utils.json_io import json_safe

SECTION = "Appendix A.2.3, Choosing the Growth Target and Transition"


@dataclass(frozen=True)
class RhoSweep:
    """One depth and budget: its sweep of ρ, and the optimum."""

    depth: int
    tpp: float  # without growth
    rho: tuple[float, ...]
    losses: tuple[float, ...]
    runs: tuple[str, ...]
    vertex: Vertex
    full_expansion: float  # E_4/E_2

    @property
    def expansion(self) -> float:
        """E_ρ*/E_2."""
        return 1 + self.vertex.x * (self.full_expansion - 1)


def growth_timing(context: StudyContext, *, arms: Arms = ()) -> Study:
    """Appendix "Choosing the Growth Target and Transition", figure "Growth timing, token allocation…".

    At anchor depths and budgets ρ is swept with tokens adjusted to fixed compute. Parabolas of loss against
    ρ give ρ*; the tokens per parameter at the optimum against those without growth follow a line, whose
    coefficients (a, b) are the growth law a recipe uses.
    """
    grid = context.preset.grids.growth_timing
    panels: list[Panel] = []
    rows: list[tuple[object, ...]] = []
    runs: list[str] = []
    found: list[str] = []
    fits: list[StudyFit] = []
    notes: list[str] = []
    values: dict[str, object] = {}
    recipes: list[RecipeFile] = []

    def measured(arm: Arm) -> RunGenerator:
        if not arm.passes.grows:
            raise UsageError(
                f"growth-timing needs a growing arm, e.g. untied-grow; {arm.name} does not grow."
            )
        recipe = context.recipe(arm)
        keys = [(d, tpp, rho) for d in grid.depths for tpp in sorted(grid.tpp) for rho in sorted(grid.rho)]
        planned = [
            growth_sweep_run(context, recipe, arm, d, context.flops_at_tpp(arm, d, tpp), rho)
            for d, tpp, rho in keys
        ]
        specs = [context.spec(one) for one, _ in planned]
        losses = [loss_or_inf(record) for record in (yield specs)]
        runs.extend(spec.hash for spec in specs)
        anchors: list[RhoSweep] = []
        for depth in grid.depths:
            for tpp in sorted(grid.tpp):
                own = [i for i, key in enumerate(keys) if key[:2] == (depth, tpp) and np.isfinite(losses[i])]
                x = [planned[i][1] for i in own]
                if len(set(x)) < 3:
                    notes.append(f"{arm.name} d{depth} at {tpp:g}: too few runs finished for a parabola")
                    continue
                y = [losses[i] for i in own]
                vertex = find_vertex(np.array(x), np.array(y), log_x=False, log_loss=False)
                names = tuple(specs[i].hash for i in own)
                anchors.append(
                    RhoSweep(depth, tpp, tuple(x), tuple(y), names, vertex, _full(context, arm, depth))
                )
        law = _law(anchors)
        if law is not None:
            recipes.append(RecipeFile(arm.name, _with_law(recipe, law, anchors), context.preset.name))
            fits.append(StudyFit(law, "tokens per parameter with growth", "tokens per parameter", arm.name))
        found.append(_sentence(arm.name, anchors, law))
        panels.extend(_panels(arm.name, anchors, law))
        rows.extend(
            (
                arm.name,
                a.depth,
                a.tpp,
                a.vertex.x,
                a.vertex.interior,
                a.tpp / a.expansion,
                a.expansion,
                a.vertex.loss,
            )
            for a in anchors
        )
        values[arm.name] = {
            "law": None if law is None else {"a": law.a, "b": law.b, "r_squared": law.r_squared,
                                             "a_interval": law.a_interval, "b_interval": law.b_interval},
            "anchors": [
                {"depth": a.depth, "tpp": a.tpp, "rho": a.vertex.x, "interior": a.vertex.interior,
                 "expansion": a.expansion} for a in anchors
            ],
        }  # fmt: skip

    yield from run_concurrently([measured(arm) for arm in find_arms(arms or ("loop-grow", "untied-grow"))])
    return Answer(
        study="growth-timing",
        question="When should a network grow, at fixed size and compute?",
        section=SECTION,
        findings=tuple(found),
        values=json_safe(values),
        fits=tuple(fits),
        recipes=tuple(recipes),
        panels=tuple(panels),
        tables=(
            Table(
                "Optimal transitions",
                ("arm", "depth", "TPP without growth", "ρ*", "inside", "TPP at ρ*", "expansion", "loss"),
                tuple(rows),
                "Both TPP count initial stored parameters. Not inside: the best measured, not an optimum.",
                arm_column=0,
            ),
        ),
        warnings=tuple(notes),
        method=(
            "Every run of a depth and budget has the same compute; tokens follow from ρ.",
            "The affine law is fitted to interior optima only: TPP at ρ* = a·TPP without growth + b.",
            context.sweep_flops_method,
        ),
        runs=tuple(runs),
    )


def _full(context: StudyContext, arm: Arm, depth: int) -> float:
    shape = arm.shape(depth, context.size_rule)
    first, last = arm.passes.initial, arm.passes.final
    return compute_active_parameters(arm, shape, last) / compute_active_parameters(arm, shape, first)


def _law(anchors: Sequence[RhoSweep]) -> AffineLaw | None:
    inside = [anchor for anchor in anchors if anchor.vertex.interior]
    if len(inside) < 3 or len({anchor.tpp for anchor in inside}) < 2:
        return None
    x = np.array([anchor.tpp for anchor in inside])
    return fit_affine(x, np.array([anchor.tpp / anchor.expansion for anchor in inside]))


def _with_law(recipe: Recipe, law: AffineLaw, anchors: Sequence[RhoSweep]) -> Recipe:
    """The recipe with ρ by the fitted law, in place of a fixed or listed ρ."""
    inside = [anchor.tpp for anchor in anchors if anchor.vertex.interior]
    growth_law = GrowthLaw(law.a, law.b, (min(inside), max(inside)))
    return replace(recipe, rho=None, listed_rho=(), growth_law=growth_law)


def _sentence(name: str, anchors: Sequence[RhoSweep], law: AffineLaw | None) -> str:
    inside = [anchor.vertex.x for anchor in anchors if anchor.vertex.interior]
    if not inside:
        return f"{name}: no optimum lies inside its sweep of ρ; widen it."
    sentence = (
        f"{name}: ρ* runs from {min(inside):.2f} to {max(inside):.2f} over {len(inside)} depths and budgets"
    )
    if law is None:
        return f"{sentence}; too few of them for the affine law."
    return (
        f"{sentence}; TPP at ρ* = {law.a:.3f}·TPP {law.b:+.3f} (90%: {law.a_interval[0]:.3f} to "
        f"{law.a_interval[1]:.3f}, and {law.b_interval[0]:+.3f} to {law.b_interval[1]:+.3f}; R² = "
        f"{law.r_squared:.4f}), so the expansion levels off at {1 / law.a:.3f}."
    )


def _panels(name: str, anchors: Sequence[RhoSweep], law: AffineLaw | None) -> list[Panel]:
    panels: list[Panel] = []
    for depth in sorted({anchor.depth for anchor in anchors}):
        series: list[Series] = []
        for anchor in (a for a in anchors if a.depth == depth):
            label, curve = family_curve("TPP", anchor.tpp)
            series += sweep_series(
                label, anchor.rho, anchor.losses, anchor.runs, anchor.vertex, log=False, **curve
            )
        panels.append(
            Panel(
                f"d{depth}",
                Axis("ρ"),
                Axis("validation loss"),
                tuple(series),
                group=f"{name}: when to grow, at fixed size and compute",
            )
        )
    inside = [anchor for anchor in anchors if anchor.vertex.interior]
    if inside:
        tokens: list[Series] = []
        expansions: list[Series] = []
        fractions: list[Series] = []
        x = [anchor.tpp for anchor in inside]
        grid = np.geomspace(min(x), max(x), 40)
        for depth in sorted({anchor.depth for anchor in inside}):
            own = [anchor for anchor in inside if anchor.depth == depth]
            label, curve = family_curve("depth", depth)
            at = [anchor.tpp for anchor in own]
            tokens.append(points(label, at, [a.tpp / a.expansion for a in own], **curve))
            expansions.append(points(label, at, [a.expansion for a in own], **curve))
            fractions.append(points(label, at, [a.vertex.x for a in own], **curve))
            if law is not None:
                # ρ depends on the split of the blocks, which differs between depths: a line for each.
                implied = [law.growth_fraction(value, own[0].full_expansion) for value in grid]
                note = "implied by the affine law"
                fractions.append(line(label, grid, implied, role="fit", note=note, **curve))
        if law is not None:
            name_of_law = f"affine law, {law.a:.3f}·TPP {law.b:+.3f}"
            tokens.append(line(name_of_law, grid, [law.a * value + law.b for value in grid], role="fit"))
            expansions.append(line(name_of_law, grid, [law.expansion(v) for v in grid], role="fit"))
        axis = Axis("tokens per parameter without growth", "log")
        group = f"{name}: the best moment against tokens per parameter"
        panels += [
            Panel("tokens at the optimum", axis, Axis("TPP at ρ*", "log"), tuple(tokens), group=group),
            Panel("expansion", axis, Axis("compute-active expansion at ρ*"), tuple(expansions), group=group),
            Panel("growth fraction", axis, Axis("ρ*"), tuple(fractions), group=group),
        ]
    return panels
