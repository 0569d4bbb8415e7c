"""The passes study: how many core passes, in ladders of fixed tokens and at fixed depth and compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from steepen.errors import UsageError
from steepen.laws.fits.isoflop import PowerLawFit, fit_power_law
from steepen.model.arms import family_arm, find_arm
from steepen.recipe.flops import compute_active_parameters
from steepen.recipe.hyperparameters import paper_code
from steepen.recipe.passes_law import PassesLaw
from steepen.studies.answer import Answer, Axis, Draft, Panel, Series, Study, StudyFit, Work
from steepen.studies.cells import Cells, Plan, measure, plan_grid, run_concurrently, table
from steepen.studies.context import StudyContext
from steepen.studies.design import matched_compute as families
from steepen.studies.drift import Drift
from steepen.studies.driver.journal import Journal, find_study_folder
from steepen.studies.plotting import line, points, sweep_curves
from steepen.studies.registry import choose_parts
from steepen.studies.sweeps import Optima, Optimum, find_optima, fit_drift_over, interior, law_values

SECTION = "Appendix A.2.2, Choosing the Number of Core Passes"
FAMILIES = {"tied": "loop", "untied": "untied"}
# The laws of the optimum against the tokens per parameter of one pass, by their names in the answer.
QUANTITIES = {"expansion": "expansion at K*", "tpp": "tokens per parameter at K*", "passes": "best passes K*"}
VALUES = {"expansion": "expansion", "tpp": "tpp_at_optimum", "passes": "x"}  # their values of an optimum


def passes(context: StudyContext, *, parts: Sequence[str] = ()) -> Study:
    """Appendix "Choosing the Number of Core Passes": fixed-token ladders, and fixed anchors.

    `tokens`: for every K a ladder of depths on the base tokens, tied and untied, compared at matched compute.
    `anchor`: at fixed depth and compute more passes mean fewer tokens; the optimum's expansion and tokens per
    parameter are fitted against the tokens per parameter of one pass. Both use Operator-1's base recipe.
    `hyperparameters` (only where asked for): with the tokens fixed, does K move the best values?
    """
    names = choose_parts("passes", parts, default=("tokens", "anchor"))
    works = {"tokens": _fixed_tokens, "anchor": _fixed_anchor, "hyperparameters": _hyperparameters}
    done: list[Draft] = yield from run_concurrently([works[name](context) for name in names])
    draft = Draft()
    for name, part in zip(names, done, strict=True):
        draft.add(part, part=name)
    draft.method += [
        f"Operator-1's base recipe, constant over sizes; fixed-token ladders have "
        f"{context.preset.fixed_tokens:,} tokens.",
        "Optima are vertices of parabolas of log loss against log K; those that measured K do not "
        "bracket take no part in the laws.",
        context.sweep_flops_method,
    ]
    return draft.answer("passes", "How many times should the core be applied?", SECTION)


def _fixed_tokens(context: StudyContext) -> Work[Draft]:
    grid, tokens = context.preset.grids.passes, context.preset.fixed_tokens
    recipe = context.constant_recipe(find_arm("operator-1"))

    def plan(family: str, passes: int, depth: int) -> Plan:
        arm = families.operator_arm(FAMILIES[family], passes)
        return recipe.at_budget(arm, depth, context.size_rule, tokens=tokens), {}

    plans = plan_grid(plan, family=FAMILIES, passes=sorted(grid.passes), depth=grid.depths)
    cells = yield from measure(context, plans)
    draft = Draft(runs=cells.column("run"))
    for family in FAMILIES:
        own = cells.where(family=family)
        slices = families.matched_compute_slices(own, grid.budgets)
        draft.findings.append(families.range_sentence(f"{family}, fixed tokens", slices))
        panels = (
            families.loss_panel(f"{family}: fixed-token ladders", own),
            families.slice_panel(f"{family}: passes at matched compute", slices),
        )
        draft.panels += [replace(one, group="Passes in ladders of fixed tokens", columns=2) for one in panels]
        draft.tables.append(families.slice_table(f"{family}: best passes at matched compute", slices))
        draft.values[family] = families.slice_values(slices)
    return draft


def _fixed_anchor(context: StudyContext) -> Work[Draft]:
    grid, one_pass = context.preset.grids.passes, find_arm("operator-1")
    recipe = context.constant_recipe(one_pass)

    def plan(family: str, depth: int, tpp: float, passes: int) -> Plan:
        flops = context.flops_at_tpp(one_pass, depth, tpp)
        return context.run_at_flops(recipe, families.operator_arm(FAMILIES[family], passes), depth, flops), {}

    axes = {"depth": grid.anchors, "tpp": sorted(grid.anchor_tpp), "passes": sorted(grid.passes)}
    cells = yield from measure(context, plan_grid(plan, family=FAMILIES, **axes), branches=True)
    draft = Draft(runs=cells.column("run"))
    for family in FAMILIES:
        optima = find_optima(cells.where(family=family), ("depth", "tpp"), "passes")
        _report(draft, family, optima.map(lambda one, family=family: _at_optimum(context, family, one)))
    return draft


def _at_optimum(context: StudyContext, family: str, one: Optimum) -> Optimum:
    """With expansion and tokens per stored parameter at K*, and whether measured K have it between them."""
    arm, depth = families.operator_arm(FAMILIES[family], 2), one["depth"]
    shape = arm.shape(depth, context.size_rule)
    # Both counts are straight lines in K, so they can be evaluated at a fractional K*.
    active = [compute_active_parameters(arm, shape, k) for k in (1, 2)]
    stored = [context.stored_parameters(arm, depth, k) for k in (1, 2)]
    expansion = 1 + (one.x - 1) * (active[1] / active[0] - 1)
    size = 1 + (one.x - 1) * (stored[1] / stored[0] - 1)
    bracketed = one.interior and one.vertex.bracketed
    return one.plus(bracketed=bracketed, expansion=expansion, tpp_at_optimum=one["tpp"] / (expansion * size))


def _report(draft: Draft, family: str, optima: Optima) -> None:
    inside = optima.where(bracketed=True)
    laws: dict[str, PowerLawFit] = {}
    found = f"{len(inside)} of {len(optima)} optima are bracketed by measured passes, too few for a law."
    if len(inside.by("tpp")) >= 2:
        laws = {name: fit_power_law(inside.array("tpp"), inside.array(VALUES[name])) for name in QUANTITIES}
        draft.fits += [
            StudyFit(law, quantity, "tokens per parameter at one pass", family)
            for quantity, law in laws.items()
        ]
        expansion, tpp = laws["expansion"], laws["tpp"]
        found = (
            f"expansion at K* = {expansion.coefficient:.2f}·TPP^{_with_error(expansion)} and "
            f"TPP at K* = {tpp.coefficient:.2f}·TPP^{_with_error(tpp)} over "
            f"{len(inside)} of {len(optima)} optima; K* runs from {min(inside.column('x')):.2f} to "
            f"{max(inside.column('x')):.2f}."
        )
    draft.findings.append(f"{family}, fixed anchor: {found}")
    draft.panels += [*_sweep_panels(family, optima), *_law_panels(family, optima, laws)]
    columns = {
        "depth": "depth", "TPP at K = 1": "tpp", "K*": "x", "bracketed": "bracketed",
        "expansion at K*": "expansion", "TPP at K*": "tpp_at_optimum",
    }  # fmt: skip
    caption = "Bracketed: the lowest measured loss is at neither end of the sweep; others are in no law."
    draft.tables.append(table(f"{family}: best passes at fixed anchor and compute", optima, caption, columns))
    numbers = ("coefficient", "exponent", "interval")
    draft.values[family] = {
        "laws": {name: {one: getattr(law, one) for one in numbers} for name, law in laws.items()},
        "anchors": optima.dicts("depth", "tpp", passes="x", interior="interior"),
    }


def _with_error(law: PowerLawFit) -> str:
    """An exponent with its standard error, where there are points for one."""
    error = f" ± {law.standard_error:.2f}" if law.degrees_of_freedom > 0 else ""
    return f"({law.exponent:.2f}{error})"


def _sweep_panels(family: str, optima: Optima) -> list[Panel]:
    """Loss against K less the loss at K = 1, a panel for each depth."""
    axes = Axis("passes K", "log"), Axis("loss − loss at K = 1")
    caption = "At fixed compute: more passes mean fewer tokens."
    panels, group = list[Panel](), f"{family}: passes at fixed anchor and compute"
    for depth, at in optima.by("depth").items():
        series: list[Series] = []
        for one in at:
            # As it is where one pass was not measured.
            base = next(iter(one.cells.where(passes=1).column("loss")), 0.0)
            curves = sweep_curves(one.cells, "passes", "loss", "tpp", {one["tpp"]: one.vertex}, log=True)
            series += [replace(curve, y=tuple(value - base for value in curve.y)) for curve in curves]
        panels.append(Panel(f"{family}, d{depth}", *axes, tuple(series), (("y", 0.0, ""),), caption, group))
    return panels


def _law_panels(family: str, optima: Optima, laws: dict[str, PowerLawFit]) -> list[Panel]:
    """What is best against the tokens per parameter of one pass, with the fitted laws."""
    panels, group = list[Panel](), f"{family}: the best passes against tokens per parameter"
    inside, outside = optima.where(bracketed=True), optima.where(bracketed=False)
    x = inside.column("tpp")
    for name, label in QUANTITIES.items():
        y, series = VALUES[name], list[Series]()
        if inside:
            series.append(points("optima", x, inside.column(y), role="optimum"))
        if outside:
            columns = outside.column("tpp"), outside.column(y)
            series.append(points("censored", *columns, role="censored", filled=False))
        if name in laws:
            ends = [min(x), max(x)]
            series.append(line("fitted", ends, map(laws[name].predict, ends), role="fit"))
        axes = Axis("tokens per parameter at K = 1", "log"), Axis(label, "log")
        panels.append(Panel(f"{family}: {label}", *axes, tuple(series), group=group))
    return panels


def _hyperparameters(context: StudyContext) -> Work[Draft]:
    """Figure "Hyperparameter sensitivity to stored depth and recurrence" (b).

    At the base depth each family trains the tokens of its two-pass recipe, whatever K, with one
    hyperparameter at multiples of the two-pass base values. The optimum's drift with K is a power law.
    """
    grid, depth = context.preset.grids.passes, context.preset.base_depth

    def plan(family: str, passes: int, name: str, multiple: float) -> Plan:
        two = family_arm(FAMILIES[family], 2)
        recipe = context.constant_recipe(two)
        tokens = recipe.tpp * context.stored_parameters(two, depth)
        arm = family_arm(FAMILIES[family], passes)
        run = recipe.at_budget(arm, depth, context.size_rule, tokens=tokens)
        value = getattr(run.hyperparameters, name) * multiple
        return replace(run, hyperparameters=replace(run.hyperparameters, **{name: value})), {}

    axes = {"passes": sorted(grid.transfer_passes), "name": grid.transferred}
    multiples = sorted(context.preset.grids.lr_rule.multiples)
    cells = yield from measure(context, plan_grid(plan, family=FAMILIES, **axes, multiple=multiples))
    draft, rows = Draft(runs=cells.column("run")), list[dict[str, Any]]()
    for family in FAMILIES:
        of_family = cells.where(family=family)
        values, words = dict[str, Any](), list[str]()
        for name in grid.transferred:
            own = of_family.where(name=name)
            drift = fit_drift_over(own, "passes")
            draft.panels += [_drift_panel(family, name, own, drift)] if own.having("loss") else []
            if drift is None:
                continue
            law, optima = law_values(drift.law), [[v.budget, v.x, v.interior] for v in drift.vertices]
            values[name] = {"optima": optima, "exponent": law["exponent"]}
            words.append(_drift_words(name, drift))
            draft.fits.append(StudyFit(drift, name, "passes", family))
            rows += [
                {"family": family, "hyperparameter": name, "K": k, "best multiple": x, "inside": inside,
                 "exponent in K": law["exponent"], "p": law["p"]}
                for k, x, inside in optima
            ]  # fmt: skip
        tokens = f"{of_family[0].spec.tokens:,} tokens at every K"
        draft.findings.append(f"{family}, {tokens}: the best values go from {'; '.join(words)}.")
        draft.values[family] = values
    caption = "Multiples of the two-pass base value; the exponent is of best ∝ K^exponent."
    draft.tables.append(table("Best values by number of passes", rows, caption))
    return draft


def _drift_words(name: str, drift: Drift) -> str:
    """Where one hyperparameter's optimum is at the smallest and the largest K."""
    known, code = interior(drift.vertices), paper_code(name) or name
    if len(known) < 2:
        return f"{code}: fewer than two optima inside"
    first, last, p = known[0], known[-1], law_values(drift.law)["p"]
    ends = f"×{first.x:.2f} at K = {first.budget:g} to ×{last.x:.2f} at K = {last.budget:g}"
    return f"{code} {ends}" + ("" if p is None else f", p = {p:.2g}")


