"""Stage 1: tune every hyperparameter at the base size, one sweep after another, in rounds."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from steepen.errors import SteepenError
from steepen.model.arm import Arm
from steepen.recipe.hyperparameters import Hyperparameters, paper_code, with_paper_code
from steepen.recipe.paper_tables import INITIAL
from steepen.runs.record import RunRecord
from steepen.runs.spec import RunSpec
from steepen.studies.answer import Answer, Axis, Panel, Series, Study, Table
from steepen.studies.context import Arms, StudyContext, find_arms, loss_or_inf, starting_arm
from steepen.studies.driver.run_concurrently import run_concurrently
from steepen.studies.grids import ChainGrid
from steepen.studies.plotting import line, points

SECTION = "Appendix A.4.1, Stage 1: Tune a Base Model"

# Table "Tuning Grid for Chain Tuning": lowest and highest power of a factor, applied to the current value.
# The factor is 2 in round one and √2 in round two, which is "centered at the optimal values": ranges that are
# far from symmetric in round one are moved.
ROUND_ONE_OFFSETS: dict[str, tuple[int, int]] = {
    "learning_rate": (-4, 3),
    "residual_multiplier": (-4, 3),
    "output_multiplier": (-4, 3),
    "injection_weight": (-4, 3),
    "embedding_init_std": (-3, 4),
    "init_scale": (-3, 4),
    "embedding_lr_multiplier": (0, 7),
    "head_lr_multiplier": (0, 7),
    "weight_decay": (-5, 1),
}
ROUND_TWO_OFFSETS: dict[str, tuple[int, int]] = {
    **ROUND_ONE_OFFSETS,
    "embedding_lr_multiplier": (-4, 3),
    "head_lr_multiplier": (-4, 3),
    "weight_decay": (-3, 3),
}
INCLUDES_ZERO = {"weight_decay"}
DISCRETE: dict[str, dict[str, tuple[float, ...]]] = {
    "schedule": {"warmup_steps": (0, 5, 10, 20), "warmdown_fraction": (0.2, 0.6, 0.8, 1.0)},
    "adam": {"beta1": (0.9, 0.95), "beta2": (0.90, 0.98, 0.99), "adam_eps": (1e-8, 1e-6)},
}


@dataclass(frozen=True)
class SweepResult:
    """One sweep of the chain: what was tried, and what was adopted."""

    round: int
    sweep: str
    tried: tuple[tuple[str, float, float | None, str], ...]  # setting, value, loss (None: diverged), run
    baseline: float
    adopted: dict[str, float]
    combined: bool  # more than one discrete setting helped, and all are applied together
    best: float  # the lowest loss measured so far in the chain


@dataclass
class Chain:
    """The state of one arm's chain of sweeps."""

    arm: Arm
    values: Hyperparameters
    loss: float = math.inf  # of `values`; infinite while they are not measured
    seconds: float | None = None  # of training the last measured run of the current values
    steps: list[SweepResult] = field(default_factory=list[SweepResult])
    runs: list[str] = field(default_factory=list[str])
    warnings: list[str] = field(default_factory=list[str])


def chain_tuning(context: StudyContext, *, arms: Arms = (), from_recipe: bool = False) -> Study:
    """Appendix "Stage 1: Tune a Base Model", with its table "Tuning Grid for Chain Tuning".

    From the table's initial values, each sweep changes one hyperparameter (or, for schedule and Adam, one
    discrete setting per run); the best is adopted if it is 1e-3 better than the current loss. Discrete
    settings that help are applied together in the next sweep. A second round repeats all on a √2 grid.
    """
    chains = yield from tune_arms(context, arms, from_recipe=from_recipe)
    return chain_answer(context, chains)


def tune_arms(
    context: StudyContext, arms: Arms = (), *, from_recipe: bool = False
) -> Generator[Sequence[RunSpec], Sequence[RunRecord | None], list[Chain]]:
    """The finished chain of every arm, all run concurrently; a growing arm is tuned as its starting arm."""
    chosen = [starting_arm(arm) for arm in find_arms(arms or ("vanilla",))]
    chains = [Chain(arm, context.recipe(arm).base if from_recipe else INITIAL) for arm in chosen]
    yield from run_concurrently([tune(context, chain, context.preset.grids.chain) for chain in chains])
    return chains


