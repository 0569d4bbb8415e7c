"""Custom studies of the narrow ladders, named `replication:FUNCTION` in `steepen study`; see run.sh."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from steepen.model.arm import Arm
from steepen.model.arms import family_arm, find_arm
from steepen.recipe.recipe import PlannedRun
from steepen.recipe.recipe_choice import RecipeFile
from steepen.runs.spec import DataConfig, expected_flops, override
from steepen.studies.answer import Answer, Study, Table, Work
from steepen.studies.cells import Cell, Cells, Plan, measure, run_concurrently
from steepen.studies.context import StudyContext
from steepen.studies.stages.transfer import transferred_recipe

FIRST, FURTHEST = (-2, 0, 2), 8  # powers of √2 around the recipe's rate
ADAMW_START = 0.004  # its rate at the base depth, where the sweep begins; Muon's are about four times that
AUTHORS_STORAGE = ("optimizer.embedding_precision=bf16", "model.rope_table=bf16")
Losses = dict[int, list[float]]  # by power of √2, one per seed


def rates(
    context: StudyContext,
    *,
    arms: Sequence[str] = (),
    rungs: Sequence[int] = (4, 6, 8),
    seeds: Sequence[int] = (0,),
) -> Study:
    """The best learning rate of every arm at several sizes, bracketed, and the rule through the optima.

    At each size, rates ½, 1 and 2 times the recipe's are tried, further ones by 2 while the best is at an
    edge, then √2 on both sides of the best. Runs are as long as in the ladder. A parabola of the loss in the
    logarithm of the rate, through the best and its neighbours, gives the optimum.
    """
    chosen = [find_arm(name) for name in arms or context.preset.arms]
    parts = [_sweep(context, arm, depth, seeds) for arm in chosen for depth in sorted(rungs, reverse=True)]
    swept: list[tuple[Arm, int, Losses, list[str]]] = yield from run_concurrently(parts)
    files: list[RecipeFile] = []
    rows: list[tuple[Any, ...]] = []
    tried: list[tuple[Any, ...]] = []
    for arm in chosen:
        own = [(depth, found) for one, depth, found, _ in swept if one is arm]
        best = {depth: _optimum(found) for depth, found in own}
        sizes = {depth: float(context.stored_parameters(arm, depth)) for depth in best}
        base = float(context.stored_parameters(arm, context.preset.base_depth))
        x = np.log([sizes[depth] / base for depth in best])
        y = np.log([_rate(context, arm, depth, best[depth]) for depth in best])
        slope = float(np.polyfit(x, y, 1)[0]) if len(best) > 1 else math.nan
        exponent = round(slope, 1) + 0.0 if math.isfinite(slope) else 0.0
        rate = float(f"{math.exp(float(np.mean(y - exponent * x))):.2g}")
        recipe = context.recipe(arm)
        recipe = replace(
            recipe, base=replace(recipe.base, learning_rate=rate), learning_rate_base=None,
            learning_rate_exponent=exponent,
        )  # fmt: skip
        files.append(RecipeFile(arm.name, recipe, context.preset.name))
        optima = [_rate(context, arm, depth, best[depth]) for depth in sorted(best)]
        rows.append((arm.name, *optima, slope, exponent, rate))
        for depth, found in sorted(own):
            for power, losses in sorted(found.items()):
                tried += [(arm.name, depth, _rate(context, arm, depth, power), loss) for loss in losses]
    depths = sorted(rungs)
    return Answer(
        study="rates",
        question="Which learning rate suits each arm, and how must it change with size?",
        section="Appendix A.4",
        findings=tuple(
            f"{row[0]}: {row[-1]:g} at d{context.preset.base_depth}, exponent {row[-2]:+.1f}; optima "
            + ", ".join(f"d{depth} {value:.3g}" for depth, value in zip(depths, row[1:], strict=False))
            for row in rows
        ),
        values={"rates": [list(row) for row in rows]},
        recipes=tuple(files),
        tables=(
            Table("Learning rates", ("arm", *(f"best at d{d}" for d in depths), "slope", "exponent",
                  f"at d{context.preset.base_depth}"), tuple(rows)),
            Table("Sweeps", ("arm", "depth", "learning rate", "loss"), tuple(tried)),
        ),
        runs=tuple(dict.fromkeys(run for *_, runs in swept for run in runs)),
    )  # fmt: skip


def _sweep(
    context: StudyContext, arm: Arm, depth: int, seeds: Sequence[int]
) -> Work[tuple[Arm, int, Losses, list[str]]]:
    found: Losses = {}
    runs: list[str] = []
    missing = list(FIRST)
    refined = False
    while missing:
        plans: list[Plan] = []
        for power in missing:
            planned = context.recipe(arm).at(arm, depth, context.size_rule)
            rate = _rate(context, arm, depth, power)
            changed = replace(planned, hyperparameters=replace(planned.hyperparameters, learning_rate=rate))
            plans += [(context.spec(changed, seed=seed), {"power": power}) for seed in seeds]
        cells = yield from measure(context, plans)
        for cell in cells:
            found.setdefault(cell["power"], []).append(cell.loss)
            runs.append(cell.run)
        best = min(found, key=lambda power: _mean(found[power]))
        if best == min(found) and best > -FURTHEST:
            missing = [best - 2]
        elif best == max(found) and best < FURTHEST:
            missing = [best + 2]
        elif not refined:
            missing, refined = [power for power in (best - 1, best + 1) if power not in found], True
        else:
            missing = []
    return arm, depth, found, runs


def _ladder(
    context: StudyContext, arms: Sequence[str], rungs: Sequence[int]
) -> Generator[tuple[Arm, int, PlannedRun]]:
    """The ladder's run of every arm and depth, the largest first."""
    for depth in sorted(rungs or context.preset.rungs, reverse=True):
        for arm in (find_arm(name) for name in arms or context.preset.arms):
            yield arm, depth, context.recipe(arm).at(arm, depth, context.size_rule)


