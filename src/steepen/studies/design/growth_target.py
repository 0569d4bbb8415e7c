"""To how many passes a network should grow, chosen with the uncertainty of the choice."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from steepen.errors import UsageError
from steepen.laws.distributions import ROUNDING_ERROR, t_p_value
from steepen.model.arm import Arm
from steepen.model.stages import Stage, StageSchedule
from steepen.recipe.flops import flops_per_token
from steepen.studies.answer import Axis, Draft, Panel, Study
from steepen.studies.cells import Cells, Plan, measure, table
from steepen.studies.context import Arms, StudyContext, find_growing_arms, find_one_arm, starting_arm
from steepen.studies.plotting import joined_curves, points
from steepen.utils.formatting import format_flops

SECTION = "Appendix A.2.3, Choosing the Growth Target and Transition"
COLUMNS = {"passes": "target", "kind": "kind", "FLOPs": "budget", "ρ": "rho", "loss": "loss", "run": "run"}
LEVEL = 0.05  # probability of any wrong rejection of a tie
MAX_CONTROL = 1.5  # compute of a control over the largest budget: dearer ones compare with nothing


def growth_target(context: StudyContext, *, arms: Arms = ()) -> Study:
    """Appendix "Choosing the Growth Target and Transition": targets of growth from two passes.

    At the base size and tokens, each target's growth step is chosen so that all targets spend the same
    compute: a larger target is used for a smaller fraction of the tokens. Fixed passes are run as controls.
    An arm that grows along another axis starts at 2/target of its size instead.

    The best target has the lowest loss on average over budgets; targets that the scatter over budgets cannot
    tell from it tie. A budget without a finished growing run does not count.
    """
    arm = find_one_arm(find_growing_arms(arms or ("loop-grow",), "growth-target"), "growth-target")
    plans, skipped = _plans(context, arm)
    cells = yield from measure(context, plans, branches=True)
    preset, threshold = context.preset, context.preset.grids.chain.threshold
    draft = Draft(warnings=skipped, runs=cells.column("run"))
    _judge(draft, arm, cells.where(kind="grown"), threshold)
    draft.values["cells"] = cells.map(lambda cell: cell.plus(fixed=cell["kind"] == "fixed")).dicts(
        "target", "budget", "rho", "fixed", "run", "loss", effective_depth="kl_depth"
    )
    draft.panels += _panels(arm.name, cells)
    draft.tables.append(table("Growth targets", cells, columns=COLUMNS))
    draft.method += [
        f"Depth {preset.base_depth} on {preset.fixed_tokens:,} tokens under the base recipe; at each budget "
        "the transition is placed so that every target spends it.",
        "Errors are the scatter about target + budget; targets tie if p ≥ 0.05, adjusted for their number; "
        f"with one budget, if they are less than {threshold:g} apart.",
        context.sweep_flops_method,
    ]
    question = f"To how many passes should {arm.name} grow from {arm.passes.initial}?"
    if arm.passes.axes != ("passes",):
        question = f"From how small a size (2/target) should {arm.name} grow?"
    return draft.answer("growth-target", question, SECTION)


def _plans(context: StudyContext, arm: Arm) -> tuple[list[Plan], list[str]]:
    """The runs of every target and budget and the controls, and the targets that cannot spend a budget."""
    preset, grid = context.preset, context.preset.grids.growth_target
    depth, tokens = preset.base_depth, preset.fixed_tokens
    recipe, first = context.constant_recipe(arm), _first(arm)
    skipped: list[str] = []
    grown: dict[int, tuple[Arm, float, float]] = {}  # with its FLOPs per token before and after growth
    for target in sorted({2 * first, *grid.targets}):
        try:
            made = _grown(arm, target)
            grown[target] = made, *_costs(context, made, depth)
        except UsageError as error:
            skipped.append(f"target {target}: {error}")
    if 2 * first not in grown:
        raise UsageError(f"growth-target cannot double {arm.name} at depth {depth}: {skipped[0]}")
    plans: list[Plan] = []
    _, start, doubled = grown[2 * first]
    for fraction in sorted(grid.fractions):
        spent = fraction * (doubled - start)  # FLOPs per token that growth adds
        budget = tokens * (start + spent)
        for target in sorted({*grid.targets} & grown.keys()):
            made, before, after = grown[target]
            rho = (spent + (start - before)) / (after - before) if after > before else math.inf
            if not 0 < rho <= 1:
                skipped.append(f"target {target} cannot spend {format_flops(budget)} FLOPs on these tokens")
                continue
            run = recipe.at_budget(made, depth, context.size_rule, tokens=tokens, rho=rho)
            plans.append((run, {"kind": "grown", "target": target, "budget": budget, "rho": rho}))
    if not plans:
        raise UsageError(f"no target of {arm.name} can spend a budget: {'; '.join(skipped)}.")
    limit = MAX_CONTROL * max(values["budget"] for _, values in plans)
    in_passes = arm.passes.axes == ("passes",)
    for passes in sorted({first, *grid.targets} if in_passes else {first}):
        fixed = _fixed(arm, passes) if in_passes else starting_arm(arm)
        if context.flops_per_token(fixed, depth) * tokens <= limit:
            run = recipe.at_budget(fixed, depth, context.size_rule, tokens=tokens)
            flops = context.sweep_flops(run)
            plans.append((run, {"kind": "fixed", "target": passes, "budget": flops, "rho": 1.0}))
    return plans, skipped


def _first(arm: Arm) -> int:
    """What targets are multiples of: the passes before growth; along other axes 2, as of the paper's arms."""
    return arm.passes.initial if arm.passes.axes == ("passes",) else 2