def tune(
    context: StudyContext, chain: Chain, grid: ChainGrid
) -> Generator[Sequence[RunSpec], Sequence[RunRecord | None], None]:
    """Run all rounds of a chain."""
    for number in range(1, grid.rounds + 1):
        for sweep in grid.sweeps:
            if sweep != "injection_weight" or has_injection(chain.arm):
                yield from _sweep(context, chain, grid, number, sweep)
    if not math.isfinite(chain.loss):  # the combined settings of the last sweep have not been trained
        specs = [_spec(context, chain.arm, chain.values)]
        record = (yield specs)[0]
        chain.seconds = None if record is None else record.seconds_training
        _set_measured_loss(chain, loss_or_inf(record))
        chain.runs.append(specs[0].hash)


def has_injection(arm: Arm) -> bool:
    """Whether the arm injects, so that α has an effect."""
    return "inject" in arm.core_boundary or "inject" in arm.coda_boundary


def candidates(values: Hyperparameters, sweep: str, number: int, points: int = 8) -> list[tuple[str, float]]:
    """The settings a sweep tries besides the current one: (name, value)."""
    if sweep in DISCRETE:
        return [
            (name, value)
            for name, options in DISCRETE[sweep].items()
            for value in options
            if value != getattr(values, name)
        ]
    current = float(getattr(values, sweep))
    low, high = (ROUND_ONE_OFFSETS if number == 1 else ROUND_TWO_OFFSETS)[sweep]
    factor = 2.0 if number == 1 else math.sqrt(2.0)
    count = points - (sweep in INCLUDES_ZERO)
    offsets = sorted(range(low, high + 1), key=lambda offset: (abs(offset), offset))[:count]
    tried = {current * factor**offset for offset in sorted(offsets) if offset}
    if sweep in INCLUDES_ZERO:
        tried.add(0.0)
    return [(sweep, value) for value in sorted(tried) if value != current]


def _sweep(
    context: StudyContext, chain: Chain, grid: ChainGrid, number: int, sweep: str
) -> Generator[Sequence[RunSpec], Sequence[RunRecord | None], None]:
    options = candidates(chain.values, sweep, number, grid.points)
    tried = [replace(chain.values, **{name: _typed(name, value)}) for name, value in options]
    specs = [_spec(context, chain.arm, values) for values in (chain.values, *tried)]
    records = yield specs
    losses = [loss_or_inf(record) for record in records]
    chain.seconds = None if records[0] is None else records[0].seconds_training
    chain.runs += [spec.hash for spec in specs]
    baseline = losses[0]
    if not math.isfinite(chain.loss):
        _set_measured_loss(chain, baseline)
    results = list(zip(options, losses[1:], specs[1:], strict=True))
    tries = [(name, value, loss) for (name, value), loss, _ in results]
    better = settings_to_adopt(baseline, tries, grid.threshold)
    adopted = {name: value for name, (_, value) in better.items()}
    chain.values = replace(chain.values, **{name: _typed(name, value) for name, value in adopted.items()})
    chain.loss = loss_after(chain.loss, better)
    known = [step.best for step in chain.steps[-1:]]
    best = min([baseline, *known, *(loss for loss, _ in better.values())])
    rows = tuple(
        (name, value, None if math.isinf(loss) else loss, spec.hash) for (name, value), loss, spec in results
    )
    chain.steps.append(SweepResult(number, sweep, rows, baseline, adopted, len(adopted) > 1, best))


def settings_to_adopt(
    baseline: float, tries: Iterable[tuple[str, float, float]], threshold: float
) -> dict[str, tuple[float, float]]:
    """(loss, value) of the best value of every setting that beats the baseline by more than the threshold.

    `tries` are (setting, value, loss) of one sweep, `baseline` the loss of the current values in it.
    """
    found: dict[str, tuple[float, float]] = {}
    for name, value, loss in tries:
        if loss < baseline - threshold:
            found[name] = min(found.get(name, (math.inf, math.inf)), (loss, value))
    return found


