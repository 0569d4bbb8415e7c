"""To how many passes a network should grow."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from steepen.errors import UsageError
from steepen.laws.fits.choice import Choice, choose
from steepen.model.arm import Arm, PassSchedule
from steepen.runs.spec import RunSpec
from steepen.studies.answer import Answer, Axis, Panel, Series, Study, Table
from steepen.studies.context import Arms, StudyContext, find_arms, kl_depth_of_record, loss_or_inf
from steepen.studies.plotting import family_curve, line, points
from steepen.utils.formatting import format_flops

SECTION = "Appendix A.2.3, Choosing the Growth Target and Transition"


@dataclass(frozen=True)
class TargetRun:
    """One growth target at one budget (or a fixed number of passes, as a control)."""

    target: int
    budget: float
    rho: float
    loss: float
    run: str
    kl_depth: float | None  # KL effective depth, if the record has it
    fixed: bool = False


def growth_target(context: StudyContext, *, arms: Arms = ()) -> Study:
    """Appendix "Choosing the Growth Target and Transition": targets of growth from two passes.

    At the base size and tokens, each target's growth step is chosen so that all targets spend the same
    compute: a larger target is used for a smaller fraction of the tokens. Fixed passes are run as controls.
    The best target has the lowest loss on average over budgets; targets that the scatter over budgets cannot
    tell from it tie. A budget without a finished growing run does not count.
    """
    grid = context.preset.grids.growth_target
    chosen = find_arms(arms or ("loop-grow",))
    if len(chosen) != 1 or not chosen[0].passes.grows:
        raise UsageError("growth-target works on one growing arm, e.g. --arms loop-grow.")
    arm = chosen[0]
    recipe = replace(context.recipe(arm), learning_rate_exponent=0.0)
    depth, tokens = context.preset.base_depth, context.preset.fixed_tokens
    first = arm.passes.initial
    base, doubled = context.flops_per_token(arm, depth, first), context.flops_per_token(arm, depth, 2 * first)
    plans: list[tuple[int, float, float, bool, RunSpec]] = []
    skipped: list[str] = []
    for fraction in sorted(grid.fractions):
        budget = tokens * (base + fraction * (doubled - base))
        for target in sorted(grid.targets):
            rho = fraction * (doubled - base) / (context.flops_per_token(arm, depth, target) - base)
            if rho > 1:
                skipped.append(f"target {target} cannot spend {format_flops(budget)} FLOPs on these tokens")
                continue
            grown = _grown(arm, target)
            planned = recipe.at_budget(grown, depth, context.size_rule, tokens=tokens, rho=rho)
            plans.append((target, budget, rho, False, context.spec(planned)))
    for passes in sorted({first, *grid.targets}):
        fixed = _fixed(arm, passes)
        if context.flops_per_token(arm, depth, passes) * tokens > 1.5 * max(plan[1] for plan in plans):
            continue  # too expensive to serve as a control
        planned = recipe.at_budget(fixed, depth, context.size_rule, tokens=tokens)
        plans.append((passes, context.sweep_flops(planned), 1.0, True, context.spec(planned)))
    records = yield [plan[-1] for plan in plans]
    cells = [
        TargetRun(target, budget, rho, loss_or_inf(record), spec.hash, kl_depth_of_record(record), fixed)
        for (target, budget, rho, fixed, spec), record in zip(plans, records, strict=True)
    ]
    return _answer(context, arm, cells, skipped)


def _grown(arm: Arm, target: int) -> Arm:
    first = arm.passes.initial
    name = arm.name if (first, target) == (2, 4) and arm.passes.final == 4 else f"{arm.name}-to-{target}"
    return replace(
        arm, name=name, title=f"{arm.title} to {target}", passes=PassSchedule.growing(first, target)
    )


def _fixed(arm: Arm, passes: int) -> Arm:
    family = "loop" if arm.tied else "untied"
    operator = "inject" in arm.core_boundary
    name = f"{family}-{passes}" if operator else f"{arm.name}-fixed-{passes}"
    return replace(arm, name=name, title=f"{arm.title}, fixed {passes}", passes=PassSchedule.fixed(passes))


def _margin(choice: Choice[int]) -> str:
    """By how much the best target leads the next, with its error."""
    if not choice.behind:
        return ""
    nearest = min(choice.behind, key=lambda target: choice.behind[target])
    if choice.errors is None:
        return f" (by {choice.behind[nearest]:.4f} over {nearest}, without an error: there is one budget)"
    return f" (by {choice.behind[nearest]:.4f} ± {choice.errors[nearest]:.4f} over {nearest})"


def _answer(context: StudyContext, arm: Arm, cells: Sequence[TargetRun], skipped: list[str]) -> Answer:
    grown = [cell for cell in cells if not cell.fixed]
    budgets = sorted({cell.budget for cell in grown})
    finished = [cell for cell in grown if math.isfinite(cell.loss)]
    best = {
        budget: min((c for c in finished if c.budget == budget), key=lambda c: c.loss)
        for budget in {cell.budget for cell in finished}
    }
    wins = Counter(cell.target for cell in best.values())
    threshold = context.preset.grids.chain.threshold
    choice = choose({(c.target, c.budget): c.loss for c in finished}, threshold) if finished else None
    winner = None if choice is None else choice.best
    lost = [
        f"every run that grows diverged at {format_flops(budget)} FLOPs: that budget does not count"
        for budget in budgets
        if budget not in best
    ]
    loss: list[Series] = []
    deep: list[Series] = []
    for budget in budgets:
        own = sorted((c for c in grown if c.budget == budget), key=lambda c: c.target)
        x, y = [c.target for c in own], [c.loss for c in own]
        label, curve = family_curve("FLOPs", budget)
        loss += [points(label, x, y, [c.run for c in own], **curve)]
        if all(map(math.isfinite, y)):
            loss.append(line(label, x, y, **curve))
        known = [c for c in own if c.kl_depth is not None]
        if known:
            x, y = [c.target for c in known], [c.kl_depth or 0.0 for c in known]
            deep += [points(label, x, y, [c.run for c in known], **curve), line(label, x, y, **curve)]
    anchors = [cell for cell in cells if cell.fixed]
    control: dict[str, Any] = {"role": "control", "filled": False}
    loss.append(points("fixed passes", [c.target for c in anchors], [c.loss for c in anchors],
                       [c.run for c in anchors], **control))  # fmt: skip
    axis = Axis("passes grown to")
    title, caption = f"{arm.name}: growth target", "Hollow: that many passes throughout."
    panels = [Panel(title, axis, Axis("validation loss"), tuple(loss), caption=caption)]
    fixed = [c for c in anchors if c.kl_depth is not None]
    if fixed:
        deep.append(
            points("fixed passes", [c.target for c in fixed], [c.kl_depth or 0.0 for c in fixed],
                   [c.run for c in fixed], **control)
        )  # fmt: skip
    if deep:
        panels.append(
            Panel(
                f"{arm.name}: effective depth",
                Axis("passes grown to"),
                Axis("KL effective depth"),
                tuple(deep),
            )
        )
    if choice is None or winner is None:
        sentence = f"{arm.name}: every run that grows diverged, so there is no best target."
    else:
        count, of = wins[winner], len(budgets)
        where = "every budget" if count == of else f"{count} of {of} budgets"
        if choice.decided:
            sentence = f"{arm.name}: growing to {winner} passes has the lowest loss at {where}"
        else:
            tied = " and ".join(str(target) for target in sorted((winner, *choice.ties)))
            sentence = f"{arm.name}: growing to {tied} passes is a tie; {winner} is lowest at {where}"
        sentence += _margin(choice) + "."
    return Answer(
        study="growth-target",
        question=f"To how many passes should {arm.name} grow from {arm.passes.initial}?",
        section=SECTION,
        findings=(sentence,),
        values={
            "target": winner,
            "ties": [] if choice is None else sorted(choice.ties),
            "behind": {} if choice is None else {str(t): d for t, d in sorted(choice.behind.items())},
            "errors": None
            if choice is None or choice.errors is None
            else {str(t): e for t, e in sorted(choice.errors.items())},
            "cells": [
                {"target": c.target, "budget": c.budget, "rho": c.rho, "fixed": c.fixed, "run": c.run,
                 "loss": c.loss if math.isfinite(c.loss) else None, "effective_depth": c.kl_depth}
                for c in cells
            ],
        },
        panels=tuple(panels),
        tables=(
            Table(
                "Growth targets",
                ("passes", "kind", "FLOPs", "ρ", "loss", "run"),
                tuple(
                    (c.target, "fixed" if c.fixed else "grown", c.budget, c.rho,
                     c.loss if math.isfinite(c.loss) else None, c.run)
                    for c in cells
                ),
            ),
        ),
        warnings=(*skipped, *lost),
        method=(
            f"Depth {context.preset.base_depth} on {context.preset.fixed_tokens:,} tokens under the base "
            "recipe; at each budget the transition is placed so that every target spends it.",
            "Errors are the scatter about target + budget; targets tie if p ≥ 0.05, adjusted for their "
            f"number; with one budget, if they are less than {threshold:g} apart.",
            context.sweep_flops_method,
        ),
        runs=tuple(cell.run for cell in cells),
    )  # fmt: skip
