"""Stage 1: tune every hyperparameter at the base size, one sweep after another, in rounds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from steepen.errors import SteepenError
from steepen.model.arm import Arm
from steepen.recipe.hyperparameters import Hyperparameters, paper_code, with_paper_code
from steepen.recipe.paper_tables import INITIAL
from steepen.studies.answer import Answer, Axis, Draft, Panel, Series, Study, Table, Work
from steepen.studies.cells import Cell, Cells, Plan, Row, measure, run_concurrently, table
from steepen.studies.context import Arms, StudyContext, find_arms, starting_arm
from steepen.studies.plotting import line, points
from steepen.studies.preset import ChainGrid
from steepen.studies.registry import choose_parts
from steepen.utils.rows import Rows

SECTION = "Appendix A.4.1, Stage 1: Tune a Base Model"

# Table "Tuning Grid for Chain Tuning": lowest and highest power of a factor, applied to the current value.
# The factor is 2 in round one and √2 in round two, which is "centered at the optimal values": ranges that are
# far from symmetric in round one are moved. A chain that starts from a recipe is centred from the beginning.
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
DISCRETE: dict[str, dict[str, tuple[float, ...]]] = {
    "schedule": {"warmup_steps": (0, 5, 10, 20), "warmdown_fraction": (0.2, 0.6, 0.8, 1.0)},
    "adam": {"beta1": (0.9, 0.95), "beta2": (0.90, 0.98, 0.99), "adam_eps": (1e-8, 1e-6)},
}


@dataclass(frozen=True)
class SweepResult(Row):
    """One sweep of the chain: arm, round, sweep, baseline, the settings adopted, and the best loss so far."""

    tried: Cells  # its other runs, by `setting` and `value`

    @property
    def combined(self) -> bool:
        """Whether more than one discrete setting helped, and all are applied together."""
        return len(self["adopted"]) > 1

    @property
    def words(self) -> str:
        """What was adopted."""
        return " and ".join(f"{name} = {value:.4g}" for name, value in self["adopted"].items()) or "none"

    @property
    def losses(self) -> list[list[Any]]:
        """Setting, value, loss and run of every try."""
        return [[cell[name] for name in ("setting", "value", "loss", "run")] for cell in self.tried]


@dataclass
class Chain:
    """The state of one arm's chain of sweeps."""

    arm: Arm
    values: Hyperparameters
    centred: bool = False  # whether the first round's ranges lie around the starting values too
    loss: float = math.inf  # of `values`; infinite while they are not measured
    seconds: float | None = None  # of training the last measured run of the current values
    steps: Rows[SweepResult] = Rows()  # noqa: RUF009
    runs: list[str] = field(default_factory=list[str])
    warnings: list[str] = field(default_factory=list[str])

    @property
    def initial_loss(self) -> float:
        """The loss of the starting values; an arm without injection has no sweep of its weight."""
        return self.steps[0]["baseline"] if self.steps else self.loss


def chain_tuning(
    context: StudyContext, *, arms: Arms = (), parts: Sequence[str] = (), from_recipe: bool = False
) -> Study:
    """Appendix "Stage 1: Tune a Base Model", with its table "Tuning Grid for Chain Tuning".

    From the table's initial values, each sweep changes one hyperparameter (or, for schedule and Adam, one
    discrete setting per run); the best is adopted if it is 1e-3 better than the current loss. Discrete
    settings that help are applied together in the next sweep. A second round repeats all on a √2 grid.
    """
    sweeps = choose_parts("chain-tuning", parts) if parts else ()
    chains = yield from tune_arms(context, arms, sweeps, from_recipe=from_recipe)
    return chain_answer(context, chains)


def tune_arms(
    context: StudyContext, arms: Arms = (), sweeps: Sequence[str] = (), *, from_recipe: bool = False
) -> Work[list[Chain]]:
    """The finished chain of every arm, all run concurrently; a growing arm is tuned as its starting arm.

    Without `sweeps` it has the preset's.
    """
    chosen = [starting_arm(arm) for arm in find_arms(arms or ("vanilla",))]
    chains = [Chain(arm, context.recipe(arm).base if from_recipe else INITIAL, from_recipe) for arm in chosen]
    grid = context.preset.grids.chain
    grid = replace(grid, sweeps=tuple(sweeps or grid.sweeps))
    yield from run_concurrently([tune(context, chain, grid) for chain in chains])
    return chains


def tune(context: StudyContext, chain: Chain, grid: ChainGrid) -> Work[None]:
    """Run all rounds of a chain."""
    for number in range(1, grid.rounds + 1):
        for sweep in grid.sweeps:
            if sweep != "injection_weight" or has_injection(chain.arm):
                yield from _sweep(context, chain, grid, number, sweep)
    if not math.isfinite(chain.loss):  # the combined settings of the last sweep have not been trained
        yield from _measure(context, chain, [])


def has_injection(arm: Arm) -> bool:
    """Whether the arm injects, so that α has an effect."""
    return "inject" in arm.core_boundary or "inject" in arm.coda_boundary


