"""Stage 4: how the learning rate must change with size, and whether anything else must.

Each arm is swept around its constant recipe; the drift of the best learning rate, to one decimal, is its
rule, and the sweeps are repeated around the scaled recipe. `lr_rule_report.py` makes the answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from steepen.laws.fits.drift import Drift
from steepen.model.arm import Arm
from steepen.recipe.recipe import Recipe
from steepen.studies.answer import Study, Work
from steepen.studies.cells import Plan, measure, run_concurrently
from steepen.studies.context import Arms, StudyContext, find_arms, starting_arm
from steepen.studies.grids import SWEPT
from steepen.studies.registry import choose_parts
from steepen.studies.stages.chain_tuning import DISCRETE
from steepen.studies.stages.lr_rule_report import (
    HyperparameterSweeps,
    LearningRateRule,
    RecipeKind,
    lr_rule_answer,
)
from steepen.studies.sweeps import fit_drift_over

# Schedule and Adam settings have listed values (those of chain tuning) instead of multiples.
LISTED: dict[str, tuple[float, ...]] = {
    name: values for settings in DISCRETE.values() for name, values in settings.items()
}
LISTED["adam_eps"] = (1e-14, 1e-12, *LISTED["adam_eps"])  # the paper's screen also goes below the base


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
    swept = grid.hyperparameters, grid.depths
    if arm.passes.grows:
        around = with_inherited_rule(context, arm)
        return [(yield from sweep_hyperparameters(context, arm, around, "scaled", *swept))]
    constant = context.constant_recipe(arm)
    first = yield from sweep_hyperparameters(context, arm, constant, "constant", *swept)
    beta = rounded_exponent(first.drifts.get("learning_rate"))
    if beta is None:
        return [first]
    scaled = replace(constant, learning_rate_exponent=beta)
    return [first, (yield from sweep_hyperparameters(context, arm, scaled, "scaled", *swept))]


def adopted_rule(context: StudyContext, arm: Arm, found: Sequence[HyperparameterSweeps]) -> LearningRateRule:
    """The rule a ladder would use: fitted to one decimal, or the recipe's where it cannot be had."""
    drift, own = found[0].drifts.get("learning_rate"), context.recipe(arm).learning_rate_exponent
    if not arm.passes.grows:
        beta = rounded_exponent(drift)
        return LearningRateRule(own if beta is None else beta)
    around = with_inherited_rule(context, arm)
    inherited = around.learning_rate_exponent
    if drift is None or drift.law is None:
        return LearningRateRule(own, inherited=inherited)
    beta = round(inherited + drift.law.exponent, 1) + 0.0
    base = context.stored_parameters(arm, around.base_depth)
    rate = around.base.learning_rate if around.learning_rate_base is None else around.learning_rate_base
    # Optima are multiples of the inherited rate of their size.
    logs = [
        math.log(rate * vertex.x) + (inherited - beta) * math.log(vertex.budget / base)
        for vertex in drift.vertices
        if vertex.interior
    ]
    return LearningRateRule(beta, float(f"{math.exp(float(np.mean(logs))):.2g}"), inherited)


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


def rounded_exponent(drift: Drift | None) -> float | None:
    """β to one decimal, as the paper specifies it; None if too few runs finished for one."""
    return None if drift is None or drift.law is None else round(drift.law.exponent, 1) + 0.0


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
    return HyperparameterSweeps(
        arm.name, kind, words, cells, drifts, tuple(name for name in names if name in LISTED)
    )


def swept_values(name: str, base: float, multiples: Sequence[float]) -> list[tuple[float, float]]:
    """(x, value) to try: multiples of the base, or the listed values of schedule and Adam settings."""
    if name in LISTED:
        typed = int if name == "warmup_steps" else float
        values = sorted({typed(value) for value in (base, *LISTED[name])})
        return [(value, value) for value in values]
    # A base value of zero has no multiples.
    return [(multiple, base * multiple) for multiple in sorted(multiples) if base or multiple == 1.0]
