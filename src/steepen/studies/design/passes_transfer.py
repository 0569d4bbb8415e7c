"""Part `hyperparameters` of the passes study: do the best values hold when the number of passes changes?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from steepen.laws.fits.drift import Drift
from steepen.model.arms import family_arm
from steepen.recipe.hyperparameters import paper_code
from steepen.studies.answer import Axis, Draft, Panel, StudyFit, Work
from steepen.studies.cells import Cells, Plan, measure, plan_grid, table_of
from steepen.studies.context import StudyContext
from steepen.studies.plotting import sweep_curves
from steepen.studies.sweeps import fit_drift_over, law_values

Drifts = Mapping[tuple[str, str], Drift]  # by family and hyperparameter


def transfer_across_passes(context: StudyContext, families: Mapping[str, str]) -> Work[Draft]:
    """Figure "Hyperparameter sensitivity to stored depth and recurrence" (b).

    At the base depth each family trains the tokens of its two-pass recipe, whatever K, with one
    hyperparameter at multiples of the two-pass base values. The optimum's drift with K is a power law.
    """
    grid, depth = context.preset.grids.passes, context.preset.base_depth

    def plan(family: str, passes: int, name: str, multiple: float) -> Plan:
        two = family_arm(families[family], 2)
        recipe = context.constant_recipe(two)
        tokens = recipe.tpp * context.stored_parameters(two, depth)
        arm = family_arm(families[family], passes)
        run = recipe.at_budget(arm, depth, context.size_rule, tokens=tokens)
        value = getattr(run.hyperparameters, name) * multiple
        return replace(run, hyperparameters=replace(run.hyperparameters, **{name: value})), {}

    axes = {"passes": sorted(grid.transfer_passes), "name": grid.transferred}
    multiples = sorted(context.preset.grids.lr_rule.multiples)
    cells = yield from measure(context, plan_grid(plan, family=families, **axes, multiple=multiples))
    keys = product(families, grid.transferred)
    sweeps = {(family, name): cells.where(family=family, name=name) for family, name in keys}
    drifts = {key: drift for key, own in sweeps.items() if (drift := fit_drift_over(own, "passes"))}
    tokens = {family: cells.where(family=family)[0].spec.tokens for family in families}
    caption = "Multiples of the two-pass base value; the exponent is of best ∝ K^exponent."
    return Draft(
        findings=[_sentence(family, drifts, tokens[family]) for family in families],
        values={
            family: {name: _values(drift) for (own, name), drift in drifts.items() if own == family}
            for family in families
        },
        fits=[StudyFit(drift, name, "passes", family) for (family, name), drift in drifts.items()],
        panels=[_panel(*key, own, drifts.get(key)) for key, own in sweeps.items() if own.having("loss")],
        tables=[table_of("Best values by number of passes", _rows(drifts), caption)],
        runs=cells.column("run"),
    )


def _values(drift: Drift) -> dict[str, object]:
    return {
        "optima": [[v.budget, v.x, v.interior] for v in drift.vertices],
        "exponent": law_values(drift.law)["exponent"],
    }


def _sentence(family: str, drifts: Drifts, tokens: int) -> str:
    words = [_words(name, drift) for (own, name), drift in drifts.items() if own == family]
    return f"{family}, {tokens:,} tokens at every K: the best values go from {'; '.join(words)}."


def _words(name: str, drift: Drift) -> str:
    """Where one hyperparameter's optimum is at the smallest and the largest K."""
    inside = [v for v in drift.vertices if v.interior]
    code = paper_code(name) or name
    if len(inside) < 2:
        return f"{code}: fewer than two optima inside"
    first, last, p = inside[0], inside[-1], law_values(drift.law)["p"]
    ends = f"×{first.x:.2f} at K = {first.budget:g} to ×{last.x:.2f} at K = {last.budget:g}"
    return f"{code} {ends}" + ("" if p is None else f", p = {p:.2g}")


def _panel(family: str, name: str, cells: Cells, drift: Drift | None) -> Panel:
    vertices = {v.budget: v for v in drift.vertices} if drift else {}
    return Panel(
        f"{family}: {paper_code(name) or name}",
        Axis(f"{name.replace('_', ' ')} (× base)", "log"),
        Axis("validation loss", "log"),
        tuple(sweep_curves(cells, "multiple", "loss", "passes", vertices, log=True)),
        (("x", 1.0, ""),),
        group="Hyperparameters at other numbers of passes, tokens fixed",
        columns=5,
    )


def _rows(drifts: Drifts) -> list[dict[str, Any]]:
    return [
        {
            "family": family, "hyperparameter": name, "K": vertex.budget, "best multiple": vertex.x,
            "inside": vertex.interior, "exponent in K": law["exponent"], "p": law["p"],
        }
        for (family, name), drift in drifts.items()
        for law in (law_values(drift.law),)
        for vertex in drift.vertices
    ]  # fmt: skip