def candidates(
    values: Hyperparameters, sweep: str, number: int, points: int = 8, *, centred: bool = False
) -> list[tuple[str, float]]:
    """The settings a sweep tries besides the current one: (name, value)."""
    if sweep in DISCRETE:
        return [
            (name, value)
            for name, options in DISCRETE[sweep].items()
            for value in options
            if value != getattr(values, name)
        ]
    current = float(getattr(values, sweep))
    low, high = (ROUND_ONE_OFFSETS if number == 1 and not centred else ROUND_TWO_OFFSETS)[sweep]
    factor, zero = 2.0 if number == 1 else math.sqrt(2.0), sweep == "weight_decay"  # which may be off
    offsets = sorted(range(low, high + 1), key=lambda offset: (abs(offset), offset))[: points - zero]
    tried = {current * factor**offset for offset in offsets if offset} | ({0.0} if zero else set())
    return [(sweep, value) for value in sorted(tried) if value != current]


def _sweep(context: StudyContext, chain: Chain, grid: ChainGrid, number: int, sweep: str) -> Work[None]:
    options = candidates(chain.values, sweep, number, grid.points, centred=chain.centred)
    current, *others = yield from _measure(context, chain, options)
    baseline, tried = current.loss, Rows[Cell](others)
    tries = [(cell["setting"], cell["value"], cell.loss) for cell in tried]
    better = settings_to_adopt(baseline, tries, grid.threshold)
    adopted = {name: value for name, (_, value) in better.items()}
    chain.values = _changed(chain.values, adopted)
    chain.loss = loss_after(chain.loss, better)
    known = [step["best"] for step in chain.steps[-1:]]
    best = min([baseline, *known, *(loss for loss, _ in better.values())])
    values = {"arm": chain.arm.name, "round": number, "sweep": sweep, "baseline": baseline}
    step = SweepResult({**values, "adopted": adopted, "best": best}, tried)
    chain.steps = Rows((*chain.steps, step))


def _measure(context: StudyContext, chain: Chain, options: Sequence[tuple[str, float]]) -> Work[Cells]:
    """Train the current values and others; the first cell measures the current ones if nothing has."""
    recipe = context.recipe(chain.arm)
    plans: list[Plan] = []
    for name, value in (("", 0.0), *options):
        values = _changed(chain.values, {name: value} if name else {})
        run = context.base_run(chain.arm, replace(recipe, base=values, learning_rate_base=None))
        plans.append((run, {"setting": name, "value": value}))
    cells = yield from measure(context, plans)
    chain.seconds = None if cells[0].record is None else cells[0].record.seconds_training
    chain.runs += cells.column("run")
    if not math.isfinite(chain.loss):
        _set_measured_loss(chain, cells[0].loss)
    return cells


def _changed(values: Hyperparameters, settings: Mapping[str, float]) -> Hyperparameters:
    return replace(values, **{n: int(v) if n == "warmup_steps" else v for n, v in settings.items()})


def settings_to_adopt(
    baseline: float, tries: Iterable[tuple[str, float, float]], threshold: float
) -> dict[str, tuple[float, float]]:
    """(loss, value) of the best value of every setting that beats the baseline by more than the threshold.

    `tries` are (setting, value, loss) of one sweep, `baseline` the loss of the current values in it.
    """
    found: dict[str, tuple[float, float]] = {}
    for name, value, loss in tries:
        if loss < baseline - threshold:
            # Of equal losses the smaller value, so that the chain does not depend on the order of its runs.
            found[name] = min(found.get(name, (math.inf, math.inf)), (loss, value))
    return found


def loss_after(current: float, adopted: Mapping[str, tuple[float, float]]) -> float:
    """The loss of the values after a sweep; infinite where several were adopted, which nothing measured."""
    if not adopted:
        return current
    return next(iter(adopted.values()))[0] if len(adopted) == 1 else math.inf


def replay_chain(
    sweeps: Iterable[tuple[float | None, Iterable[tuple[str, float, float]]]],
    threshold: float = ChainGrid.threshold,
) -> tuple[float, list[dict[str, float]]]:
    """The loss after sweeps that were measured elsewhere, in order, and the settings that each adopts.

    A sweep is the incumbent's loss (None: not run again) and its tries. The loss is infinite where the last
    sweep adopted several settings at once: only another run measures it.
    """
    loss, steps = math.inf, list[dict[str, float]]()
    for incumbent, tries in sweeps:
        loss = loss if incumbent is None else incumbent
        better = settings_to_adopt(loss, tries, threshold)
        steps.append({name: value for name, (_, value) in better.items()})
        loss = loss_after(loss, better)
    return loss, steps


def _set_measured_loss(chain: Chain, loss: float) -> None:
    """Record the measured loss of the current values, and warn if combining settings made it worse."""
    if math.isinf(loss):
        what = "combination of settings that helped individually" if chain.steps else "initial recipe"
        raise SteepenError(
            f"the {what} diverges for {chain.arm.name} at this preset, so there is nothing to tune from; "
            "lower its learning rate in a preset file and start with `from_recipe`."
        )
    chain.loss = loss
    if chain.steps and loss > chain.steps[-1]["best"]:
        last = chain.steps[-1]
        chain.warnings.append(
            f"{chain.arm.name}, round {last['round']}, {last['sweep']}: together {last.words} give "
            f"{loss:.4f}, worse than the best of them alone ({last['best']:.4f}); they are kept, "
            "as the paper's procedure says"
        )


