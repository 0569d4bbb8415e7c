"""To how many passes a network should grow."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from steepen.laws.fits.choice import Choice, choose
from steepen.model.arm import Arm
from steepen.model.stages import PassSchedule
from steepen.studies.answer import Axis, Draft, Panel, Study
from steepen.studies.cells import Cells, Plan, measure, table
from steepen.studies.context import Arms, StudyContext, find_growing_arms, find_one_arm
from steepen.studies.plotting import joined_curves, points
from steepen.utils.formatting import format_flops

SECTION = "Appendix A.2.3, Choosing the Growth Target and Transition"
MAX_CONTROL = 1.5  # compute of a control over the largest budget: dearer ones compare with nothing


def growth_target(context: StudyContext, *, arms: Arms = ()) -> Study:
    """Appendix "Choosing the Growth Target and Transition": targets of growth from two passes.

    At the base size and tokens, each target's growth step is chosen so that all targets spend the same
    compute: a larger target is used for a smaller fraction of the tokens. Fixed passes are run as controls.
    The best target has the lowest loss on average over budgets; targets that the scatter over budgets cannot
    tell from it tie. A budget without a finished growing run does not count.
    """
    arm = find_one_arm(find_growing_arms(arms or ("loop-grow",), "growth-target"), "growth-target")
    plans, skipped = _plans(context, arm)
    cells = yield from measure(context, plans)
    preset, threshold = context.preset, context.preset.grids.chain.threshold
    draft = Draft(warnings=skipped, runs=cells.column("run"))
    _judge(draft, arm.name, cells.where(kind="grown"), threshold)
    draft.values["cells"] = cells.map(lambda cell: cell.plus(fixed=cell["kind"] == "fixed")).dicts(
        "target", "budget", "rho", "fixed", "run", "loss", effective_depth="kl_depth"
    )
    draft.panels += _panels(arm.name, cells)
    columns = {
        "passes": "target",
        "kind": "kind",
        "FLOPs": "budget",
        "ρ": "rho",
        "loss": "loss",
        "run": "run",
    }
    draft.tables.append(table("Growth targets", cells, columns=columns))
    draft.method += [
        f"Depth {preset.base_depth} on {preset.fixed_tokens:,} tokens under the base recipe; at each budget "
        "the transition is placed so that every target spends it.",
        "Errors are the scatter about target + budget; targets tie if p ≥ 0.05, adjusted for their number; "
        f"with one budget, if they are less than {threshold:g} apart.",
        context.sweep_flops_method,
    ]
    question = f"To how many passes should {arm.name} grow from {arm.passes.initial}?"
    return draft.answer("growth-target", question, SECTION)


def _plans(context: StudyContext, arm: Arm) -> tuple[list[Plan], list[str]]:
    """The runs of every target and budget and the controls, and the targets that cannot spend a budget."""
    preset, grid = context.preset, context.preset.grids.growth_target
    depth, tokens = preset.base_depth, preset.fixed_tokens
    recipe, first = context.constant_recipe(arm), arm.passes.initial
    cost = {k: context.flops_per_token(arm, depth, k) for k in {first, 2 * first, *grid.targets}}
    plans: list[Plan] = []
    skipped: list[str] = []
    for fraction in sorted(grid.fractions):
        spent = fraction * (cost[2 * first] - cost[first])  # FLOPs per token that growth adds
        budget = tokens * (cost[first] + spent)
        for target in sorted(grid.targets):
            rho = spent / (cost[target] - cost[first])
            if rho > 1:
                skipped.append(f"target {target} cannot spend {format_flops(budget)} FLOPs on these tokens")
                continue
            run = recipe.at_budget(_grown(arm, target), depth, context.size_rule, tokens=tokens, rho=rho)
            plans.append((run, {"kind": "grown", "target": target, "budget": budget, "rho": rho}))
    limit = MAX_CONTROL * max(values["budget"] for _, values in plans)
    for passes in sorted({first, *grid.targets}):
        if cost[passes] * tokens <= limit:
            run = recipe.at_budget(_fixed(arm, passes), depth, context.size_rule, tokens=tokens)
            flops = context.sweep_flops(run)
            plans.append((run, {"kind": "fixed", "target": passes, "budget": flops, "rho": 1.0}))
    return plans, skipped


def _grown(arm: Arm, target: int) -> Arm:
    first = arm.passes.initial
    name = arm.name if (first, target) == (2, 4) and arm.passes.final == 4 else f"{arm.name}-to-{target}"
    return replace(
        arm, name=name, title=f"{arm.title} to {target}", passes=PassSchedule.growing(first, target)
    )


def _fixed(arm: Arm, passes: int) -> Arm:
    family = "loop" if arm.tied else "untied"
    name = f"{family}-{passes}" if "inject" in arm.core_boundary else f"{arm.name}-fixed-{passes}"
    return replace(arm, name=name, title=f"{arm.title}, fixed {passes}", passes=PassSchedule.fixed(passes))


def _judge(draft: Draft, name: str, grown: Cells, threshold: float) -> None:
    """Add the best target, in words and numbers, and the budgets that do not count."""
    finished, budgets = grown.having("loss").by("budget"), grown.by("budget")
    draft.warnings += [
        f"every run that grows diverged at {format_flops(budget)} FLOPs: that budget does not count"
        for budget in budgets
        if budget not in finished
    ]
    values: dict[str, Any] = {"target": None, "ties": [], "behind": {}, "errors": None}
    if not finished:
        draft.findings.append(f"{name}: every run that grows diverged, so there is no best target.")
    else:
        losses = {(cell["target"], cell["budget"]): cell.loss for cell in grown.having("loss")}
        choice = choose(losses, threshold)
        wins = Counter(min(own, key=lambda cell: cell.loss)["target"] for own in finished.values())
        count = wins[choice.best]
        where = "every budget" if count == len(budgets) else f"{count} of {len(budgets)} budgets"
        tied = " and ".join(map(str, sorted((choice.best, *choice.ties))))
        said = f"growing to {choice.best} passes has the lowest loss at {where}"
        if not choice.decided:
            said = f"growing to {tied} passes is a tie; {choice.best} is lowest at {where}"
        draft.findings.append(f"{name}: {said}{_margin(choice)}.")
        values = {
            "target": choice.best, "ties": sorted(choice.ties), "behind": dict(sorted(choice.behind.items())),
            "errors": None if choice.errors is None else dict(sorted(choice.errors.items())),
        }  # fmt: skip
    draft.values |= values


def _margin(choice: Choice[int]) -> str:
    """By how much the best target leads the next, with its error."""
    if not choice.behind:
        return ""
    nearest = min(choice.behind, key=lambda target: choice.behind[target])
    if choice.errors is None:
        return f" (by {choice.behind[nearest]:.4f} over {nearest}, without an error: there is one budget)"
    return f" (by {choice.behind[nearest]:.4f} ± {choice.errors[nearest]:.4f} over {nearest})"


def _panels(name: str, cells: Cells) -> list[Panel]:
    """Loss and, where it was evaluated, effective depth against the target, a curve for each budget."""
    panels: list[Panel] = []
    for y, title, label, caption in (
        ("loss", "growth target", "validation loss", "Hollow: that many passes throughout."),
        ("kl_depth", "effective depth", "KL effective depth", ""),
    ):
        known = cells.having(y)
        series = joined_curves(known.where(kind="grown"), "target", y, "budget")
        fixed = known.where(kind="fixed")
        if fixed:
            control: dict[str, Any] = {"role": "control", "filled": False}
            x, runs = fixed.column("target"), fixed.column("run")
            series.append(points("fixed passes", x, fixed.column(y), runs, **control))
        if series:
            axes = Axis("passes grown to"), Axis(label)
            panels.append(Panel(f"{name}: {title}", *axes, tuple(series), caption=caption))
    return panels
