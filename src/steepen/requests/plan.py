"""`plan`: what a run, or every run of a recipe's ladders, would be and cost."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from operator import attrgetter, le
from typing import TYPE_CHECKING, Any, ClassVar

from steepen.errors import UsageError
from steepen.requests.request import Request, function
from steepen.requests.spec import SIZE, ArmField, DepthField, RunSize, Width
from steepen.results.panel import Axis, Panel, Series
from steepen.results.result import Result
from steepen.results.table import Column, formatted_rows, right_columns
from steepen.results.text import Block, Facts, Lines, Paragraph, table_width
from steepen.utils.codec import HelpPanel, Range
from steepen.utils.console import plain_table
from steepen.utils.formatting import (
    format_bytes,
    format_change,
    format_count,
    format_duration,
    format_flops,
    format_passes,
)

if TYPE_CHECKING:
    from steepen.recipe.planner import Plan as RunPlan
    from steepen.recipe.recipe import PlannedRun

# Values of a plan that are rows of its table.
QUANTITIES = (
    "arm", "depth", "width", "allocation", "executed_depth", "stored_parameters", "compute_active_parameters",
    "tokens", "steps", "batch_tokens", "growth_step", "rho", "flops",
)  # fmt: skip
COSTS = ("gpus", "gpu", "mfu", "gpu_hours", "dollars")


@dataclass(frozen=True)
class QuantityRow:
    """A value of the plan."""

    quantity: str
    value: Any


@dataclass(frozen=True, eq=False, repr=False)
class PlanResult(Result):
    """A planned run; `plan` is the planner's own object."""

    plan: RunPlan

    def __getitem__(self, name: str) -> Any:
        """A value of the plan by name: `plan["flops"]`, `plan["learning_rate"]`."""
        facts = self.to_dict()
        facts |= {**facts["hyperparameters"], **facts["cluster"]}
        if name not in facts:
            raise UsageError(f"a plan has no {name!r}; it has {', '.join(sorted(facts))}.")
        return facts[name]

    @property
    def rows(self) -> list[QuantityRow]:
        """One row per value of the plan."""
        facts = self.to_dict()
        rows = {name: facts[name] for name in QUANTITIES} | facts["hyperparameters"]
        rows |= {name: facts["cluster"][name] for name in COSTS}
        return [QuantityRow(name, value) for name, value in rows.items() if value is not None]

    def headline(self) -> str:
        """Arm, depth, tokens, FLOPs and time."""
        planned, cluster = self.plan.run, self.plan.cluster
        return (
            f"{planned.arm.name} d{planned.shape.depth}: {format_count(planned.stored_parameters)} "
            f"parameters, {format_count(planned.tokens)} tokens, {planned.flops.total:.3g} FLOPs, about "
            f"{format_duration(self.plan.seconds)} on {cluster.gpus} × {cluster.gpu.name}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything, as `steepen plan --json` prints it."""
        return self.plan.to_dict()

    def panels(self) -> list[Panel]:
        """The executed depth over the tokens of the run."""
        seen, x, y = 0, list[float](), list[float]()
        for phase in self.to_dict()["phases"]:
            x += [seen, seen + phase["tokens"]]
            y += [phase["executed_depth"]] * 2
            seen += phase["tokens"]
        arm = self.plan.run.arm.name
        line = Series(arm, "line", tuple(x), tuple(y), arm=arm)
        return [Panel(self.headline(), Axis("tokens"), Axis("executed depth"), (line,))]

    def blocks(self, width: int) -> Iterable[Block]:
        """Size, budget, hyperparameters and cost; then what to be careful about."""
        facts, planned = self.to_dict(), self.plan.run
        yield Facts(_size(planned, facts), f"{planned.arm.title} d{planned.shape.depth}")
        yield Facts(_budget(planned, facts), "Budget")
        yield Facts(_hyperparameters(facts["hyperparameters"]), "Hyperparameters (the paper's code)")
        cluster = facts["cluster"]
        where = f"On {cluster['gpus']} × {cluster['gpu']} at {cluster['mfu']:.0%} MFU"
        yield Facts([*_cost(cluster), *_memory(cluster), *_communication(cluster)], f"{where} (estimates)")
        yield from (Paragraph(f": {text}", lead="note", style="yellow") for text in self.plan.warnings)


def _size(planned: PlannedRun, facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    shape = planned.shape
    yield "width, heads, MLP width", f"{shape.width}, {shape.heads}, {shape.mlp_width}"
    yield "prelude/core/coda", facts["allocation"]
    yield "executed depth", format_change(facts["initial_executed_depth"], facts["executed_depth"])
    for name, word in (("stored", "stored parameters"), ("compute_active", "compute-active param.")):
        counts = (f"{facts[field]:,}" for field in (f"initial_{name}_parameters", f"{name}_parameters"))
        yield word, format_change(*counts)


def _budget(planned: PlannedRun, facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    from steepen.model.arm import StageNetwork

    # The count is that of the arm's own size at its first passes.
    others = {*planned.schedule.axes} - {"passes"}
    counted = "parameter of the full size" if others else "initial stored parameter"
    per_parameter = f"{facts['tokens_per_parameter']:.2f} per {counted}"
    yield "tokens", f"{planned.tokens:,} ({per_parameter})"
    yield "steps", f"{planned.steps:,} of {planned.batch_tokens:,} tokens"
    if planned.growth_step is not None:
        fraction = f" (ρ = {planned.rho:.4f} of the tokens after it)" if planned.rho is not None else ""
        yield "growth after step", f"{planned.growth_step:,}{fraction}"
    yield "total FLOPs", f"{facts['flops']:.4e}"
    for phase, one in zip(facts["phases"], planned.stages, strict=True):
        terms = phase["flops_per_token"]
        parts = ", ".join(f"{name} {terms[name]:.3e}" for name in ("matmul", "attention", "head"))
        size = f"K={format_passes(phase['passes'])}"
        if {*planned.schedule.axes} - {"passes"}:
            sizes = StageNetwork(one.arm, one.shape, planned.schedule.initial).sizes
            size += "".join([f", {phase['allocation']}", *(f", {name} {sizes[name]}" for name in sizes)])
        yield f"FLOPs per token, {size}", f"{terms['total']:.4e} ({parts})"


def _cost(cluster: dict[str, Any]) -> Iterator[tuple[str, str]]:
    alone = ", without communication" if cluster["gpus"] > 1 else ""
    yield "time", f"{_hours(cluster['hours'])} ({cluster['gpu_hours']:.1f} GPU hours{alone})"
    if cluster["dollars"] is not None:
        price = cluster["dollars"] / cluster["gpu_hours"]
        exposed = [one["hours"] for one in cluster["communication_per_step"].values()]
        # The bound of the ways to shard below: nothing of the communication overlapped.
        most = (
            f", at most ${price * cluster['gpus'] * min(exposed):,.2f} with communication" if exposed else ""
        )
        yield "cost", f"${cluster['dollars']:,.2f}{alone}{most}"
    saved = format_bytes(cluster["checkpoint_bytes"])
    yield "disk", f"{saved} for a checkpoint; 2 are kept while it trains"


def _memory(cluster: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for kind, memory in cluster["memory_gib_per_gpu"].items():
        used, limits = cluster["micro_batch"][kind], cluster["largest_micro_batch"][kind]
        fits = "fits" if all(map(le, used, limits)) else "does NOT fit"
        if fits != "fits" and memory["total"] <= cluster["gpu_memory_gib"]:
            fits = "fits, with less than 10% to spare"
        parts = ", ".join(
            f"{name.replace('_', ' ')} {value:.1f}" for name, value in memory.items() if name != "total"
        )
        largest = f"largest that fits: {_stages(limits)}" if limits[-1] else "a single sequence does not fit"
        if cluster["recompute"][kind]:
            largest += "; blocks are computed again in the backward"
        stages = [f"{value:.1f}" for value in cluster["memory_gib_by_stage"][kind]]
        if len(stages) > 1:
            largest += f"; in each stage {', then '.join(stages)} GiB"
        yield (
            f"memory, {kind}",
            f"{memory['total']:.1f} GiB per GPU, {fits} ({parts}); micro-batch {_stages(used)}, {largest}",
        )


def _communication(cluster: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for kind, exchange in cluster["communication_per_step"].items():
        yield (
            f"communication, {kind}",
            f"{exchange['gradient_gib']:.1f} GiB of gradients and {exchange['weight_gib']:.1f} GiB of "
            f"weights per GPU and step, {exchange['exposed_seconds']:.2f} s exposed (not overlapped, by a "
            f"model), {exchange['rank_seconds']:.2f} s of optimizer and copies (from measurements): "
            f"{exchange['efficiency']:.0%} efficiency, {_hours(exchange['hours'])}",
        )


def _hyperparameters(values: dict[str, float]) -> Iterator[tuple[str, str]]:
    from steepen.recipe.hyperparameters import paper_code

    for name, value in values.items():
        code = paper_code(name)
        # The paper prints three decimals of a base value with more of them.
        rounded = name not in ("learning_rate", "adam_eps") and round(value, 3) != value
        printed = f" (printed {value:.3f})" if rounded else ""
        yield name if code is None else f"{name} ({code})", f"{value:.12g}{printed}"


def _stages(values: Sequence[int]) -> str:
    """A number for each stage of growth: "4, then 2"; once if all are equal."""
    return ", then ".join(map(str, values if len(set(values)) > 1 else values[:1]))


def _hours(hours: float) -> str:
    if hours < 1:
        return f"{60 * hours:.1f} min"
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.1f} days"


def _exact(value: Any) -> str:
    return "" if value is None else str(value)


@dataclass(frozen=True, eq=False, repr=False)
class LaddersResult(Result):
    """The runs of whole ladders, by the recipes of these names or files."""

    row_columns: ClassVar = {
        "arm": Column(value=attrgetter("arm.name")),
        "depth": Column(value=attrgetter("shape.depth")),
        "width": Column(value=attrgetter("shape.width"), shown=False),
        "steps": Column(format=_exact),
        "growth_step": Column("growth", _exact, align="right"),
        "rho": Column(shown=False),
        "tokens": Column(shown=False),
        "learning_rate": Column("lr", _exact, value=attrgetter("hyperparameters.learning_rate")),
        "embedding_lr": Column("emb. lr", _exact, value=attrgetter("hyperparameters.embedding_lr")),
        "head_lr": Column(format=_exact, value=attrgetter("hyperparameters.head_lr")),
        "initial_stored_parameters": Column(shown=False),
        "stored_parameters": Column(shown=False),
        "flops": Column("FLOPs", _exact, value=attrgetter("flops.total")),
        "matrix_flops": Column(value=attrgetter("flops.matrix"), shown=False),
        "hyperparameters": Column(value=lambda run: run.hyperparameters.to_dict(), shown=False),
    }

    recipe: tuple[str, ...]
    runs: tuple[PlannedRun, ...]

    @property
    def rows(self) -> tuple[PlannedRun, ...]:
        """One row for each run."""
        return self.runs

    def headline(self) -> str:
        """How many runs, by which recipe."""
        return f"{len(self.runs)} runs of the ladders of {', '.join(self.recipe)}"

    def to_dict(self) -> dict[str, Any]:
        """The recipes and the rows."""
        return {"recipe": list(self.recipe), "runs": self.to_rows()}

    def panels(self) -> list[Panel]:
        """FLOPs over depth, arm by arm."""
        curves: dict[str, list[tuple[float, float]]] = {}
        for run in self.runs:
            curves.setdefault(run.arm.name, []).append((float(run.shape.depth), run.flops.total))
        lines = [Series(arm, "line", *zip(*points, strict=True), arm=arm) for arm, points in curves.items()]
        return [Panel(self.headline(), Axis("depth"), Axis("FLOPs", "log"), tuple(lines))]

    def blocks(self, width: int) -> Iterable[Block]:
        """One line for each run, with every digit where the terminal is wide enough."""
        exact = self.table()
        wide = table_width(exact)
        if not (sys.stdout.isatty() or "COLUMNS" in os.environ):  # a pipe or a file, of any width
            yield Lines(plain_table(exact.columns, formatted_rows(exact), right_columns(exact)))
            return
        if wide <= width:
            yield exact
            return
        yield replace(exact, shown=tuple(replace(one, format=_rounded) for one in exact.shown))
        yield Paragraph(f"Every digit: widen the terminal to {wide} columns, or use --json.")


def _rounded(value: Any) -> str:
    return format_flops(value, 4) if isinstance(value, float) else _exact(value)


if TYPE_CHECKING:
    # Without an arm it is a LaddersResult, which the editor need not offer.
    Planned = PlanResult
else:
    Planned = PlanResult | LaddersResult

CLUSTER = HelpPanel("Memory, time and cost")  # panel of --help


@dataclass(frozen=True)
class Plan(RunSize, Request[Planned]):
    """Plan a run: size, tokens, FLOPs, hyperparameters, memory, time and cost.

    `depth` alone gives the recipe's compute-optimal run; `flops` or `tokens` alone chooses the depth;
    together they spend the budget at that depth. `recipe` without `arm` plans its whole ladders.
    """

    examples = (
        "steepen plan --arm untied-grow --depth 26 --gpus 16",
        "steepen plan --arm vanilla --flops 1e19 --json",
        "steepen plan --recipe paper",
    )
    figure = tables = True

    arm: ArmField = None
    depth: DepthField = None
    _: KW_ONLY
    vocabulary: Width = SIZE("Vocabulary size, padded.", 50_304)
    gpus: int = CLUSTER("GPUs the run would use.", 1, Range(1, 10**6))
    gpu: str = CLUSTER("GPU model: a100, h100, h200, b200 and others.", "h100")
    mfu: float = CLUSTER("Model FLOPs utilization to assume.", 0.4, Range(1e-6, 1))
    micro_batch: int | None = CLUSTER(
        "Sequences per GPU and micro-batch. Default: what fits, in each stage of growth.",
        limits=Range(1, 10**6),
    )
    dollars_per_hour: float | None = CLUSTER("Price of one GPU hour.", limits=Range(0, 1e6))

    def check(self) -> None:
        """Reject a size of no arm."""
        sizes = (self.depth, self.flops, self.tokens, self.rho)
        if self.arm is None and (not self.recipe or any(value is not None for value in sizes)):
            raise UsageError("give `arm`, or `recipe` alone for the whole ladders of a recipe.")

    def run(self) -> Planned:
        """Plan the run, or the ladders."""
        from steepen.model.arms import find_arm
        from steepen.recipe.accelerators import find_accelerator
        from steepen.recipe.planner import Cluster, make_plan, plan_ladders

        size = self.size_rule(vocabulary=self.vocabulary)
        if self.arm is None:
            names = tuple(map(str, self.recipe))
            runs = plan_ladders(self.recipe_choice(), size, **self.recipe_changes())
            return LaddersResult(names, tuple(runs))  # pyright: ignore[reportReturnType]
        arm = find_arm(self.arm)
        gpu = find_accelerator(self.gpu)
        plan = make_plan(
            arm, depth=self.depth, flops=self.flops, tokens=self.tokens, rho=self.rho, size_rule=size,
            recipe=self.recipe_of(arm),
            cluster=Cluster(self.gpus, gpu, self.mfu, self.dollars_per_hour, self.micro_batch),
        )  # fmt: skip
        return PlanResult(plan)


plan = function(Plan)