def _costs(context: StudyContext, arm: Arm, depth: int) -> tuple[float, float]:
    """FLOPs per token of the first and the last stage, as sweeps count them."""
    shape, stages = arm.shape(depth, context.size_rule), arm.passes.stages
    arm.networks(shape, arm.passes)  # raises if this size cannot grow so
    first, last = (
        flops_per_token(*arm.at(stage, shape), stage.median_passes).counted(context.preset.sweep_flops)
        for stage in (stages[0], stages[-1])
    )
    return first, last


def _grown(arm: Arm, target: int) -> Arm:
    """The arm grown to other passes; along another axis it starts smaller, and ends as it is."""
    first, axes = arm.passes.initial, arm.passes.axes
    if axes != ("passes",):
        if len(axes) != 1:
            raise UsageError(f"growth-target varies one axis, and {arm.name} grows in {' and '.join(axes)}.")
        stages = Stage((first,), 0.0, **{axes[0]: _first(arm) / target}), Stage((first,), None)
        name = f"{arm.name}-by-{target / _first(arm):g}"
        return replace(arm, name=name, passes=replace(arm.passes, stages=stages))
    name = arm.name if (first, target) == (2, 4) and arm.passes.final == 4 else f"{arm.name}-to-{target}"
    return replace(
        arm, name=name, title=f"{arm.title} to {target}", passes=StageSchedule.growing(first, target)
    )


def _fixed(arm: Arm, passes: int) -> Arm:
    family = "loop" if arm.tied else "untied"
    name = f"{family}-{passes}" if "inject" in arm.core_boundary else f"{arm.name}-fixed-{passes}"
    return replace(arm, name=name, title=f"{arm.title}, fixed {passes}", passes=StageSchedule.fixed(passes))


@dataclass(frozen=True)
class Choice:
    """The target with the lowest mean loss, and those that the runs cannot tell from it.

    `behind` is each other target's loss above the best one's, `errors` the standard errors of these
    differences; None without a degree of freedom.
    """

    best: int
    ties: tuple[int, ...]  # without the best itself
    behind: dict[int, float]
    errors: dict[int, float] | None


