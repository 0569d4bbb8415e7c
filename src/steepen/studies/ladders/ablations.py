"""The paper's ablation ladders: operator, allocation, shape, width only, optimizer, random passes, recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from steepen.model.arm import Arm
from steepen.model.arms import find_arm
from steepen.optim.config import OptimizerConfig
from steepen.recipe.paper_tables import with_constant_rate
from steepen.recipe.recipe import ScalingRule
from steepen.recipe.recipe_choice import FIXED_RHO, FIXED_RHO_TPP
from steepen.studies.answer import Answer, Draft, Study, Work
from steepen.studies.cells import run_concurrently, table
from steepen.studies.context import StudyContext
from steepen.studies.ladders.ladder import compare_ladders
from steepen.studies.ladders.ladder_runs import LadderSpec, ladder_spec
from steepen.studies.registry import choose_parts
from steepen.studies.stages.fit_recipe import fit_recipe

SECTION = "Appendix B, Additional Results for Compute-Optimal Scalings"


# Arms whose ladders are compared with one another, by part; the first is the reference.
GROUPS: dict[str, tuple[str, ...]] = {
    # Which parts of the boundary operator matter?
    "operator": (
        "vanilla", "untied-2", "deep-vanilla", "untied-2-norm-only", "untied-2-inject-only",
        "untied-2-no-coda-injection",
    ),
    # Must prelude, core and coda scale together with depth?
    "allocation": (
        "vanilla", "loop-2", "loop-2-no-coda-injection", "loop-2-nci-2-c-3", "operator-1",
        "operator-1-1-c-2",
    ),
    # Do deeper shapes scale better?
    "shape": ("vanilla", "deep-vanilla", "deeper-vanilla", "operator-1", "deeper-operator-1"),
    # Does the operator's gain survive when only the width grows, or width and depth?
    "width-only": (
        "width-only-deep-vanilla", "width-only-vanilla", "width-only-operator-1", "width-only-loop-2",
        "width-only-untied-2",
    ),
    "width-and-depth": ("deep-vanilla", "loop-2", "untied-2"),
    # Does Muon's gain over other optimizers persist with scale? The preset names its arm.
    "optimizer": (),
    # Must tokens and moment of growth be tuned at every size?
    "growth": ("untied-grow",),
    # Along which axis should a network grow, at equal compute?
    "axes": (
        "vanilla", "untied-grow", "untied-2+passes=2-4-6@0.5-0.75", "vanilla+blocks=1-all@0.3",
        "vanilla+width=0.5-1@0.4", "vanilla+context=0.25-1@0.5", "vanilla+experts=1-8@0.5",
    ),
    # What do random passes after growth cost?
    "random": ("loop-grow", "random-loop-grow"),
    # Does scaling more than the learning rate change Vanilla's law?
    "hyperparameters": ("vanilla",),
    # How do the arms compare under constant recipes?
    "constant": ("vanilla", "operator-1", "loop-2", "untied-2", "loop-grow", "untied-grow"),
}  # fmt: skip
# Vanilla's drift around its scaled rate in the paper's table, to one decimal, and muP's rule for the output.
VANILLA_SCALINGS: dict[str, tuple[ScalingRule, ...]] = {
    "output multiplier N^+0.5": (ScalingRule("output_multiplier", 0.5),),
    "weight decay N^-0.1": (ScalingRule("weight_decay", -0.1),),
    "muP output": (ScalingRule("output_multiplier", -1.0, "width"),),
}


def ablations(
    context: StudyContext, *, parts: Sequence[str] = (), rungs: Sequence[int] = (), seeds: Sequence[int] = ()
) -> Study:
    """Appendix "Additional Results for Compute-Optimal Scalings": its ablation ladders, a part each.

    Every part has its own reference, so multipliers do not compare across parts. Arms that cannot exist at a
    preset's small depths are measured on the other rungs, or left out with a warning. `optimizer` first fits
    the other optimizers' recipes (learning rate, exponent, tokens per parameter), then compares ladders.
    """
    works: dict[str, Work[Draft]] = {}
    for part in choose_parts("ablations", parts):
        if part == "optimizer":
            arm = context.preset.grids.ablations.optimizer_arm
            for regime, name in (("width and depth", arm), ("width only", f"width-only-{arm}")):
                own = ladder_spec(context, find_arm(name), rungs)
                works[f"optimizer, {regime}"] = _tuned_optimizers(context, own, seeds)
        else:
            works[part] = _judged(context, _ladders(context, part, rungs), seeds)
    found: list[Draft] = yield from run_concurrently(list(works.values()))
    draft = Draft(method=["Every part is judged against the first ladder of its own group."])
    for name, own in zip(works, found, strict=True):
        draft.method += [sentence for sentence in own.method[1:] if sentence not in draft.method]
        draft.add(named_part(own, name), part=name)
    return draft.answer("ablations", "Which design choices account for the gains?", SECTION)


def named_part(draft: Draft, part: str) -> Draft:
    """What a part has found, with figures, tables and warnings that say which part they are of."""
    return replace(
        draft,
        findings=[],
        panels=[
            replace(panel, group=f"{part}: {panel.group}" if panel.group else part) for panel in draft.panels
        ],
        tables=[replace(table, title=f"{part}: {table.title}") for table in draft.tables],
        warnings=[f"{part}: {note}" for note in draft.warnings],
        method=[],
    )


def _judged(context: StudyContext, ladders: Sequence[LadderSpec], seeds: Sequence[int]) -> Work[Draft]:
    return compare_ladders(context, ladders, ladders[0].label, seeds=seeds, whole=False)


def _ladders(context: StudyContext, part: str, rungs: Sequence[int]) -> list[LadderSpec]:
    ladders = [ladder_spec(context, find_arm(name), rungs) for name in GROUPS[part]]
    if part == "hyperparameters":
        (own,) = ladders
        flat = replace(own.recipe, learning_rate_exponent=0.0)
        recipes = {
            **{name: replace(own.recipe, scaling=rules) for name, rules in VANILLA_SCALINGS.items()},
            "warm-down 1": replace(own.recipe, base=replace(own.recipe.base, warmdown_fraction=1.0)),
            "constant": flat,
            "constant, muP output": replace(flat, scaling=VANILLA_SCALINGS["muP output"]),
        }
        ladders += [replace(own, recipe=recipe, variant=name) for name, recipe in recipes.items()]
    if part == "constant":
        ladders = [replace(own, recipe=with_constant_rate(own.arm, own.recipe)) for own in ladders]
    return _growth_prescriptions(ladders[0]) if part == "growth" else ladders


def _growth_prescriptions(own: LadderSpec) -> list[LadderSpec]:
    """The recipe's tokens and ρ against simpler ones (Figure "Token allocation and growth prescription").

    At the base learning rate, as the authors ran it: the arm's tokens per parameter or those of the arm it
    starts as, crossed with ρ by the recipe or one ρ for all sizes.
    """
    base = replace(own.recipe, learning_rate_exponent=0.0)
    simple = FIXED_RHO_TPP if base.tpp != FIXED_RHO_TPP else base.tpp * 4 / 3
    fixed = FIXED_RHO.get(own.arm.recipe, 0.3)
    if base.rho == fixed:  # the recipe is the simple one already: half as long after growth
        fixed = fixed / 2
    own_rho = "fitted ρ" if base.rho is None else f"ρ = {base.rho:g}"
    found = [replace(own, recipe=base)]
    for tpp, rho in ((base.tpp, fixed), (simple, None), (simple, fixed)):
        recipe = base.with_tpp(tpp)
        if rho is not None:
            recipe = replace(recipe, rho=rho, listed_rho=(), growth_law=None)
        name = f"TPP {tpp:g}, {own_rho if rho is None else f'ρ = {rho:g}'}"
        found.append(replace(own, recipe=recipe, variant=name))
    return found


def _tuned_optimizers(context: StudyContext, own: LadderSpec, seeds: Sequence[int]) -> Work[Draft]:
    """Fit each optimizer's recipe (rate, exponent, TPP), then compare ladders; Muon is the reference."""
    starts = dict(context.preset.grids.ablations.optimizers)
    answers: list[Answer] = yield from run_concurrently(
        [_fit(context, own.arm, OptimizerConfig.find(name), rate) for name, rate in starts.items()]
    )
    fitted = dict(zip(starts, answers, strict=True))
    recipes = {name: answer.recipes[0].recipe for name, answer in fitted.items()}
    others = [replace(own, recipe=recipe, optimizer=OptimizerConfig.find(name), variant=name)
              for name, recipe in recipes.items()]  # fmt: skip
    draft = yield from _judged(context, [own, *others], seeds)
    rows = [
        {
            "optimizer": name, "learning rate": recipe.base.learning_rate,
            "exponent": recipe.learning_rate_exponent, "tokens per parameter": recipe.tpp,
            "weight decay": recipe.base.weight_decay,
        }
        for name, recipe in {"reference": own.recipe, **recipes}.items()
    ]  # fmt: skip
    draft.tables.append(table("Recipes of the optimizers", rows))
    draft.values["tuned"] = {name: answer.values["recipe"] for name, answer in fitted.items()}
    for name, answer in fitted.items():
        draft.warnings += [f"{name}: {note}" for note in answer.warnings]
        draft.runs += answer.runs
    return draft


def _fit(context: StudyContext, arm: Arm, optimizer: OptimizerConfig, rate: float) -> Study:
    """The stages of `fit-recipe` with another optimizer, from a starting rate, with fewer sweeps."""
    grids = context.preset.grids
    fewer = replace(
        grids,
        chain=replace(grids.chain, sweeps=grids.ablations.tuned),
        lr_rule=replace(grids.lr_rule, hyperparameters=("learning_rate",)),
    )
    recipe = context.recipe(arm)
    start = replace(recipe, base=replace(recipe.base, learning_rate=rate), learning_rate_base=None)
    own = replace(context, preset=replace(context.preset, grids=fewer), optimizer=optimizer)
    return fit_recipe(own.with_recipe(arm, start), arms=[arm], from_recipe=True)
