"""Stage 4: how the learning rate must change with size, and whether anything else must."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from steepen.errors import UsageError
from steepen.laws.fits.drift import Drift, HyperparameterSweep, fit_drift
from steepen.model.arm import Arm
from steepen.recipe.recipe import Recipe
from steepen.runs.record import RunRecord
from steepen.runs.spec import RunSpec
from steepen.studies.answer import Study
from steepen.studies.context import Arms, StudyContext, find_arms, loss_or_inf, starting_arm
from steepen.studies.driver.run_concurrently import RunGenerator, run_concurrently
from steepen.studies.stages.chain_tuning import DISCRETE
from steepen.studies.stages.lr_rule_report import HyperparameterSweeps, LearningRateRule, lr_rule_answer

PARTS = ("drift", "screen")
SCREENED = (
    "learning_rate",
    "embedding_lr_multiplier",
    "head_lr_multiplier",
    "residual_multiplier",
    "output_multiplier",
    "injection_weight",
    "weight_decay",
    "embedding_init_std",
    "init_scale",
)
# Schedule and Adam settings have listed values (those of chain tuning) instead of multiples.
LISTED: dict[str, tuple[float, ...]] = {
    name: values for settings in DISCRETE.values() for name, values in settings.items()
}
LISTED["adam_eps"] = (1e-14, 1e-12, *LISTED["adam_eps"])  # the paper's screen also goes below the base


Sweep = Generator[Sequence[RunSpec], Sequence[RunRecord | None], HyperparameterSweeps]


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
) -> Generator[
    Sequence[RunSpec],
    Sequence[RunRecord | None],
    tuple[list[HyperparameterSweeps], dict[str, LearningRateRule]],
]:
    """The sweeps of every arm, and by arm the learning-rate rule to use."""
    for part in parts:
        if part not in PARTS:
            raise UsageError(f"--part {part!r} is not known here: use {' or '.join(PARTS)}.")
    rules: dict[str, LearningRateRule] = {}
    parts = parts or ("drift",)

    def measured(arm: Arm) -> RunGenerator:
        works: list[RunGenerator] = []
        if "screen" in parts:
            names = [
                name for name in SCREENED if name != "injection_weight" or arm.core_boundary != "identity"
            ] + list(LISTED)
            depths = context.preset.grids.lr_rule.screen_depths
            recipe = replace(context.recipe(arm), learning_rate_exponent=0.0)
            works.append(_as_list(sweep_hyperparameters(context, arm, recipe, "screen", names, depths)))
        if "drift" in parts:
            works.append(fit_rule(context, arm))
        found: list[list[HyperparameterSweeps]] = yield from run_concurrently(works)
        if "drift" in parts:
            rules[arm.name] = adopted_rule(context, arm, found[-1])
        return [one for part in found for one in part]

    chosen = find_arms(arms or ("vanilla",))
    results: list[list[HyperparameterSweeps]] = yield from run_concurrently([measured(arm) for arm in chosen])
    return [one for result in results for one in result], rules


def _as_list(work: Sweep) -> RunGenerator:
    return [(yield from work)]


def fit_rule(
    context: StudyContext, arm: Arm
) -> Generator[Sequence[RunSpec], Sequence[RunRecord | None], list[HyperparameterSweeps]]:
    """Constant recipe, then the scaled one; a growing arm only around its fixed arm's rule."""
    grid = context.preset.grids.lr_rule
    recipe = context.recipe(arm)
    if arm.passes.grows:
        around = with_inherited_rule(context, arm)
        work = sweep_hyperparameters(context, arm, around, "scaled", grid.hyperparameters, grid.depths)
        return [(yield from work)]
    constant = replace(recipe, learning_rate_exponent=0.0)
    first = yield from sweep_hyperparameters(
        context, arm, constant, "constant", grid.hyperparameters, grid.depths
    )
    beta = rounded_exponent(first.drifts.get("learning_rate"))
    if beta is None:
        return [first]
    scaled_recipe = replace(recipe, learning_rate_exponent=beta)
    second = yield from sweep_hyperparameters(
        context, arm, scaled_recipe, "scaled", grid.hyperparameters, grid.depths
    )
    return [first, second]


