"""The planner: arm and depth, FLOP budget or token budget → size, tokens, FLOPs, memory, time and cost.

The flow: `make_plan` asks the recipe for the run (`Recipe.at` a depth, `at_budget` for a budget;
`nearest_depth` where only a budget is given) and checks that its batch divides among the GPUs;
`Plan.to_dict` adds memory, communication and time of the cluster. `train` and studies ask the same
`Recipe`, so what is planned is what is trained.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from steepen.errors import UsageError
from steepen.model.arm import Arm, StageNetwork
from steepen.model.arms import find_arm
from steepen.model.shape import SizeRule
from steepen.recipe.accelerators import Accelerator, find_accelerator
from steepen.recipe.flops import compute_active_parameters, flops_per_token
from steepen.recipe.memory import (
    automatic_micro_batch,
    checkpoint_bytes,
    largest_micro_batch,
    training_memory,
)
from steepen.recipe.paper_tables import LADDER_DEPTHS, PAPER, recipe_of
from steepen.recipe.recipe import PlannedRun, Recipe
from steepen.recipe.recipe_choice import RecipeChoice
from steepen.recipe.sharding import SHARDS, Shard, communication
from steepen.utils.values import MAX_DEPTH

MAX_FLOPS = 1e35
# Of `Plan.to_dict()["cluster"]`: what differs between ways to shard.
PER_GPU = ("micro_batch", "memory_gib_per_gpu", "memory_gib_by_stage", "largest_micro_batch", "recompute")


@dataclass(frozen=True)
class Cluster:
    """GPUs a run would use, with their price and assumed MFU."""

    gpus: int = 1
    gpu: Accelerator = field(default_factory=lambda: find_accelerator("h100"))
    mfu: float = 0.4
    dollars_per_hour: float | None = None
    micro_batch: int | None = None  # sequences per GPU and pass; None: what fits, in each stage of growth


@dataclass(frozen=True)
class Plan:
    """A planned run with its recipe, cluster and warnings."""

    run: PlannedRun
    recipe: Recipe
    cluster: Cluster
    warnings: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """Training time at the cluster's assumed MFU."""
        cluster = self.cluster
        return self.run.flops.total / (cluster.gpus * cluster.gpu.peak_flops * cluster.mfu)

    @property
    def dollars(self) -> float | None:
        """Cost at the given price of one GPU hour."""
        price = self.cluster.dollars_per_hour
        return None if price is None else price * self.cluster.gpus * self.seconds / 3600

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON values."""
        planned, shape, arm, flops = self.run, self.run.shape, self.run.arm, self.run.flops
        initial, final = planned.schedule.initial, planned.schedule.final
        first = planned.stages[0]
        sizes = ("depth", "width", "heads", "mlp_width", "context", "vocabulary")
        return {
            "arm": arm.name,
            **{name: getattr(shape, name) for name in sizes},
            "allocation": str(shape.allocation),
            "executed_depth": shape.allocation.executed(final),
            "initial_executed_depth": first.shape.allocation.executed(initial),
            "stored_parameters": planned.stored_parameters,
            "initial_stored_parameters": planned.initial_stored_parameters,
            "compute_active_parameters": compute_active_parameters(arm, shape, final),
            "initial_compute_active_parameters": compute_active_parameters(first.arm, first.shape, initial),
            "flops_per_token": (flops * (1 / planned.tokens)).to_dict(),
            "phases": self._phases(),
            "tokens": planned.tokens,
            "tokens_per_parameter": planned.tokens / planned.recipe_parameters,
            **{name: getattr(planned, name) for name in ("batch_tokens", "steps", "growth_step", "rho")},
            "flops": flops.total,
            "matrix_flops": flops.matrix,
            "flops_by_term": flops.to_dict(),
            "hyperparameters": planned.hyperparameters.to_dict(),
            "cluster": self._cluster(),
            "warnings": list(self.warnings),
        }

    def _phases(self) -> list[dict[str, Any]]:
        """Length, depth and FLOPs of each stage of growth."""
        planned = self.run
        starts, ends = planned.starts, [*planned.starts[1:], planned.steps]
        own = [(one.schedule.stages[0], one.arm, one.shape) for one in planned.stages]
        stages = zip(own, starts, ends, planned.stage_flops, strict=True)
        return [
            {
                "passes": list(stage.passes),
                "allocation": str(shape.allocation),
                **StageNetwork(arm, shape, stage.max_passes).sizes,
                "first_step": start,
                "steps": end - start,
                "tokens": (end - start) * planned.batch_tokens,
                "executed_depth": shape.allocation.executed(stage.max_passes),
                "compute_active_parameters": compute_active_parameters(arm, shape, stage.max_passes),
                "flops_per_token": per_token.to_dict(),
            }
            for (stage, arm, shape), start, end, per_token in stages
        ]

    def _cluster(self) -> dict[str, Any]:
        """Memory, communication, time and cost; by way to shard where there are several GPUs."""
        planned, cluster = self.run, self.cluster
        shards: dict[str, Shard | None] = {f"shard {shard}": shard for shard in SHARDS}
        kinds = shards if cluster.gpus > 1 else {"one GPU": None}
        by_kind = {kind: self._on_gpus(shard) for kind, shard in kinds.items()}
        communication = {kind: self._communication(kinds[kind], one) for kind, one in by_kind.items()}
        longer = min(map(self._slowdown, by_kind.values()))
        hours = self.seconds * longer / 3600
        return {
            "gpus": cluster.gpus,
            "gpu": cluster.gpu.name,
            "mfu": cluster.mfu,
            **{name: {kind: one[name] for kind, one in by_kind.items()} for name in PER_GPU},
            "communication_per_step": {kind: one for kind, one in communication.items() if one is not None},
            "gpu_memory_gib": cluster.gpu.memory_gib,
            "checkpoint_bytes": checkpoint_bytes(planned.arm, planned.shape, planned.schedule.max_passes),
            "hours": hours,
            "gpu_hours": hours * cluster.gpus,
            "dollars": None if self.dollars is None else self.dollars * longer,
        }

    def _on_gpus(self, shard: Shard | None) -> dict[str, Any]:
        """Micro-batch and memory of a GPU in each stage of growth, by the names `PER_GPU`."""
        planned, cluster, gpus = self.run, self.cluster, self.cluster.gpus
        stages = planned.stages
        kept, again = (
            [largest_micro_batch(one, gpus, cluster.gpu, shard=shard, recompute=recompute) for one in stages]
            for recompute in (False, True)
        )
        # As in training: blocks are computed again in the backward where not even one sequence fits.
        recompute = min(kept) == 0 < min(again)
        limits = again if recompute else kept
        used: list[int] = []
        for one, limit in zip(stages, limits, strict=True):
            rows = planned.batch_tokens // one.shape.context // gpus
            chosen = cluster.micro_batch
            used.append(
                min(chosen, rows) if chosen else automatic_micro_batch(rows, one.shape.context, limit)
            )

        def memory(one: PlannedRun, micro_batch: int) -> dict[str, float]:
            return training_memory(one, gpus, micro_batch, shard=shard, recompute=recompute).to_dict()

        by_stage = [memory(one, size)["total"] for one, size in zip(stages, used, strict=True)]
        values = (used, memory(planned, used[-1]), by_stage, limits, recompute)
        return dict(zip(PER_GPU, values, strict=True))

    def _communication(self, shard: Shard | None, one: dict[str, Any]) -> dict[str, float] | None:
        """What a step exchanges between GPUs, and the hours of the run with it; None on one GPU."""
        if shard is None:
            return None
        traffic = communication(
            self.run,
            self.cluster.gpus,
            shard,
            micro_batch=one["micro_batch"][-1],
            step_seconds=self.seconds / self.run.steps,
            peak_flops=self.cluster.gpu.peak_flops,
        )
        hours = self.seconds * self._slowdown(one) / traffic.efficiency / 3600
        return {**traffic.to_dict(), "hours": hours}

    def _slowdown(self, one: dict[str, Any]) -> float:
        """A second forward of the blocks is a third of their FLOPs, which `flops` and MFU do not count."""
        flops = self.run.flops
        return 1 + one["recompute"] * (flops.matmul + flops.attention) / flops.total / 3


def make_plan(
    arm: Arm,
    *,
    depth: int | None = None,
    flops: float | None = None,
    tokens: float | None = None,
    rho: float | None = None,
    size_rule: SizeRule | None = None,
    recipe: Recipe | None = None,
    cluster: Cluster | None = None,
) -> Plan:
    """Plan a run.

    A depth alone gives the recipe's compute-optimal run. A budget alone picks the depth whose compute-optimal
    run comes nearest to it, then spends exactly the budget. A depth with a budget spends it at that depth.
    """
    recipe = recipe or recipe_of(arm)
    _check_size(arm, depth, flops, tokens, rho)
    if depth is None:
        depth = nearest_depth(recipe, arm, size_rule, flops=flops, tokens=tokens)
    if flops is not None and flops > MAX_FLOPS:
        raise UsageError(f"`flops` = {flops:g} exceeds the planner's limit of {MAX_FLOPS:g}.")
    if flops is None and tokens is None:
        planned = recipe.at(arm, depth, size_rule, rho=rho)
    else:
        planned = recipe.at_budget(arm, depth, size_rule, flops=flops, tokens=tokens, rho=rho)
    cluster = cluster or Cluster()
    _check_batch(planned, cluster.gpus)
    found = _warnings(planned, recipe, size_rule or SizeRule(), flops, rho)
    if tokens is not None and tokens < planned.batch_tokens:
        found.insert(
            0,
            f"{tokens:,.0f} tokens are less than one step of {planned.batch_tokens:,} (batch_tokens): one "
            "step is trained.",
        )
    return Plan(planned, recipe, cluster, tuple(found))


def _check_size(
    arm: Arm, depth: int | None, flops: float | None, tokens: float | None, rho: float | None
) -> None:
    """Raise UsageError unless these set the size of a run, and its growth only if it grows."""
    if flops is not None and tokens is not None:
        raise UsageError("give `flops` or `tokens`, not both: either one sets the length of the run.")
    if rho is not None and not 0 < rho <= 1:
        raise UsageError(f"`rho` = {rho} is not valid: it is a fraction of the tokens, in (0, 1].")
    if rho is not None and all(stage.start is not None for stage in arm.passes.stages):
        raise UsageError(
            f"`rho` has no meaning for {arm.name}: its schedule fixes when passes change, or they never do."
        )
    if depth is None and flops is None and tokens is None:
        raise UsageError("give the size of the run: `depth`, `flops` or `tokens`.")


def _check_batch(planned: PlannedRun, gpus: int) -> None:
    """Raise UsageError unless the batch is whole sequences, which the GPUs share evenly."""
    sequences, rest = divmod(planned.batch_tokens, planned.shape.context)
    if rest:
        raise UsageError(
            f"`batch_tokens` = {planned.batch_tokens:,} is not a multiple of the context "
            f"{planned.shape.context:,}."
        )
    if sequences % gpus:
        raise UsageError(
            f"`gpus` = {gpus} is not possible: a batch of {sequences:,} sequences cannot be divided evenly."
        )


def plan_ladders(choice: RecipeChoice, size_rule: SizeRule | None = None, **changes: int) -> list[PlannedRun]:
    """The runs of whole ladders: of the arms that have a recipe file, or of the paper's arms.

    Depths are those of the paper's ladders, or all at which a file's recipe was measured. `changes` replace
    fields of every recipe, e.g. `batch_tokens`.
    """
    planned_runs: list[PlannedRun] = []
    for name in choice.files or PAPER:
        arm = find_arm(name)
        recipe = replace(choice.of(arm), **changes)
        depths = LADDER_DEPTHS.get(arm.recipe, LADDER_DEPTHS["vanilla"])
        if name in choice.files and recipe.measured is not None:
            depths = range(recipe.measured[0], recipe.measured[1] + 1)
        planned_runs += [recipe.at(arm, depth, size_rule) for depth in depths]
    return planned_runs


def nearest_depth(
    recipe: Recipe,
    arm: Arm,
    size_rule: SizeRule | None = None,
    *,
    flops: float | None = None,
    tokens: float | None = None,
) -> int:
    """The depth whose compute-optimal run is nearest to a budget, by ratio."""

    def distance(depth: int) -> float:
        planned = recipe.at(arm, depth, size_rule)
        return abs(
            math.log(planned.flops.total / flops) if flops else math.log(planned.tokens / (tokens or 1))
        )

    best: tuple[float, int] | None = None
    for depth in range(1, MAX_DEPTH + 1):
        try:
            here = distance(depth)
        except UsageError:  # a fixed allocation such as 2/C/3 needs a minimum depth
            continue
        if best is not None and here > best[0]:
            return best[1]
        best = (here, depth)
    raise UsageError(f"the budget is beyond depth {MAX_DEPTH}, the limit of this planner.")


def _warnings(
    planned: PlannedRun, recipe: Recipe, size_rule: SizeRule, budget: float | None, rho: float | None
) -> list[str]:
    """Warnings where a rule is used outside the range it was fitted in."""
    found: list[str] = []
    if budget is not None and planned.steps == 1 and planned.flops.total > 1.5 * budget:
        found.append(
            f"a single step of {planned.batch_tokens:,} tokens costs {planned.flops.total:.3g} FLOPs, more "
            f"than the budget of {budget:.3g}."
        )
    found += _scale_warnings(planned, recipe, size_rule)
    without = flops_per_token(planned.arm, planned.shape, planned.schedule.initial).matrix
    growth = planned.flops.matrix / planned.tokens / without  # 1 if nothing grows
    tpp = planned.tokens / planned.recipe_parameters * growth  # at the initial cost
    if abs(math.log(tpp / recipe.tpp)) > math.log(1.25):
        found.append(
            f"{tpp:.3g} tokens per parameter (at the initial cost) is over 25% from the recipe's "
            f"{recipe.tpp:g}: this run is not compute-optimal by it."
        )
    if planned.rho is not None and rho is None:
        found += _growth_warnings(planned, recipe, tpp)
    if planned.arm.name != planned.arm.recipe:
        found.append(f"{planned.arm.name} has no recipe in the paper: it follows {planned.arm.recipe}'s.")
    return found


def _scale_warnings(planned: PlannedRun, recipe: Recipe, size_rule: SizeRule) -> Iterator[str]:
    """Warnings about hyperparameters and learning rate at this scale and depth."""
    depth, papers = planned.shape.depth, recipe_of(planned.arm)
    tuned_by_paper = recipe.base == papers.base
    exponent_of_paper = tuned_by_paper and recipe.learning_rate_exponent == papers.learning_rate_exponent
    papers_scale = size_rule.aspect == 128 and size_rule.context == 2048 and size_rule.vocabulary == 50_304
    if tuned_by_paper and not papers_scale:
        yield (
            "this scale is not the paper's: its hyperparameters were tuned at width 128·depth, context 2048 "
            "and a vocabulary of 50,304."
        )
    if recipe.measured and not recipe.measured[0] <= depth <= recipe.measured[1]:
        low, high = recipe.measured
        where = "the paper measured this recipe" if exponent_of_paper else "this recipe was measured"
        yield f"depth {depth} is outside d{low}-d{high}, where {where}."
    if exponent_of_paper and not 8 <= depth <= 12:
        yield (
            f"the learning-rate exponent {recipe.learning_rate_exponent:+.1f} was fitted at d8-d12 at most; "
            f"at d{depth} it is extrapolated."
        )


def _growth_warnings(planned: PlannedRun, recipe: Recipe, tpp: float) -> Iterator[str]:
    """Warnings about ρ where the recipe's law gives it, at tokens per parameter without growth."""
    depth, law = planned.shape.depth, recipe.growth_law
    listed = recipe.listed_fraction(planned.arm, planned.shape)
    if law is None or recipe.rho is not None or planned.rho == listed:
        return
    if law == recipe_of(planned.arm).growth_law and not 8 <= depth <= 10:
        yield f"the growth law was fitted at anchors d8-d10; rho at d{depth} is extrapolated."
    if law.measured_tpp is not None and not law.measured_tpp[0] <= tpp <= law.measured_tpp[1]:
        low, high = law.measured_tpp
        yield (
            f"the growth law was fitted at {low:g} to {high:g} tokens per parameter without growth; this "
            f"run has {tpp:.3g}."
        )
