"""The paper's ablation ladders: operator, allocation, shape, width only, optimizer, random passes, recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from steepen.errors import UsageError, nearest
from steepen.model.arm import Arm
from steepen.model.arms import find_arm
from steepen.optim.config import OptimizerConfig
from steepen.recipe.paper_tables import with_constant_rate
from steepen.recipe.recipe import ScalingRule
from steepen.recipe.recipe_choice import FIXED_RHO, FIXED_RHO_TPP
from steepen.studies.answer import Answer, Study, Table
from steepen.studies.context import StudyContext
from steepen.studies.driver.run_concurrently import run_concurrently
from steepen.studies.ladders.ladder import compare_ladders
from steepen.studies.ladders.ladder_runs import LadderSpec, ladder_spec
from steepen.studies.stages.fit_recipe import fit_recipe

SECTION = "Appendix B, Additional Results for Compute-Optimal Scalings"


@dataclass(frozen=True)
class AblationGroup:
    """Arms whose ladders are compared with one another; the first is the reference."""

    part: str
    question: str
    arms: tuple[str, ...]


ABLATION_GROUPS = (
    AblationGroup(
        "operator", "Which parts of the boundary operator matter?",
        ("vanilla", "untied-2", "deep-vanilla", "untied-2-norm-only", "untied-2-inject-only",
         "untied-2-no-coda-injection"),
    ),
    AblationGroup(
        "allocation", "Must prelude, core and coda scale together with depth?",
        ("vanilla", "loop-2", "loop-2-no-coda-injection", "loop-2-nci-2-c-3", "operator-1",
         "operator-1-1-c-2"),
    ),
    AblationGroup(
        "shape", "Do deeper shapes scale better?",
        ("vanilla", "deep-vanilla", "deeper-vanilla", "operator-1", "deeper-operator-1"),
    ),
    AblationGroup(
        "width-only", "Does the operator's gain survive when only the width grows?",
        ("width-only-deep-vanilla", "width-only-vanilla", "width-only-operator-1", "width-only-loop-2",
         "width-only-untied-2"),
    ),
    AblationGroup(
        "width-and-depth", "Does the operator's gain survive when width and depth grow?",
        ("deep-vanilla", "loop-2", "untied-2"),
    ),
    AblationGroup("optimizer", "Does Muon's gain over other optimizers persist with scale?", ()),
    AblationGroup("growth", "Must tokens and moment of growth be tuned at every size?", ("untied-grow",)),
    AblationGroup("random", "What do random passes after growth cost?", ("loop-grow", "random-loop-grow")),
    AblationGroup(
        "hyperparameters", "Does scaling more than the learning rate change Vanilla's law?", ("vanilla",)
    ),
    AblationGroup(
        "constant", "How do the arms compare under constant recipes?",
        ("vanilla", "operator-1", "loop-2", "untied-2", "loop-grow", "untied-grow"),
    ),
)  # fmt: skip
# Vanilla's drift around its scaled rate in the paper's table, to one decimal, and muP's rule for the output.
VANILLA_SCALINGS: dict[str, tuple[ScalingRule, ...]] = {
    "output multiplier N^+0.5": (ScalingRule("output_multiplier", 0.5),),
    "weight decay N^-0.1": (ScalingRule("weight_decay", -0.1),),
    "muP output": (ScalingRule("output_multiplier", -1.0, "width"),),
}
PARTS = tuple(group.part for group in ABLATION_GROUPS)


def ablations(
    context: StudyContext, *, parts: Sequence[str] = (), rungs: Sequence[int] = (), seeds: Sequence[int] = ()
) -> Study:
    """Appendix "Additional Results for Compute-Optimal Scalings": its ablation ladders, a part each.

    Every part has its own reference, so multipliers do not compare across parts. Arms that cannot exist at a
    preset's small depths are measured on the other rungs, or left out with a warning. `optimizer` first fits
    the other optimizers' recipes (learning rate, exponent, tokens per parameter), then compares ladders.
    """
    for part in parts:
        if part not in PARTS:
            raise UsageError(f"--part {part!r} is not known here; the nearest are {nearest(part, PARTS)}.")
    works: dict[str, Study] = {}
    for group in ABLATION_GROUPS:
        if group.part not in (parts or PARTS):
            continue
        if group.part == "optimizer":
            works |= _optimizers(context, group, rungs, seeds)
        else:
            ladders = _ladders(context, group, rungs)
            works[group.part] = _judged(context, ladders, group.question, seeds)
    answers: list[Answer] = yield from run_concurrently(list(works.values()))
    return _joined(dict(zip(works, answers, strict=True)))


def _judged(
    context: StudyContext, ladders: Sequence[LadderSpec], question: str, seeds: Sequence[int]
) -> Study:
    return compare_ladders(
        context, ladders, ladders[0].label, study="ablations", section=SECTION, question=question,
        seeds=seeds, by_time=False,
    )  # fmt: skip


def _ladders(context: StudyContext, group: AblationGroup, rungs: Sequence[int]) -> list[LadderSpec]:
    ladders = [ladder_spec(context, find_arm(name), rungs) for name in group.arms]
    if group.part == "hyperparameters":
        (own,) = ladders
        flat = replace(own.recipe, learning_rate_exponent=0.0)
        recipes = {
            **{name: replace(own.recipe, scaling=rules) for name, rules in VANILLA_SCALINGS.items()},
            "warm-down 1": replace(own.recipe, base=replace(own.recipe.base, warmdown_fraction=1.0)),
            "constant": flat,
            "constant, muP output": replace(flat, scaling=VANILLA_SCALINGS["muP output"]),
        }
        ladders += [replace(own, recipe=recipe, variant=name) for name, recipe in recipes.items()]
    if group.part == "constant":
        ladders = [replace(own, recipe=with_constant_rate(own.arm, own.recipe)) for own in ladders]
    if group.part == "growth":
        (own,) = ladders
        ladders = _growth_prescriptions(own)
    return ladders


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


def _optimizers(
    context: StudyContext, group: AblationGroup, rungs: Sequence[int], seeds: Sequence[int]
) -> dict[str, Study]:
    """Every optimizer against Muon, growing width with depth and width alone; Muon is the reference."""
    arm = context.preset.grids.ablations.optimizer_arm
    regimes = {"width and depth": arm, "width only": f"width-only-{arm}"}
    return {
        f"optimizer, {regime}": _tuned_optimizers(context, find_arm(name), group.question, rungs, seeds)
        for regime, name in regimes.items()
    }


def _tuned_optimizers(
    context: StudyContext, arm: Arm, question: str, rungs: Sequence[int], seeds: Sequence[int]
) -> Study:
    """Fit each optimizer's recipe for an arm (rate, exponent, TPP), then compare ladders."""
    grid = context.preset.grids.ablations
    own = ladder_spec(context, arm, rungs)
    fitted: list[Answer] = yield from run_concurrently(
        [_fit(context, arm, OptimizerConfig.find(name), rate) for name, rate in grid.optimizers]
    )
    ladders = [own]
    for (name, _), answer in zip(grid.optimizers, fitted, strict=True):
        recipe = answer.recipes[0].recipe
        ladders.append(LadderSpec(arm, recipe, own.depths, OptimizerConfig.find(name), variant=name))
    judged = yield from _judged(context, ladders, question, seeds)
    return replace(
        judged,
        values={
            **judged.values,
            "tuned": {
                name: answer.values["recipe"]
                for (name, _), answer in zip(grid.optimizers, fitted, strict=True)
            },
        },
        tables=(*judged.tables, _tuned_table(own, grid.optimizers, fitted)),
        warnings=(
            *judged.warnings,
            *(
                f"{n}: {note}"
                for (n, _), a in zip(grid.optimizers, fitted, strict=True)
                for note in a.warnings
            ),
        ),
        runs=tuple(dict.fromkeys((*judged.runs, *(run for answer in fitted for run in answer.runs)))),
    )


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


