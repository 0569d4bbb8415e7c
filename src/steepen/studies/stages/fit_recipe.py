"""The fit-recipe study: the four stages in order, giving an arm's compute-optimal recipe."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from steepen.laws.fits.isoflop import IsoflopFit, rounded_mean
from steepen.model.arm import Arm
from steepen.recipe.hyperparameters import with_paper_code
from steepen.recipe.recipe import Recipe
from steepen.recipe.recipe_choice import RecipeFile
from steepen.studies.answer import Answer, Draft, Study, Table, Work
from steepen.studies.context import Arms, StudyContext, find_one_arm, starting_arm
from steepen.studies.stages.chain_tuning import chain_answer, tune_arms
from steepen.studies.stages.growth_fraction import MIN_RHO, adopted, growth_fraction
from steepen.studies.stages.lr_rule import LearningRateRule, inherited_recipe, lr_rule_answer, sweep_arms
from steepen.studies.stages.tpp import tpp
from steepen.utils.codec import to_builtins
from steepen.utils.json_io import json_safe

SECTION = "Appendix A.4, Compute-Optimal Recipe: Staged Sweeps and Fits"


def fit_recipe(context: StudyContext, *, arms: Arms = (), from_recipe: bool = False) -> Study:
    """Appendix "Compute-Optimal Recipe: Staged Sweeps and Fits": stages 1 to 4 in order for an arm.

    Stages 1, 2 and 4 of a growing arm are run on its fixed-pass counterpart (`starting_arm`); then its growth
    fraction is fitted, and the drift that remains around the learning-rate rule is added to that rule.
    The answer's values hold the recipe under "recipe", ready to be written.
    """
    arm = find_one_arm(arms or ("vanilla",), "fit-recipe")
    fixed = starting_arm(arm)
    context.recipe(arm)  # asked for before the first run, as `RecipeChoice.require_asked` expects
    stages: dict[str, Answer] = {}
    notes: list[str] = []

    chains = yield from tune_arms(context, [fixed], from_recipe=from_recipe)
    stages["chain-tuning"] = chain_answer(context, chains)
    recipe = replace(context.constant_recipe(fixed), base=chains[0].values, learning_rate_base=None)
    context = context.with_recipe(fixed, recipe)

    stages["tpp"] = yield from tpp(context, arms=[fixed])
    fit = _isoflop_fit(stages["tpp"])
    optimum = json_safe(fit.rounded)
    if not optimum:
        optimum = max(1.0, rounded_mean([vertex.x for vertex in fit.vertices]))
        notes.append(_edge("tokens per parameter", f"{optimum:g}", "grids.tpp.offsets"))
    recipe = replace(recipe, tpp=float(optimum))
    context = context.with_recipe(fixed, recipe)

    rho = None
    if arm.passes.grows:
        context = context.with_recipe(arm, inherited_recipe(context, arm))
    if any(stage.start is None for stage in arm.passes.stages):  # else the arm says when it grows
        stages["growth-fraction"] = yield from growth_fraction(context, arms=[arm])
        fit = _isoflop_fit(stages["growth-fraction"])
        rho = adopted(fit)
        if rho is None:
            rho = max(MIN_RHO, rounded_mean([vertex.x for vertex in fit.vertices], 1))
            notes.append(_edge("growth fraction", f"{rho:g}", "grids.growth_fraction.rho"))

    stages["lr-rule"], rule = yield from _rate_rule(context, fixed)
    recipe = replace(recipe, learning_rate_exponent=rule.learning_rate_exponent)
    if arm.passes.grows:
        context = context.with_recipe(fixed, recipe)
        recipe = replace(inherited_recipe(context, arm), rho=rho, growth_law=None, listed_rho=())
        stages["lr-rule of growth"], rule = yield from _rate_rule(context.with_recipe(arm, recipe), arm)
        base = rule.learning_rate_base or recipe.learning_rate_base
        recipe = replace(recipe, learning_rate_exponent=rule.learning_rate_exponent, learning_rate_base=base)

    depths, _ = context.possible_depths(arm, context.preset.grids.lr_rule.depths)
    recipe = replace(recipe, measured=(min(depths), max(depths)))
    if recipe.learning_rate_exponent > 0:
        notes.append(
            f"the fitted learning rate rises with size (exponent {recipe.learning_rate_exponent:+.1f}): such "
            "small runs may be limited by their few steps, and the rule should not be carried far beyond them"
        )
    return _answer(context, fixed.name, RecipeFile(arm.name, recipe, context.preset.name), stages, notes)


def _rate_rule(context: StudyContext, arm: Arm) -> Work[tuple[Answer, LearningRateRule]]:
    swept, rules = yield from sweep_arms(context, [arm])
    return lr_rule_answer(context, swept, rules), rules[arm.name]


def _isoflop_fit(answer: Answer) -> IsoflopFit:
    """The fitted optima of a stage that was run for one arm."""
    (fit,) = (one.fit for one in answer.fits if isinstance(one.fit, IsoflopFit))
    return fit


def _edge(what: str, value: str, where: str) -> str:
    """The warning of a stage whose optima all lie outside their sweeps."""
    return (
        f"no best {what} lies inside its sweep, so the best measured ({value}) is adopted, at the edge of "
        f"the sweep; widen {where} in a preset file"
    )


def _answer(
    context: StudyContext, fixed: str, file: RecipeFile, stages: dict[str, Answer], notes: list[str]
) -> Answer:
    arm, recipe = file.arm, file.recipe
    anchor = recipe.base.learning_rate if recipe.learning_rate_base is None else recipe.learning_rate_base
    after = f", ρ = {recipe.rho:g}" if recipe.rho is not None else ""
    basis = f" (stages 1, 2 and 4 as {fixed}, which it starts as)" if fixed != arm else ""
    fitted = {name: list(answer.findings) for name, answer in stages.items()}
    file = replace(file, fitted=fitted | ({"warnings": notes} if notes else {}))
    draft = Draft(
        findings=[
            f"{arm}: learning rate (GLR) {anchor:.4g} at d{recipe.base_depth}, exponent "
            f"{recipe.learning_rate_exponent:+.1f}, {recipe.tpp:g} tokens per parameter{after}{basis}."
        ],
        recipes=[file],
        tables=[_table(arm, recipe, anchor)],
        warnings=list(notes),
    )
    for name, answer in stages.items():
        draft.add(answer, part=name)
    draft.values = {"arm": arm, "recipe": to_builtins(file), "stages": draft.values}
    question = f"What is the compute-optimal recipe for {arm} at the preset {context.preset.name}?"
    return draft.answer("fit-recipe", question, SECTION)


def _table(arm: str, recipe: Recipe, anchor: float) -> Table:
    rows: dict[str, Any] = {with_paper_code(name): value for name, value in recipe.base.to_dict().items()}
    rows |= {
        "learning rate at the anchor depth": anchor, "learning-rate exponent": recipe.learning_rate_exponent,
        "tokens per parameter": recipe.tpp, "ρ": recipe.rho, "anchor depth": recipe.base_depth,
        "batch tokens": recipe.batch_tokens,
    }  # fmt: skip
    return Table(f"Recipe for {arm}", ("setting", "value"), tuple(rows.items()))
