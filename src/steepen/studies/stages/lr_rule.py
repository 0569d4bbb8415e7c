"""Stage 4: how the learning rate must change with size, and whether anything else must.

Each arm is swept around its constant recipe; the drift of the best learning rate, to one decimal, is its
rule, and the sweeps are repeated around the scaled recipe.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from steepen.laws.fits.isoflop import PowerLawFit
from steepen.model.arm import Arm
from steepen.recipe.hyperparameters import paper_code, with_paper_code
from steepen.recipe.recipe import Recipe
from steepen.studies import plotting as plot
from steepen.studies.answer import Answer, Axis, Draft, Panel, Series, Study, StudyFit, Table, Work
from steepen.studies.cells import Cells, Plan, measure, run_concurrently, table
from steepen.studies.context import Arms, StudyContext, find_arms, starting_arm
from steepen.studies.drift import Drift
from steepen.studies.preset import SWEPT
from steepen.studies.registry import choose_parts
from steepen.studies.stages.chain_tuning import DISCRETE
from steepen.studies.sweeps import fit_drift_over, interior, law_values
from steepen.utils.rows import grouped

SECTION = "Appendix A.4.4, Stage 4: Fit the Learning-Rate Rule"
RecipeKind = Literal["constant", "scaled", "screen"]  # learning rate constant over sizes, or by the rule
# Schedule and Adam settings have listed values (those of chain tuning) instead of multiples.
LISTED: dict[str, tuple[float, ...]] = {
    name: values for settings in DISCRETE.values() for name, values in settings.items()
}
LISTED["adam_eps"] = (1e-14, 1e-12, *LISTED["adam_eps"])  # the paper's screen also goes below the base
BOTH_RECIPES = "one hyperparameter at a time, constant and scaled recipes"
BESIDE = (
    "Solid and filled: the learning rate by the rule; dashed and hollow: constant over sizes. "
    "Stars: optima of the scaled recipe. β is the drift under the constant one."
)


@dataclass(frozen=True)
class HyperparameterSweeps:
    """All slices of one arm under one recipe; cells vary by `name`, `depth` and `multiple` of the base."""

    arm: str
    kind: RecipeKind
    recipe: str  # the kind in words: "constant", "+GLR (β = −0.6)"
    cells: Cells
    drifts: dict[str, Drift]

    @property
    def names(self) -> list[str]:
        """The hyperparameters, in the order of their sweeps."""
        return list(dict.fromkeys(self.cells.column("name")))

    @property
    def base(self) -> Cells:
        """The runs at the base values, one for each depth."""
        return self.cells.where(name=self.names[0], multiple=1.0)

    @property
    def rate_law(self) -> PowerLawFit | None:
        """The drift of the best learning rate; None where too few sizes have an optimum."""
        drift = self.drifts.get("learning_rate")
        return None if drift is None else drift.law


@dataclass(frozen=True)
class LearningRateRule:
    """The rule lr(N) = base·(N/N_base)^exponent to use for an arm.

    A growing arm's exponent is the one of the arm it starts as plus the measured drift around it, to one
    decimal, and its base is fitted again; `learning_rate_base` is None if the recipe's stays.
    """

    learning_rate_exponent: float
    learning_rate_base: float | None = None
    inherited_exponent: float | None = None


def lr_rule(context: StudyContext, *, arms: Arms = (), parts: Sequence[str] = ()) -> Study:
    """Appendix "Stage 4: Fit the Learning-Rate Rule", table "Fitted hyperparameter drift and sensitivity".

    At each size the compute-optimal run is repeated with one hyperparameter at multiples of its base value.
    Parabolas of log loss give each size's optimum, and their regression on stored parameters the drift
    exponent β; the learning rate's, to one decimal, is the rule. All is then repeated around the scaled
    recipe, which shows what drift remains and what scaling gains. A growing arm is swept around the rule of
    the arm it starts as; its own rule is that one plus the drift around it, with an anchor fitted again.
    `screen` sweeps every hyperparameter of an arm instead of four.
    """
    swept, rules = yield from sweep_arms(context, arms, parts)
    return lr_rule_answer(context, swept, rules)


def sweep_arms(
    context: StudyContext, arms: Arms = (), parts: Sequence[str] = ()
) -> Work[tuple[list[HyperparameterSweeps], dict[str, LearningRateRule]]]:
    """The sweeps of every arm, and by arm the learning-rate rule to use."""
    wanted = choose_parts("lr-rule", parts, default=("drift",))
    works = {"screen": _screen, "drift": fit_rule}  # of an arm, concurrently
    chosen = [(arm, part) for arm in find_arms(arms or ("vanilla",)) for part in works if part in wanted]
    done: list[list[HyperparameterSweeps]] = yield from run_concurrently(
        [works[part](context, arm) for arm, part in chosen]
    )
    found = list(zip(chosen, done, strict=True))
    rules = {arm.name: adopted_rule(context, arm, own) for (arm, part), own in found if part == "drift"}
    return [one for own in done for one in own], rules


def _screen(context: StudyContext, arm: Arm) -> Work[list[HyperparameterSweeps]]:
    names = [name for name in SWEPT if name != "injection_weight" or arm.core_boundary != "identity"]
    depths, recipe = context.preset.grids.lr_rule.screen_depths, context.constant_recipe(arm)
    return [(yield from sweep_hyperparameters(context, arm, recipe, "screen", [*names, *LISTED], depths))]


def fit_rule(context: StudyContext, arm: Arm) -> Work[list[HyperparameterSweeps]]:
    """Constant recipe, then the scaled one; a growing arm only around its fixed arm's rule."""
    grid = context.preset.grids.lr_rule
    swept = grid.hyperparameters, context.possible_depths(arm, grid.depths)[0]
    if arm.passes.grows:
        around = with_inherited_rule(context, arm)
        return [(yield from sweep_hyperparameters(context, arm, around, "scaled", *swept))]
    constant = context.constant_recipe(arm)
    first = yield from sweep_hyperparameters(context, arm, constant, "constant", *swept)
    if first.rate_law is None:
        return [first]
    scaled = replace(constant, learning_rate_exponent=_rounded(first.rate_law.exponent))
    return [first, (yield from sweep_hyperparameters(context, arm, scaled, "scaled", *swept))]