def _shortened(context: StudyContext, run: PlannedRun) -> PlannedRun:
    """The run, or as many of its steps as the data has once."""
    sizes = context.data.train_tokens, context.preset.context, run.batch_tokens
    return replace(run, steps=min(run.steps, DataConfig(context.data.identity).steps_per_epoch(*sizes)))


def _by_rung(cells: Cells) -> dict[tuple[str, int], list[Cell]]:
    found: dict[tuple[str, int], list[Cell]] = {}
    for cell in cells:
        found.setdefault((cell["arm"], cell["depth"]), []).append(cell)
    return found


def _mean(losses: Sequence[float]) -> float:
    return sum(losses) / len(losses)


def _rate(context: StudyContext, arm: Arm, depth: int, power: float) -> float:
    return context.recipe(arm).learning_rate(arm, depth, context.size_rule) * 2 ** (power / 2)


def _optimum(found: Losses) -> float:
    """The power of √2 at the vertex of a parabola through the points near the best one."""
    best = min(found, key=lambda power: _mean(found[power]))
    near = sorted(power for power in found if abs(power - best) <= 2 and math.isfinite(_mean(found[power])))
    if len(near) < 3 or best in (near[0], near[-1]):
        return float(best)
    curve, slope, _ = np.polyfit(near, [_mean(found[power]) for power in near], 2)
    return float(np.clip(-slope / (2 * curve), near[0], near[-1])) if curve > 0 else float(best)


def adamw(
    context: StudyContext,
    *,
    arms: Sequence[str] = ("vanilla",),
    rungs: Sequence[int] = (4, 5, 6),
    seeds: Sequence[int] = (0,),
) -> Study:
    """The best rate of AdamW on the block matrices at several sizes: `rates`, from another start.

    Embedding, head and weight decay per step start as in the arm's recipe, which is for Muon.
    """
    own = context.with_optimizer("adamw")
    for arm in map(find_arm, arms):
        recipe = own.recipe(arm)
        times = recipe.base.learning_rate / ADAMW_START
        base = replace(
            recipe.base, learning_rate=ADAMW_START, weight_decay=recipe.base.weight_decay * times,
            embedding_lr_multiplier=recipe.base.embedding_lr_multiplier * times,
            head_lr_multiplier=recipe.base.head_lr_multiplier * times,
        )  # fmt: skip
        own = own.with_recipe(arm, replace(recipe, base=base, learning_rate_base=None))
    return (yield from rates(own, arms=arms, rungs=rungs, seeds=seeds))


def transferred(
    context: StudyContext,
    *,
    arms: Sequence[str] = ("operator-1",),
    rungs: Sequence[int] = (),
    seeds: Sequence[int] = (0,),
    source: str = "vanilla",
) -> Study:
    """Ladder runs with the base values of another arm's recipe; what they compare with is the ladder."""
    own = context
    for arm in map(find_arm, arms):
        own = own.with_recipe(arm, transferred_recipe(context, find_arm(source), arm))
    return (yield from noise(own, arms=arms, rungs=rungs, seeds=seeds))


