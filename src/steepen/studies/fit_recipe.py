"""The four stages in order: a complete compute-optimal recipe for an arm, as a file the ladder uses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from steepen.errors import SteepenError, UsageError
from steepen.runs.codec import to_plain
from steepen.studies.answer import Answer, Study, Table
from steepen.studies.bench import Arms, Bench, find_arms, fixed_twin
from steepen.studies.chain_tuning import chain_tuning
from steepen.studies.growth_fraction import growth_fraction
from steepen.studies.lr_rule import inherited, lr_rule
from steepen.studies.recipe_file import RecipeFile
from steepen.studies.tpp import tpp

SECTION = "Appendix B, Compute-Optimal Recipe: Staged Sweeps and Fits"


def fit_recipe(bench: Bench, *, arms: Arms = (), from_recipe: bool = False) -> Study:
    """Appendix "Compute-Optimal Recipe: Staged Sweeps and Fits": stages 1 to 4 in order for an arm.

    A growing arm is tuned, given its tokens per parameter and its learning-rate rule as the arm it starts as;
    then its growth fraction is fitted, and the drift that remains around the rule is measured.
    The answer's values hold the recipe under "recipe", ready to be written.
    """
    chosen = find_arms(arms or ("vanilla",))
    if len(chosen) != 1:
        raise UsageError("fit-recipe fits one arm at a time; give a single one with --arms.")
    arm = chosen[0]
    fixed = fixed_twin(arm)
    stages: dict[str, Answer] = {}

    stages["chain-tuning"] = yield from chain_tuning(bench, arms=[fixed], from_recipe=from_recipe)
    tuned = stages["chain-tuning"].values[fixed.name]["hyperparameters"]
    recipe = bench.recipe(fixed)
    recipe = replace(recipe, base=replace(recipe.base, **tuned), glr_base=None, glr_exponent=0.0)
    bench = bench.with_recipe(fixed, recipe)

    stages["tpp"] = yield from tpp(bench, arms=[fixed])
    optimum = stages["tpp"].values[fixed.name]["tpp"]
    if not optimum:
        raise SteepenError(
            f"no budget's best tokens per parameter lie inside the sweep for {fixed.name}, so stage 2 has no "
            "value to adopt; widen grids.tpp.offsets in a preset file."
        )
    recipe = replace(recipe, tpp=float(optimum))
    bench = bench.with_recipe(fixed, recipe)

    rho = None
    if arm.passes.grows:
        bench = bench.with_recipe(arm, inherited(bench, arm))
        stages["growth-fraction"] = yield from growth_fraction(bench, arms=[arm])
        rho = stages["growth-fraction"].values[arm.name]["rho"]
        if rho is None:
            raise SteepenError(
                f"no anchor's best growth fraction lies inside the sweep for {arm.name}, so stage 3 has no "
                "value to adopt; widen grids.growth_fraction.rho in a preset file."
            )

    stages["lr-rule"] = yield from lr_rule(bench, arms=[fixed])
    beta = stages["lr-rule"].values["rules"][fixed.name]["glr_exponent"]
    recipe = replace(recipe, glr_exponent=beta)
    bench = bench.with_recipe(fixed, recipe)
    if arm.passes.grows:
        recipe = replace(inherited(bench, arm), rho=rho, growth_law=None)
        bench = bench.with_recipe(arm, recipe)
        stages["lr-rule of growth"] = yield from lr_rule(bench, arms=[arm])

    depths = bench.preset.grids.rate_rule.depths
    recipe = replace(recipe, measured=(min(depths), max(depths)))
    return _answer(bench, arm.name, fixed.name, RecipeFile(arm.name, recipe, bench.preset.name), stages)


def _answer(bench: Bench, arm: str, fixed: str, file: RecipeFile, stages: dict[str, Answer]) -> Answer:
    recipe = file.recipe
    after = f", ρ = {recipe.rho:g}" if recipe.rho is not None else ""
    told = f" (stages 1, 2 and 4 as {fixed}, which it starts as)" if fixed != arm else ""
    rows: list[tuple[Any, ...]] = [
        *recipe.base.to_dict().items(), ("GLR exponent", recipe.glr_exponent),
        ("tokens per parameter", recipe.tpp), ("ρ", recipe.rho), ("anchor depth", recipe.base_depth),
        ("batch tokens", recipe.batch_tokens),
    ]  # fmt: skip
    notes: list[str] = []
    if recipe.glr_exponent > 0:
        notes.append(
            f"the fitted learning rate rises with size (exponent {recipe.glr_exponent:+.1f}): such small "
            "runs may be limited by their few steps, and the rule should not be carried far beyond them"
        )
    fitted = {name: list(answer.findings) for name, answer in stages.items()}
    return Answer(
        study="fit-recipe",
        question=f"What is the compute-optimal recipe for {arm} at the preset {bench.preset.name}?",
        section=SECTION,
        findings=(
            f"{arm}: GLR {recipe.base.glr:.4g} at d{recipe.base_depth}, exponent {recipe.glr_exponent:+.1f}, "
            f"{recipe.tpp:g} tokens per parameter{after}{told}.",
            *(finding for answer in stages.values() for finding in answer.findings),
        ),
        values={
            "arm": arm,
            "recipe": to_plain(replace(file, fitted=fitted)),
            "stages": {name: answer.values for name, answer in stages.items()},
        },
        panels=tuple(panel for answer in stages.values() for panel in answer.panels),
        tables=(
            Table(f"Recipe for {arm}", ("what", "value"), tuple(rows)),
            *(table for answer in stages.values() for table in answer.tables),
        ),
        warnings=(*notes, *(note for answer in stages.values() for note in answer.warnings)),
        method=tuple(sentence for answer in stages.values() for sentence in answer.method),
        runs=tuple(dict.fromkeys(run for answer in stages.values() for run in answer.runs)),
    )