def adopted_rule(context: StudyContext, arm: Arm, found: Sequence[HyperparameterSweeps]) -> LearningRateRule:
    """The rule a ladder would use: fitted to one decimal, or the recipe's where it cannot be had."""
    drift = found[0].drifts.get("learning_rate")
    if not arm.passes.grows:
        beta = rounded_exponent(drift)
        return LearningRateRule(context.recipe(arm).learning_rate_exponent if beta is None else beta)
    around = with_inherited_rule(context, arm)
    inherited = around.learning_rate_exponent
    if drift is None or drift.law is None:
        return LearningRateRule(context.recipe(arm).learning_rate_exponent, inherited=inherited)
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
    source = context.recipe(starting_arm(arm))
    recipe = context.recipe(arm)
    return replace(
        recipe,
        base=replace(recipe.base, learning_rate=source.base.learning_rate),
        learning_rate_base=source.learning_rate_base,
        learning_rate_exponent=source.learning_rate_exponent,
    )


def rounded_exponent(drift: Drift | None) -> float | None:
    """β to one decimal, as the paper specifies it; None if too few runs finished for one."""
    return None if drift is None or drift.law is None else round(drift.law.exponent, 1) + 0.0


def sweep_hyperparameters(
    context: StudyContext,
    arm: Arm,
    recipe: Recipe,
    kind: Literal["constant", "scaled", "screen"],
    names: Sequence[str],
    depths: Sequence[int],
) -> Sweep:
    """Slices of several hyperparameters at several sizes around a recipe."""
    multiples = context.preset.grids.lr_rule.multiples
    keys: list[tuple[str, int, float]] = []
    specs: list[RunSpec] = []
    for depth in depths:
        planned = recipe.at(arm, depth, context.size_rule)
        for name in names:
            for multiple, value in swept_values(name, getattr(planned.hyperparameters, name), multiples):
                changed = replace(planned.hyperparameters, **{name: value})
                keys.append((name, depth, multiple))
                specs.append(context.spec(replace(planned, hyperparameters=changed)))
    losses = [loss_or_inf(record) for record in (yield specs)]
    table = {key: (loss, spec.hash) for key, loss, spec in zip(keys, losses, specs, strict=True)}
    rows: dict[str, list[tuple[int, float, float, str]]] = {name: [] for name in names}
    for (name, depth, multiple), (loss, run) in table.items():
        rows[name].append((depth, multiple, loss, run))
    drifts: dict[str, Drift] = {}
    for name in names:
        if name in LISTED:
            continue  # listed values are compared, without a parabola of their logarithms
        slices: list[HyperparameterSweep] = []
        for depth in depths:
            own = [(m, loss) for d, m, loss, _ in rows[name] if d == depth and math.isfinite(loss)]
            if len(own) >= 3:
                x, y = np.array([m for m, _ in own]), np.array([loss for _, loss in own])
                slices.append(HyperparameterSweep(float(context.stored_parameters(arm, depth)), x, y))
        if slices:
            drifts[name] = fit_drift(slices)
    first = names[0]
    return HyperparameterSweeps(
        arm=arm.name,
        kind=kind,
        recipe=_recipe_words(kind, recipe),
        drifts=drifts,
        rows=rows,
        base_losses={depth: table[first, depth, 1.0][0] for depth in depths},
        listed=tuple(name for name in names if name in LISTED),
        tokens={depth: recipe.at(arm, depth, context.size_rule).tokens for depth in depths},
        stored={depth: float(context.stored_parameters(arm, depth)) for depth in depths},
    )


def swept_values(name: str, base: float, multiples: Sequence[float]) -> list[tuple[float, float]]:
    """(x, value) to try: multiples of the base, or the listed values of schedule and Adam settings."""
    if name in LISTED:
        typed = int if name == "warmup_steps" else float
        values = sorted({typed(value) for value in (base, *LISTED[name])})
        return [(value, value) for value in values]
    # A base value of zero has no multiples.
    return [(multiple, base * multiple) for multiple in sorted(multiples) if base or multiple == 1.0]


def _recipe_words(kind: str, recipe: Recipe) -> str:
    return f"+GLR (β = {recipe.learning_rate_exponent:+.1f})" if kind == "scaled" else kind


def inherited_recipe(context: StudyContext, arm: Arm) -> Recipe:
    """A growing arm's recipe with the base, the TPP and the rule of the arm it starts as."""
    source = context.recipe(starting_arm(arm))
    return replace(
        context.recipe(arm).with_tpp(source.tpp),
        base=source.base,
        learning_rate_base=source.learning_rate_base,
        learning_rate_exponent=source.learning_rate_exponent,
    )