def choose(losses: Mapping[tuple[int, float], float], resolution: float) -> Choice:
    """Compare targets by their losses at (target, budget), where every budget adds a loss of its own.

    The scatter about target + budget gives the error of a difference. A target ties with the best if its
    difference is not significant, adjusted for the number of targets; without a degree of freedom, if it is
    below `resolution`, the difference that single runs are trusted to show.
    """
    finite = {key: loss for key, loss in losses.items() if math.isfinite(loss)}
    targets = list(dict.fromkeys(target for target, _ in finite))
    budgets = list(dict.fromkeys(budget for _, budget in finite))
    design = np.zeros((len(finite), len(targets) + len(budgets)))
    for row, (target, budget) in enumerate(finite):
        design[row, targets.index(target)] = 1.0
        design[row, len(targets) + budgets.index(budget)] = 1.0
    y = np.array(list(finite.values()))
    inverse = np.asarray(np.linalg.pinv(design.T @ design), np.float64)
    effect = inverse @ design.T @ y
    free = len(y) - int(np.linalg.matrix_rank(design))
    residual = y - design @ effect
    variance = max(float(residual @ residual) / max(free, 1), (ROUNDING_ERROR * float(y.mean())) ** 2)
    place = int(np.argmin(effect[: len(targets)]))
    best, ties, behind, errors = targets[place], list[int](), dict[int, float](), dict[int, float]()
    for i, target in enumerate(targets):
        if target == best:
            continue
        contrast = np.zeros(design.shape[1])
        contrast[i], contrast[place] = 1.0, -1.0
        difference = behind[target] = float(contrast @ effect)
        error = errors[target] = math.sqrt(max(float(contrast @ inverse @ contrast) * variance, 1e-300))
        if free > 0:
            tied = t_p_value(difference, error, free) * (len(targets) - 1) >= LEVEL
        else:
            tied = difference < resolution
        ties += [target] if tied else []
    return Choice(best, tuple(ties), behind, errors if free else None)


def _judge(draft: Draft, arm: Arm, grown: Cells, threshold: float) -> None:
    """Add the best target, in words and numbers, and the budgets that do not count."""
    name, in_passes = arm.name, arm.passes.axes == ("passes",)
    to, unit = ("growing to ", " passes") if in_passes else (f"growing from {_first(arm)}/", " of the size")
    finished, budgets = grown.having("loss").by("budget"), grown.by("budget")
    draft.warnings += [
        f"every run that grows diverged at {format_flops(budget)} FLOPs: that budget does not count"
        for budget in budgets
        if budget not in finished
    ]
    if not finished:
        draft.findings.append(f"{name}: every run that grows diverged, so there is no best target.")
        draft.values |= {"target": None, "ties": [], "behind": {}, "errors": None}
        return
    choice = choose({(cell["target"], cell["budget"]): cell.loss for cell in grown.having("loss")}, threshold)
    count = [min(own, key=lambda cell: cell.loss)["target"] for own in finished.values()].count(choice.best)
    where = "every budget" if count == len(budgets) else f"{count} of {len(budgets)} budgets"
    tied = " and ".join(map(str, sorted((choice.best, *choice.ties))))
    said = f"{to}{choice.best}{unit} has the lowest loss at {where}"
    if choice.ties:
        said = f"{to}{tied}{unit} is a tie; {choice.best} is lowest at {where}"
    draft.findings.append(f"{name}: {said}{_margin(choice)}.")
    draft.values |= {
        "target": choice.best, "ties": sorted(choice.ties), "behind": dict(sorted(choice.behind.items())),
        "errors": choice.errors and dict(sorted(choice.errors.items())),
    }  # fmt: skip


def _margin(choice: Choice) -> str:
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
            columns = (fixed.column(name) for name in ("target", y, "run"))
            series.append(points("fixed passes", *columns, role="control", filled=False))
        if series:
            axes = Axis("passes grown to"), Axis(label)
            panels.append(Panel(f"{name}: {title}", *axes, tuple(series), caption=caption))
    return panels