def adopted_rule(context: StudyContext, arm: Arm, found: Sequence[HyperparameterSweeps]) -> LearningRateRule:
    """The rule a ladder would use: fitted to one decimal, or the recipe's where it cannot be had."""
    law, own = found[0].rate_law, context.recipe(arm).learning_rate_exponent
    if not arm.passes.grows:
        return LearningRateRule(own if law is None else _rounded(law.exponent))
    around = with_inherited_rule(context, arm)
    inherited = around.learning_rate_exponent
    if law is None:
        return LearningRateRule(own, inherited_exponent=inherited)
    beta, base = _rounded(inherited + law.exponent), context.stored_parameters(arm, around.base_depth)
    rate = around.base.learning_rate if around.learning_rate_base is None else around.learning_rate_base
    # Optima are multiples of the inherited rate of their size: each is carried to the base size by the new
    # exponent, and the anchor is their geometric mean.
    logs = [
        math.log(rate * vertex.x) + (inherited - beta) * math.log(vertex.budget / base)
        for vertex in interior(found[0].drifts["learning_rate"].vertices)
    ]
    return LearningRateRule(beta, float(f"{math.exp(float(np.mean(logs))):.2g}"), inherited)


def _rounded(exponent: float) -> float:
    """β to one decimal, as the paper specifies it: the error of three sizes is no smaller. Never −0."""
    return round(exponent, 1) + 0.0


def with_inherited_rule(context: StudyContext, arm: Arm) -> Recipe:
    """A growing arm's own recipe with the learning rate and the rule of the arm it starts as."""
    source, recipe = context.recipe(starting_arm(arm)), context.recipe(arm)
    return replace(
        recipe,
        base=replace(recipe.base, learning_rate=source.base.learning_rate),
        learning_rate_base=source.learning_rate_base,
        learning_rate_exponent=source.learning_rate_exponent,
    )


def inherited_recipe(context: StudyContext, arm: Arm) -> Recipe:
    """A growing arm's recipe with the base, the TPP and the rule of the arm it starts as."""
    source = context.recipe(starting_arm(arm))
    return replace(with_inherited_rule(context, arm).with_tpp(source.tpp), base=source.base)