def chain_answer(context: StudyContext, chains: Sequence[Chain]) -> Answer:
    """The answer of the chain-tuning study."""
    grid = context.preset.grids.chain
    draft = Draft(
        findings=[_sentence(chain, grid) for chain in chains],
        panels=[_chain_panel(chains, number) for number in range(1, grid.rounds + 1)],
        tables=_tables(chains),
        method=[
            f"Depth {context.preset.base_depth} on {context.preset.fixed_tokens:,} tokens, {grid.rounds} "
            f"rounds; steps of 2 in the first round and of √2 after it, up to {grid.points} settings a "
            "sweep, the current one among them.",
            f"A setting is adopted where it is {grid.threshold:g} better than the loss it was tried against. "
            "The order of sweeps is the preset's; by default that of the authors' code.",
        ],
    )
    named = ("round", "sweep", "baseline", "adopted", "combined", "best")
    for chain in chains:
        draft.warnings += chain.warnings
        draft.runs += chain.runs
        draft.panels += _sweep_panels(chain)
        draft.values[chain.arm.name] = {
            "hyperparameters": chain.values.to_dict(),
            "loss": chain.loss,
            "initial_loss": chain.initial_loss,
            "steps": chain.steps.dicts(*named, tried="losses"),
        }
    return draft.answer("chain-tuning", "Which hyperparameters are best at the base size?", SECTION)


def _sentence(chain: Chain, grid: ChainGrid) -> str:
    first = chain.initial_loss
    names = dict.fromkeys(name for adopted in chain.steps.column("adopted") for name in adopted)
    return (
        f"{chain.arm.name}: tuning takes the loss from {first:.4f} to {chain.loss:.4f} "
        f"({first - chain.loss:.4f} better); changed: {', '.join(names) or 'nothing'}; "
        f"settings less than {grid.threshold:g} apart are ties, which change nothing."
    )


def _tables(chains: Sequence[Chain]) -> list[Table]:
    tuned: list[dict[str, Any]] = []
    for chain in chains:
        settings = {with_paper_code(name): value for name, value in chain.values.to_dict().items()}
        minutes = chain.seconds and chain.seconds / 60
        tuned.append({"arm": chain.arm.name, **settings, "loss": chain.loss, "minutes": minutes})
    steps = Rows(step for chain in chains for step in chain.steps)
    columns = ("arm", "round", "sweep", "baseline")
    caption = "Minutes are of training one run of the tuned values, without evaluation."
    return [
        table("Tuned hyperparameters", tuned, caption),
        table("The chain, sweep by sweep", steps.dicts(*columns, adopted="words", best="best")),
    ]


def _chain_panel(chains: Sequence[Chain], number: int) -> Panel:
    """Best loss so far after each sweep of a round, by hyperparameter: a sweep has one place for all arms."""
    series: list[Series] = []
    longest_first = sorted(chains, key=lambda chain: -len(chain.steps))  # an arm may leave out some
    sweeps = list(dict.fromkeys(step["sweep"] for chain in longest_first for step in chain.steps))
    for chain in chains:
        name, steps = chain.arm.name, chain.steps.where(round=number)
        own = steps.map(lambda step: step.plus(place=sweeps.index(step["sweep"])))
        x, y = own.column("place"), own.column("best")
        series += [line(name, x, y, arm=name), points(name, x, y, arm=name)]
        if some := own.where(combined=True):
            hollow: dict[str, Any] = {"arm": name, "note": "several settings combined", "filled": False}
            series.append(points(name, some.column("place"), some.column("best"), **hollow))
    names = tuple(paper_code(sweep) or sweep for sweep in sweeps)
    return Panel(
        f"round {number}", Axis("hyperparameter swept", names=names), Axis("best loss so far"),
        tuple(series), caption="Hollow: several discrete settings helped, and all were applied together.",
        group="The chain of sweeps", share="y", columns=2, lead=True,
    )  # fmt: skip


def _sweep_panels(chain: Chain) -> list[Panel]:
    """Loss against each numeric setting, round by round."""
    name, panels = chain.arm.name, list[Panel]()
    for step in chain.steps:
        tried = Rows(filter(lambda cell: cell["value"] > 0, step.tried.having("loss")))
        if tried and step["sweep"] not in DISCRETE:
            columns = (tried.column(column) for column in ("value", "loss", "run"))
            panels.append(Panel(
                f"round {step['round']}: {step['sweep']}", Axis(step["sweep"], "log"),
                Axis("validation loss"), (points(name, *columns, arm=name),),
                (("y", step["baseline"], "current"),), group=f"{name}: every sweep of the chain", columns=3,
            ))  # fmt: skip
    return panels