def loss_after(current: float, adopted: Mapping[str, tuple[float, float]]) -> float:
    """The loss of the values after a sweep; infinite where several were adopted, which nothing measured."""
    if not adopted:
        return current
    return next(iter(adopted.values()))[0] if len(adopted) == 1 else math.inf


@dataclass(frozen=True)
class MeasuredSweep:
    """One sweep of a chain that was run elsewhere: the incumbent's loss (None: not re-run), and the tries."""

    round: int
    sweep: str
    incumbent: float | None
    tries: tuple[tuple[str, float, float], ...]  # setting, value, loss


@dataclass(frozen=True)
class ReplayedChain:
    """What the rule adopts in each sweep (settings and values), and the loss after the last one.

    `loss` is infinite where the last sweep adopted several settings at once: only another run measures it.
    """

    loss: float
    adopted: tuple[tuple[int, str, dict[str, float]], ...]  # round, sweep, settings


def replay_chain(
    measured: Iterable[MeasuredSweep],
    order: Sequence[str] = ChainGrid.sweeps,
    threshold: float = ChainGrid.threshold,
) -> ReplayedChain:
    """Apply the rule of chain tuning to measured sweeps, round by round in `order`."""
    loss, steps = math.inf, list[tuple[int, str, dict[str, float]]]()
    for sweep in sorted(measured, key=lambda sweep: (sweep.round, order.index(sweep.sweep))):
        # An incumbent that was run again replaces the loss it had before.
        loss = loss if sweep.incumbent is None else sweep.incumbent
        better = settings_to_adopt(loss, sweep.tries, threshold)
        steps.append((sweep.round, sweep.sweep, {name: value for name, (_, value) in better.items()}))
        loss = loss_after(loss, better)
    return ReplayedChain(loss, tuple(steps))


def _set_measured_loss(chain: Chain, loss: float) -> None:
    """Record the measured loss of the current values, and warn if combining settings made it worse."""
    if math.isinf(loss):
        what = "combination of settings that helped individually" if chain.steps else "initial recipe"
        raise SteepenError(
            f"the {what} diverges for {chain.arm.name} at this preset, so there is nothing to tune from; "
            "lower its learning rate in a preset file and start with --from-recipe."
        )
    chain.loss = loss
    if chain.steps and loss > chain.steps[-1].best:
        last = chain.steps[-1]
        chain.warnings.append(
            f"{chain.arm.name}, round {last.round}, {last.sweep}: together {_words(last.adopted)} give "
            f"{loss:.4f}, worse than the best of them alone ({last.best:.4f}); they are kept, "
            "as the paper's procedure says"
        )


def _spec(context: StudyContext, arm: Arm, values: Hyperparameters) -> RunSpec:
    recipe = replace(context.recipe(arm), base=values, learning_rate_base=None)
    return context.spec(context.base_run(arm, recipe))


def _typed(name: str, value: float) -> float:
    return int(value) if name == "warmup_steps" else value


def _words(adopted: dict[str, float]) -> str:
    return " and ".join(f"{name} = {value:.4g}" for name, value in adopted.items())


def _chain_panel(chains: Sequence[Chain], grid: ChainGrid, number: int) -> Panel:
    """Best loss so far after each sweep of a round, by hyperparameter: a sweep has one place for all arms."""
    places = {sweep: place for place, sweep in enumerate(grid.sweeps)}
    names = tuple(paper_code(sweep) or sweep for sweep in grid.sweeps)
    series: list[Series] = []
    for chain in chains:
        name = chain.arm.name
        own = [(places[step.sweep], step) for step in chain.steps if step.round == number]
        x, y = [place for place, _ in own], [step.best for _, step in own]
        series += [line(name, x, y, arm=name), points(name, x, y, arm=name)]
        combined = [(place, step.best) for place, step in own if step.combined]
        if combined:
            x, y = [row[0] for row in combined], [row[1] for row in combined]
            series.append(points(name, x, y, arm=name, note="several settings combined", filled=False))
    return Panel(
        f"round {number}", Axis("hyperparameter swept", names=names), Axis("best loss so far"),
        tuple(series), caption="Hollow: several discrete settings helped, and all were applied together.",
        group="The chain of sweeps", share="y", columns=2, lead=True,
    )  # fmt: skip