def sweep_hyperparameters(
    context: StudyContext,
    arm: Arm,
    recipe: Recipe,
    kind: RecipeKind,
    names: Sequence[str],
    depths: Sequence[int],
) -> Work[HyperparameterSweeps]:
    """Slices of several hyperparameters at several sizes around a recipe."""
    plans: list[Plan] = []
    for depth in depths:
        run = recipe.at(arm, depth, context.size_rule)
        stored = float(context.stored_parameters(arm, depth))
        for name in names:
            base = getattr(run.hyperparameters, name)
            for x, value in swept_values(name, base, context.preset.grids.lr_rule.multiples):
                changed = replace(run.hyperparameters, **{name: value})
                values = {"name": name, "depth": depth, "stored": stored, "multiple": x}
                plans.append((replace(run, hyperparameters=changed), values))
    cells = yield from measure(context, plans)
    # Listed values are compared, without a parabola of their logarithms.
    fitted = {name: fit_drift_over(cells.where(name=name), "stored") for name in names if name not in LISTED}
    words = f"+GLR (β = {recipe.learning_rate_exponent:+.1f})" if kind == "scaled" else kind
    drifts = {name: drift for name, drift in fitted.items() if drift is not None}
    return HyperparameterSweeps(arm.name, kind, words, cells, drifts)


def swept_values(name: str, base: float, multiples: Sequence[float]) -> list[tuple[float, float]]:
    """(x, value) to try: multiples of the base, or the listed values of schedule and Adam settings."""
    if name in LISTED:
        typed = int if name == "warmup_steps" else float
        values = sorted({typed(value) for value in (base, *LISTED[name])})
        return [(value, value) for value in values]
    # A base value of zero has no multiples.
    return [(multiple, base * multiple) for multiple in sorted(multiples) if base or multiple == 1.0]


def lr_rule_answer(
    context: StudyContext, swept: Sequence[HyperparameterSweeps], rules: dict[str, LearningRateRule]
) -> Answer:
    """The answer of the learning-rate study; `rules` are those to use, by arm."""
    depths = context.preset.grids.lr_rule.depths
    draft = Draft(
        findings=[_sentence(arm, rule, swept) for arm, rule in rules.items()],
        values={
            "rules": {arm: asdict(rule) for arm, rule in rules.items()},
            "drift": [_values(one) for one in swept],
        },
        panels=_sweep_panels(swept),
        tables=[_drift_table(swept), _comparison(swept)],
        warnings=_left_out({one.arm: one for one in swept if one.kind != "screen"}, depths),
        method=[
            f"Compute-optimal runs at depths {', '.join(map(str, depths))}; one hyperparameter at a time at "
            "multiples of its base value.",
            "β regresses the log optima on log initial stored parameters, with Student t intervals: with "
            "three sizes there is one degree of freedom, and three standard errors are p = 0.2.",
            "Regret is the mean loss at 0.5× and 2× the base value minus the loss at the base; range is the "
            "whole span of the slice; both at the largest size.",
        ],
    )
    for one in swept:
        draft.runs += one.cells.column("run")
        draft.panels += [_drift_panel(one, one.rate_law)] if one.rate_law else []
        draft.findings += [_screened(one)] if one.kind == "screen" else []
        for name, drift in one.drifts.items():
            draft.fits.append(StudyFit(drift, name, "stored parameters", one.arm, one.recipe))
            out = sum(vertex.censored for vertex in drift.vertices)
            if out and one.kind != "screen":
                draft.warnings.append(
                    f"{one.arm}, {one.recipe}: {out} of {len(drift.vertices)} optima of {name} lie outside "
                    "their sweeps and take no part in the drift"
                )
    question = "How must the learning rate change with model size, and must anything else?"
    return draft.answer("lr-rule", question, SECTION)


def _left_out(swept: dict[str, HyperparameterSweeps], depths: Sequence[int]) -> list[str]:
    """The depths at which an arm does not exist: half the width needs an even number of heads."""
    missing = {arm: sorted({*depths} - {*one.cells.column("depth")}) for arm, one in swept.items()}
    return [
        f"{arm} is left out at {', '.join(f'd{depth}' for depth in own)}, where it cannot be made"
        for arm, own in missing.items()
        if own
    ]