def _drift_panel(family: str, name: str, cells: Cells, drift: Drift | None) -> Panel:
    vertices = {v.budget: v for v in drift.vertices} if drift else {}
    axes = Axis(f"{name.replace('_', ' ')} (× base)", "log"), Axis("validation loss", "log")
    return Panel(
        f"{family}: {paper_code(name) or name}", *axes,
        tuple(sweep_curves(cells, "multiple", "loss", "passes", vertices, log=True)), (("x", 1.0, ""),),
        group="Hyperparameters at other numbers of passes, tokens fixed", columns=5,
    )  # fmt: skip


def laws_of_study(study: str, studies: Path) -> tuple[PassesLaw, ...]:
    """The expansion laws of a study, tied and untied; raises UsageError if it has none."""
    entry = Journal.read(find_study_folder(study, studies)).entry
    answer = None if entry.answer is None else Answer.from_dict(entry.answer)
    found = [
        PassesLaw(one.arm == "tied", one.fit.coefficient, one.fit.exponent)
        for one in (answer.fits if answer is not None else ())
        if one.quantity == "expansion" and isinstance(one.fit, PowerLawFit)
    ]
    if not found:
        raise UsageError(
            f"the study {study} has no law of the best number of passes: it needs a finished "
            "`steepen study passes --part anchor` with optima inside its sweeps."
        )
    return tuple(found)