def chain_answer(context: StudyContext, chains: Sequence[Chain]) -> Answer:
    """The answer of the chain-tuning study."""
    grid = context.preset.grids.chain
    found: list[str] = []
    rows: list[tuple[Any, ...]] = []
    tuned: list[tuple[Any, ...]] = []
    for chain in chains:
        first = chain.steps[0].baseline
        names = [name for step in chain.steps for name in step.adopted]
        found.append(
            f"{chain.arm.name}: tuning takes the loss from {first:.4f} to {chain.loss:.4f} "
            f"({first - chain.loss:.4f} better); changed: {', '.join(dict.fromkeys(names)) or 'nothing'}; "
            f"settings less than {grid.threshold:g} apart are ties, which change nothing."
        )
        rows += [
            (chain.arm.name, step.round, step.sweep, step.baseline, _words(step.adopted) or "none", step.best)
            for step in chain.steps
        ]
        minutes = None if chain.seconds is None else chain.seconds / 60
        tuned.append((chain.arm.name, *chain.values.to_dict().values(), chain.loss, minutes))
    depth, tokens = context.preset.base_depth, context.preset.fixed_tokens
    return Answer(
        study="chain-tuning",
        question="Which hyperparameters are best at the base size?",
        section=SECTION,
        findings=tuple(found),
        values={
            chain.arm.name: {
                "hyperparameters": chain.values.to_dict(),
                "loss": chain.loss,
                "initial_loss": chain.steps[0].baseline,
                "steps": [
                    {
                        "round": s.round,
                        "sweep": s.sweep,
                        "baseline": s.baseline,
                        "adopted": s.adopted,
                        "combined": s.combined,
                        "best": s.best,
                        "tried": [list(row) for row in s.tried],
                    }
                    for s in chain.steps
                ],
            }
            for chain in chains
        },
        panels=(
            *(_chain_panel(chains, grid, number) for number in range(1, grid.rounds + 1)),
            *(panel for chain in chains for panel in _sweep_panels(chain)),
        ),
        tables=(
            Table(
                "Tuned hyperparameters",
                ("arm", *map(with_paper_code, chains[0].values.to_dict()), "loss", "minutes"),
                tuple(tuned),
                "Minutes are of training one run of the tuned values, without evaluation.",
                arm_column=0,
            ),
            Table(
                "The chain, sweep by sweep",
                ("arm", "round", "sweep", "baseline", "adopted", "best"),
                tuple(rows),
                arm_column=0,
            ),
        ),
        warnings=tuple(warning for chain in chains for warning in chain.warnings),
        method=(
            f"Depth {depth} on {tokens:,} tokens, {grid.rounds} rounds; steps of 2 in the first round and of "
            f"√2 after it, up to {grid.points} settings a sweep, the current one among them.",
            f"A setting is adopted where it is {grid.threshold:g} better than the loss it was tried against. "
            "The order of sweeps is the preset's; by default that of the authors' code.",
        ),
        runs=tuple(dict.fromkeys(run for chain in chains for run in chain.runs)),
    )


def _sweep_panels(chain: Chain) -> list[Panel]:
    """Loss against each numeric setting, round by round."""
    panels: list[Panel] = []
    for step in chain.steps:
        if step.sweep in DISCRETE:
            continue
        rows = [row for row in step.tried if row[1] > 0 and row[2] is not None]
        if rows:
            panels.append(
                Panel(
                    f"round {step.round}: {step.sweep}",
                    Axis(step.sweep, "log"),
                    Axis("validation loss"),
                    (
                        points(
                            chain.arm.name,
                            [row[1] for row in rows],
                            [row[2] or math.inf for row in rows],
                            [row[3] for row in rows],
                            arm=chain.arm.name,
                        ),
                    ),
                    lines=(("y", step.baseline, "current"),),
                    group=f"{chain.arm.name}: every sweep of the chain",
                    columns=3,
                )
            )
    return panels