def tied_passes(
    context: StudyContext,
    *,
    rungs: Sequence[int] = (5, 6, 8),
    passes: Sequence[int] = (1, 2, 3),
    seeds: Sequence[int] = (0,),
) -> Study:
    """Ladders over depth of one to three tied passes on the base tokens, with Operator-1's base recipe."""
    one_pass = find_arm("operator-1")
    recipe, tokens = context.constant_recipe(one_pass), context.preset.fixed_tokens
    plans: list[Plan] = []
    for count in passes:
        arm = one_pass if count == 1 else family_arm("loop", count)
        for depth in rungs:
            run = recipe.at_budget(arm, depth, context.size_rule, tokens=tokens)
            plans += [(context.spec(run, seed=seed), {"arm": arm.name, "depth": depth}) for seed in seeds]
    cells = yield from measure(context, plans)
    rows = [(cell["arm"], cell["depth"], expected_flops(cell.spec), cell.loss) for cell in cells]
    return Answer(
        study="tied-passes",
        question="How many times should a tied core be applied, on fresh data?",
        section="Appendix A.2.2",
        findings=tuple(f"{name} d{depth}: {loss:.4f}" for name, depth, _, loss in rows),
        values={"tied_passes": [list(row) for row in rows]},
        tables=(Table("Losses by passes", ("arm", "depth", "FLOPs", "loss"), tuple(rows)),),
        runs=tuple(cells.column("run")),
    )


def recheck(
    context: StudyContext,
    *,
    arms: Sequence[str] = (),
    rungs: Sequence[int] = (),
    seeds: Sequence[int] = (0,),
    powers: str = "-1,0,1",
) -> Study:
    """Is the recipe's rate the best at these rungs? Ladder runs at `powers` of √2 times it."""
    plans: list[Plan] = []
    tried = [int(power) for power in powers.split(",")]
    for arm, depth, run in _ladder(context, arms, rungs or context.preset.rungs[-1:]):
        for power in tried:
            rate = _rate(context, arm, depth, power)
            changed = replace(run, hyperparameters=replace(run.hyperparameters, learning_rate=rate))
            varied = {"arm": arm.name, "depth": depth, "rate": rate, "power": power}
            plans += [(context.spec(changed, seed=seed), varied) for seed in seeds]
    cells = yield from measure(context, plans)
    rows: list[tuple[Any, ...]] = []
    for (name, depth), own in _by_rung(cells).items():
        found: Losses = {}
        for cell in own:
            found.setdefault(cell["power"], []).append(cell.loss)
        losses = [_mean(found[power]) for power in tried]
        rate = own[0]["rate"] * 2 ** (-own[0]["power"] / 2)
        rows.append((name, depth, rate, *losses, 2 ** (_optimum(found) / 2)))
    losses_at = (f"loss at {2 ** (power / 2):.3g}" for power in tried)
    header = ("arm", "depth", "rate", *losses_at, "optimum ÷ rate")
    return Answer(
        study="recheck",
        question="Does the learning-rate rule hold at the top rungs?",
        section="Appendix A.4",
        findings=tuple(
            f"{row[0]} d{row[1]}: the best rate is {row[-1]:.2f} times the recipe's" for row in rows
        ),
        values={"recheck": [list(row) for row in rows]},
        tables=(Table("The rate again", header, tuple(rows)),),
        runs=tuple(cells.column("run")),
    )


def around(
    context: StudyContext,
    *,
    arms: Sequence[str] = (),
    rungs: Sequence[int] = (6,),
    seeds: Sequence[int] = (0,),
    fractions: str = "0.5,1.75",
) -> Study:
    """Are tokens per parameter and ρ the best at a rung? Its FLOPs at the depths beside it, and at other ρ.

    What they compare with is the ladder. `fractions` are multiples of a growing arm's ρ.
    """
    plans: list[Plan] = []
    for arm, depth, run in _ladder(context, arms, rungs):
        flops, recipe, rule = run.flops.total, context.recipe(arm), context.size_rule
        runs = [recipe.at_budget(arm, depth + d, rule, flops=flops, rho=run.rho) for d in (-1, 1)]
        if run.rho is not None:
            others = [run.rho * float(times) for times in fractions.split(",")]
            runs += [recipe.at_budget(arm, depth, rule, flops=flops, rho=rho) for rho in others]
        for one in runs:
            varied = {"arm": arm.name, "rung": depth, "depth": one.shape.depth, "rho": one.rho,
                      "tokens_per_parameter": one.tokens / one.recipe_parameters}  # fmt: skip
            plans += [(context.spec(one, seed=seed), varied) for seed in seeds]
    cells = yield from measure(context, plans)
    names = ("arm", "rung", "depth", "rho", "tokens_per_parameter")
    rows = [(*(cell[name] for name in names), cell.loss) for cell in cells]
    return Answer(
        study="around",
        question="Are tokens per parameter and the fraction after growth the best ones?",
        section="Appendix A.4",
        findings=tuple(f"{row[0]} d{row[2]}, ρ {row[3]}, {row[4]:.2f} tokens: {row[5]:.4f}" for row in rows),
        values={"around": [list(row) for row in rows]},
        tables=(Table("Around the recipe", (*names, "loss"), tuple(rows)),),
        runs=tuple(cells.column("run")),
    )