def _sentence(arm: str, rule: LearningRateRule, swept: Sequence[HyperparameterSweeps]) -> str:
    own = [one for one in swept if one.arm == arm and one.kind != "screen"]
    law = own[0].rate_law
    if law is None:
        return f"{arm}: too few learning-rate optima lie inside their sweeps for a rule; the recipe's stays."
    scaling = f"GLR(N) ∝ N^{rule.learning_rate_exponent:+.1f}"
    if own[0].kind != "constant":
        base = f" with {rule.learning_rate_base:.2g} at the base size" if rule.learning_rate_base else ""
        return (
            f"{arm}: {scaling}{base}: the inherited rule (β = {rule.inherited_exponent:+.1f}) plus the "
            f"drift of the optimum around it, {_exponent(law)}."
        )
    gain = "".join(_gain(own[0], scaled) for scaled in own[1:])
    return f"{arm}: {scaling} (fitted {_exponent(law)}){gain}."


def _gain(constant: HyperparameterSweeps, scaled: HyperparameterSweeps) -> str:
    """What scaling the rate changes at the largest size with both runs, and the drift that is left."""
    gain = ""
    before, after = (
        {cell["depth"]: cell.loss for cell in one.base.having("loss")} for one in (constant, scaled)
    )
    if both := before.keys() & after.keys():
        top = max(both)
        more = after[top] - before[top]
        gain = f"; at d{top} the scaled rate changes the loss by {more:+.4f} against the constant one"
    if scaled.rate_law is not None:
        gain += f", and around it the optimum still drifts with exponent {_exponent(scaled.rate_law)}"
    return gain


def _exponent(law: PowerLawFit) -> str:
    """An exponent with what is known of its error; two sizes give a line and no error."""
    if law.degrees_of_freedom < 1:
        return f"{law.exponent:+.2f} from two sizes alone, so without an error"
    return f"{law.exponent:+.2f} ± {law.standard_error:.2f}, p = {law.p_value:.2g}"


def _screened(one: HyperparameterSweeps) -> str:
    spans = {name: drift.span or 0.0 for name, drift in one.drifts.items()}
    top = max(one.cells.column("depth"))
    for name in LISTED:  # at the largest size, as for the others
        losses = one.cells.where(name=name, depth=top).having("loss").column("loss")
        if len(losses) > 1:
            spans[name] = max(losses) - min(losses)
    ranked = sorted(((span, name) for name, span in spans.items()), reverse=True)
    if not ranked:
        return f"{one.arm}, screened: too few runs finished for a single sweep."
    words = ", ".join(f"{name} {span:.4f}" for span, name in ranked[:4])
    return f"{one.arm}, screened: the widest loss ranges are {words}."


def _values(one: HyperparameterSweeps) -> dict[str, Any]:
    # All None without a law.
    of_law = {"exponent": "exponent", "error": "standard_error", "interval": "interval", "p_value": "p_value"}
    return {
        "arm": one.arm,
        "recipe": one.recipe,
        "centres": {cell["depth"]: cell.loss for cell in one.base},
        "hyperparameters": {
            name: {
                **{key: getattr(drift.law, field, None) for key, field in of_law.items()},
                "regret": drift.regret,
                "range": drift.span,
                "optima": [[v.budget, v.x, v.interior] for v in drift.vertices],
            }
            for name, drift in one.drifts.items()
        },
    }


def _drift_table(swept: Sequence[HyperparameterSweeps]) -> Table:
    rows: list[dict[str, Any]] = []
    for one in swept:
        for name, drift in one.drifts.items():
            law = law_values(drift.law)
            rows.append({
                "arm": one.arm, "recipe": one.recipe, "hyperparameter": with_paper_code(name),
                "β": law["exponent"], "SE": law["error"], "p": law["p"],
                "|β| ≥ 3 SE": drift.exceeds_three_standard_errors,
                "regret ×10³": drift.regret and 1e3 * drift.regret,
                "range ×10³": drift.span and 1e3 * drift.span,
                "interior optima": len(interior(drift.vertices)),
            })  # fmt: skip
    caption = (
        "Under a constant recipe the optimum scales as N^β; under a scaled one GLR shows the residual drift."
    )
    return table("Hyperparameter drift and sensitivity", rows, caption)