def _tuned_table(own: LadderSpec, optimizers: Sequence[tuple[str, float]], fitted: Sequence[Answer]) -> Table:
    recipes = [("reference", own.recipe)]
    recipes += [(name, a.recipes[0].recipe) for (name, _), a in zip(optimizers, fitted, strict=True)]
    rows = tuple(
        (name, recipe.base.learning_rate, recipe.learning_rate_exponent, recipe.tpp, recipe.base.weight_decay)
        for name, recipe in recipes
    )
    return Table(
        "Recipes of the optimizers",
        ("optimizer", "learning rate", "exponent", "tokens per parameter", "weight decay"),
        rows,
    )


def _joined(answers: dict[str, Answer]) -> Answer:
    verdicts = tuple(
        replace(verdict, part=name) for name, answer in answers.items() for verdict in answer.verdicts
    )
    return Answer(
        study="ablations",
        question="Which design choices account for the gains?",
        section=SECTION,
        findings=(),
        values={name: answer.values for name, answer in answers.items()},
        verdicts=verdicts,
        fits=tuple(replace(fit, part=name) for name, answer in answers.items() for fit in answer.fits),
        panels=tuple(
            replace(panel, group=f"{name}: {panel.group}" if panel.group else name)
            for name, answer in answers.items()
            for panel in answer.panels
        ),
        tables=tuple(
            replace(table, title=f"{name}: {table.title}")
            for name, answer in answers.items()
            for table in answer.tables
        ),
        warnings=tuple(f"{name}: {note}" for name, answer in answers.items() for note in answer.warnings),
        cautions=tuple(dict.fromkeys(note for answer in answers.values() for note in answer.cautions)),
        method=(
            "Every part is judged against the first ladder of its own group.",
            *dict.fromkeys(sentence for answer in answers.values() for sentence in answer.method[1:]),
        ),
        runs=tuple(dict.fromkeys(run for answer in answers.values() for run in answer.runs)),
    )