def authors_storage(
    context: StudyContext,
    *,
    arms: Sequence[str] = (),
    rungs: Sequence[int] = (),
    seeds: Sequence[int] = (0, 1),
) -> Study:
    """What storing the embedding and the RoPE table in bf16, as the authors do, changes: paired by seed."""
    plans: list[Plan] = []
    for arm, depth, run in _ladder(context, arms, rungs):
        for seed in seeds:
            spec, varied = context.spec(run, seed=seed), {"arm": arm.name, "depth": depth, "seed": seed}
            plans += [(spec, {**varied, "stored": "fp32"})]
            plans += [(override(spec, AUTHORS_STORAGE), {**varied, "stored": "bf16"})]
    cells = yield from measure(context, plans)
    rows: list[tuple[Any, ...]] = []
    for (name, depth), own in _by_rung(cells).items():
        pairs = {
            cell["seed"]: {c["stored"]: c.loss for c in own if c["seed"] == cell["seed"]} for cell in own
        }
        differences = [pair["bf16"] - pair["fp32"] for pair in pairs.values()]
        error = float(np.std(differences, ddof=1)) / math.sqrt(len(differences))
        rows.append((name, depth, len(differences), _mean(differences), error))
    return Answer(
        study="authors-storage",
        question="What does a bf16 embedding change?",
        section="Appendix A.4",
        findings=tuple(
            f"{n} d{d}: {mean:+.4f} ± {error:.4f} over {count} seeds" for n, d, count, mean, error in rows
        ),
        values={"differences": [list(row) for row in rows]},
        tables=(
            Table("Loss in bf16 less loss in fp32", ("arm", "depth", "seeds", "mean", "error"), tuple(rows)),
        ),
        runs=tuple(cells.column("run")),
    )


def noise(
    context: StudyContext,
    *,
    arms: Sequence[str] = (),
    rungs: Sequence[int] = (),
    seeds: Sequence[int] = (0, 1),
    cells: str = "",
    shorten: bool = False,
) -> Study:
    """Ladder runs of several seeds, the largest first.

    `cells` are single ones, ARM:DEPTH with commas, instead of every arm at every rung: what is published
    already need not be trained again to add a rung to it. With `shorten` a run that needs more tokens than
    there are gets all there are, once.
    """
    plans: list[Plan] = []
    single = [cell.rpartition(":") for cell in cells.split(",") if cell]
    chosen = [run for name, _, depth in single for run in _ladder(context, (name,), (int(depth),))]
    for arm, depth, planned in chosen or _ladder(context, arms, rungs):
        run = _shortened(context, planned) if shorten else planned
        plans += [(context.spec(run, seed=seed), {"arm": arm.name, "depth": depth}) for seed in seeds]
    found = yield from measure(context, plans)
    rows: list[tuple[Any, ...]] = []
    for (name, depth), own in _by_rung(found).items():
        losses = [cell.loss for cell in own]
        spread = float(np.std(losses, ddof=1)) if len(losses) > 1 else math.nan
        rows.append((name, depth, len(losses), _mean(losses), spread))
    return Answer(
        study="noise",
        question="How much does the loss of a run depend on its seed?",
        section="Section 4.2",
        findings=tuple(
            f"{n} d{d}: {mean:.4f} ± {sd:.4f} over {count} seeds" for n, d, count, mean, sd in rows
        ),
        values={"noise": [list(row) for row in rows]},
        tables=(Table("Losses by seed", ("arm", "depth", "seeds", "mean loss", "SD"), tuple(rows)),),
        runs=tuple(found.column("run")),
    )
