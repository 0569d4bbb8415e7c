"""Custom studies of this ladder, named `h200_mini:FUNCTION` in `steepen study`; see run.sh.

`learning_rates` tunes the learning rate of every arm at two sizes, in short runs. At each size the rates
½, 1/√2, 1 and √2 times the preset's are tried, and further ones by √2 while the best is the lowest or
the highest. A parabola of the loss in the logarithm of the rate, through the best and its neighbours,
gives the optimum. Two optima give the exponent of the rule and its value at the base depth, which are
written as recipe files for `study ladder --recipe`. `seeds` repeats rungs with other seeds, for the
noise of a run.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import replace

import numpy as np

from steepen.errors import UsageError
from steepen.model.arm import Arm
from steepen.model.arms import find_arm
from steepen.recipe.recipe_file import RecipeFile
from steepen.runs.record import RunRecord
from steepen.runs.spec import RunSpec
from steepen.studies.answer import Answer, Study, Table
from steepen.studies.context import StudyContext

MULTIPLES = (-2, -1, 0, 1)  # powers of √2
FURTHEST = 6  # a power at which the search for the optimum ends
Sweep = dict[tuple[str, int, int], float]  # loss by arm, depth and power of √2


def learning_rates(
    context: StudyContext, *, arms: Sequence[str] = (), rungs: Sequence[int] = (2, 4)
) -> Study:
    """The best learning rate of every arm at two sizes, as recipes."""
    chosen = [find_arm(name) for name in arms or context.preset.arms]
    small, large = sorted(rungs)[0], sorted(rungs)[-1]
    losses: Sweep = {}
    runs: list[str] = []
    missing = [(arm, depth, power) for depth in (large, small) for arm in chosen for power in MULTIPLES]
    while missing:
        yield from _measure(context, missing, losses, runs)
        missing = [
            (arm, depth, power)
            for depth in (large, small)
            for arm in chosen
            for power in _beyond(
                {key[2]: loss for key, loss in losses.items() if key[:2] == (arm.name, depth)}
            )
        ]
    files: list[RecipeFile] = []
    rows: list[tuple[object, ...]] = []
    for arm in chosen:
        best = {depth: _optimum(context, arm, depth, losses) for depth in (small, large)}
        sizes = {depth: context.stored_parameters(arm, depth) for depth in (small, large)}
        exponent = math.log(best[large] / best[small]) / math.log(sizes[large] / sizes[small])
        exponent = round(exponent, 1) + 0.0
        base = context.stored_parameters(arm, context.preset.base_depth)
        # The rate at the base depth by a rule with this exponent, through the middle of both optima.
        rate = math.exp(
            np.mean([math.log(best[depth]) + exponent * math.log(base / sizes[depth]) for depth in best])
        )
        rate = float(f"{rate:.2g}")
        recipe = context.recipe(arm)
        recipe = replace(
            recipe,
            base=replace(recipe.base, learning_rate=rate),
            learning_rate_base=None,
            learning_rate_exponent=exponent,
        )
        files.append(RecipeFile(arm.name, recipe, context.preset.name))
        rows.append((arm.title, best[small], best[large], exponent, rate))
    swept = [
        (find_arm(name).title, depth, _rate(context, find_arm(name), depth, power), loss)
        for (name, depth, power), loss in sorted(losses.items())
    ]
    return Answer(
        study="learning-rates",
        question="Which learning rate suits each arm, and how must it change with size?",
        section="Appendix A.4",
        findings=tuple(
            f"{title}: best {one:.3g} at d{small} and {other:.3g} at d{large}; exponent {beta:+.1f}, "
            f"{rate:g} at d{context.preset.base_depth}."
            for title, one, other, beta, rate in rows
        ),
        values={"rates": [list(row) for row in rows]},
        recipes=tuple(files),
        tables=(
            Table(
                "Learning rates",
                ("arm", f"best at d{small}", f"best at d{large}", "exponent",
                 f"at d{context.preset.base_depth}"),
                tuple(rows),
            ),
            Table("Sweeps", ("arm", "depth", "learning rate", "loss"), tuple(swept)),
        ),
        method=(
            f"Runs of {context.preset.fixed_tokens:,} tokens; optima by a parabola in the logarithm of the "
            "rate through the best rate and its neighbours.",
        ),
        runs=tuple(dict.fromkeys(runs)),
    )  # fmt: skip


def _rate(context: StudyContext, arm: Arm, depth: int, power: int) -> float:
    return context.recipe(arm).learning_rate(arm, depth, context.size_rule) * 2 ** (power / 2)


def _measure(
    context: StudyContext, wanted: Sequence[tuple[Arm, int, int]], losses: Sweep, runs: list[str]
) -> Generator[Sequence[RunSpec], Sequence[RunRecord | None], None]:
    """Train the runs and add their losses; a diverged run has an infinite one."""
    specs: list[RunSpec] = []
    for arm, depth, power in wanted:
        recipe = context.recipe(arm)
        planned = recipe.at_budget(arm, depth, context.size_rule, tokens=context.preset.fixed_tokens)
        rate = _rate(context, arm, depth, power)
        specs.append(
            context.spec(
                replace(planned, hyperparameters=replace(planned.hyperparameters, learning_rate=rate))
            )
        )
    records = yield specs
    for (arm, depth, power), spec, record in zip(wanted, specs, records, strict=True):
        losses[arm.name, depth, power] = math.inf if record is None else record.validation_loss
        runs.append(spec.hash)


def _beyond(found: dict[int, float]) -> list[int]:
    """The next power to try, where the best is the lowest or the highest."""
    best = min(found, key=lambda power: found[power])
    if best == min(found) and best > -FURTHEST:
        return [best - 1]
    return [best + 1] if best == max(found) and best < FURTHEST else []


def _optimum(context: StudyContext, arm: Arm, depth: int, losses: Sweep) -> float:
    """The vertex of a parabola through the best power and its neighbours, as a rate."""
    found = {key[2]: loss for key, loss in losses.items() if key[:2] == (arm.name, depth)}
    best = min(found, key=lambda power: found[power])
    near = [power for power in (best - 1, best, best + 1) if math.isfinite(found.get(power, math.inf))]
    vertex = float(best)
    if len(near) == 3:
        curve, slope, _ = np.polyfit(near, [found[power] for power in near], 2)
        vertex = -slope / (2 * curve)
    return _rate(context, arm, depth, 0) * 2 ** (vertex / 2)


def seeds(
    context: StudyContext,
    *,
    arms: Sequence[str] = (),
    rungs: Sequence[int] = (),
    seeds: Sequence[int] = (0, 1),
) -> Study:
    """Ladder runs of several seeds: how much the loss of a run depends on its seed."""
    if len(seeds) < 2:
        raise UsageError("give at least two seeds, such as --seeds 0,1: one shows no difference.")
    cells = [
        (find_arm(name), depth)
        for depth in sorted(rungs or context.preset.rungs, reverse=True)
        for name in arms or context.preset.arms
    ]
    specs = [
        context.spec(context.recipe(arm).at(arm, depth, context.size_rule), seed=seed)
        for arm, depth in cells
        for seed in seeds
    ]
    records = yield specs
    losses = [math.inf if record is None else record.validation_loss for record in records]
    rows: list[tuple[object, ...]] = []
    variances: list[float] = []
    for number, (arm, depth) in enumerate(cells):
        own = losses[number * len(seeds) : (number + 1) * len(seeds)]
        rows.append((arm.title, depth, *own))
        variances.append(float(np.var(own, ddof=1)))
    deviation = math.sqrt(float(np.mean(variances)))
    return Answer(
        study="seeds",
        question="How much does the loss of a run depend on its seed?",
        section="Section 4.2",
        findings=(
            f"Losses of one arm and size differ by {deviation:.4f} (standard deviation) between seeds.",
        ),
        values={"deviation": deviation},
        tables=(Table("Losses by seed", ("arm", "depth", *(f"seed {seed}" for seed in seeds)), tuple(rows)),),
        method=(f"{len(cells)} cells of {len(seeds)} seeds; the root of the mean variance within cells.",),
        runs=tuple(spec.hash for spec in specs),
    )