def _comparison(swept: Sequence[HyperparameterSweeps]) -> Table:
    """Losses at the base values with a constant and a scaled rate, of the arms that have both."""
    scaled = {one.arm: one.base for one in swept if one.kind == "scaled"}
    rows = [
        {
            "arm": one.arm, "size": f"d{cell['depth']}", "tokens": cell.spec.tokens, "constant": cell.loss,
            "scaled": other.loss, "gain of scaling": cell.loss - other.loss,
        }
        for one in swept
        if one.kind == "constant" and one.arm in scaled
        for cell, other in zip(one.base, scaled[one.arm], strict=True)
    ]  # fmt: skip
    title = "Constant against scaled learning rate"
    return table(title, rows, "Losses at the base values.")


def _sweep_panels(swept: Sequence[HyperparameterSweeps]) -> list[Panel]:
    """A figure for each arm (constant and scaled recipes together) and screen: a panel for each name."""
    figures = grouped(swept, lambda one: (one.arm, one.kind == "screen")).values()
    panels = [_panel(own, name) for own in figures for name in own[0].names]
    return [panel for panel in panels if panel.series]


def _panel(own: Sequence[HyperparameterSweeps], name: str) -> Panel:
    """Loss against one hyperparameter at every size; a constant recipe is dashed beside a scaled one."""
    first, beside, listed = own[0], len(own) > 1, name in LISTED
    words, code = name.replace("_", " "), paper_code(name)
    series = tuple(curve for one in own for curve in _curves(one, name, beside))
    scale = "linear" if listed and name != "adam_eps" else "log"
    axes = Axis(words if listed else f"{words} (× base)", scale), Axis("validation loss", "log")
    if first.kind == "screen":
        title, group = f"{words} ({code})" if code else words, "screen: one hyperparameter at a time"
        return Panel(title, *axes, series, group=f"{first.arm}, {group}", columns=4)
    law = first.drifts[name].law if first.kind == "constant" and name in first.drifts else None
    beta = "" if law is None else f", β = {law.exponent:+.2f}".replace("-", "−")
    title, group = f"{first.arm}: {code or words}{beta}", f"{first.arm}: {BOTH_RECIPES}"
    return Panel(title, *axes, series, caption=BESIDE if beside else "", group=group, columns=4)


def _curves(one: HyperparameterSweeps, name: str, beside: bool) -> list[Series]:
    """The slices of one hyperparameter; `beside` those of another recipe, a constant one is dashed."""
    found: list[Series] = []
    dashed = beside and one.kind == "constant"
    look: dict[str, Any] = {"note": f"{one.kind} recipe"} if beside else {}
    vertices = {v.budget: v for v in one.drifts[name].vertices} if name in one.drifts else {}
    for depth, own in one.cells.where(name=name).having("loss").by("depth").items():
        if len(own) < 2:  # the base values alone: nothing was swept at this size
            continue
        label, curve = plot.family_curve("depth", depth)
        x, y, style = own.column("multiple"), own.column("loss"), "dashed" if dashed else "solid"
        found.append(plot.points(label, x, y, own.column("run"), filled=not dashed, **look, **curve))
        vertex = vertices.get(own[0]["stored"])
        if vertex is None:
            found.append(plot.joined(label, x, y, style=style, **curve))
        else:
            found += plot.parabola_or_segments(label, x, y, vertex, log=True, **curve, style=style)
            found += [] if dashed else [plot.optimum_star(label, vertex, **curve)]
    return found


def _drift_panel(one: HyperparameterSweeps, law: PowerLawFit) -> Panel:
    words, vertices = f"∝ N^{law.exponent:.2f}", one.drifts["learning_rate"].vertices
    return Panel(
        f"{one.arm}, {one.recipe}", Axis("stored parameters at the start", "log"),
        Axis("best GLR (× the recipe's)", "log"),
        tuple(plot.optima_with_law(one.arm, vertices, law, words, arm=one.arm)),
        group="Drift of the best learning rate",
    )  # fmt: skip
