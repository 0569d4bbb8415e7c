"""A recipe: base hyperparameters and the rules that scale them with size."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal, TypeAlias

from steepen.errors import MAX_WHOLE, UsageError, require
from steepen.model.arm import Arm
from steepen.model.shape import Shape, Size, SizeRule
from steepen.model.stages import Share, Stage, StageSchedule
from steepen.recipe.flops import (
    FlopCount,
    Flops,
    flops_per_token,
    mean_flops_per_token,
    recipe_parameters,
    relative_costs,
    run_flops,
    stage_starts,
    stored_parameters,
)
from steepen.recipe.hyperparameters import Hyperparameters, Positive, full_name
from steepen.utils.codec import Checked, OneOf, Range

Exponent: TypeAlias = Annotated[float, Range(-100, 100)]
# What a rule may scale: numbers that keep their meaning when multiplied.
SCALABLE = (
    "embedding_lr_multiplier", "head_lr_multiplier", "residual_multiplier", "output_multiplier",
    "injection_weight", "weight_decay", "embedding_init_std", "init_scale", "warmdown_fraction",
)  # fmt: skip


@dataclass(frozen=True)
class ScalingRule(Checked):
    """A hyperparameter as a power of size: base·(size/size at the base depth)^exponent.

    `by` is "parameters" (stored at the start) or "width"; muP's output multiplier has exponent −1 by width.
    """

    hyperparameter: Annotated[str, OneOf(SCALABLE, full_name)]
    exponent: Exponent
    by: Literal["parameters", "width"] = "parameters"


@dataclass(frozen=True)
class GrowthLaw(Checked):
    """The paper's rule for when to grow (Appendix "TPP…"), fitted to its sweeps.

    TPP at the best transition = a·TPP without growth + b (Equation "growth-affine").
    """

    a: Annotated[float, Range(-1e9, 1e9)]
    b: Annotated[float, Range(-1e9, 1e9)]
    measured_tpp: tuple[Positive, Positive] | None = None  # TPP without growth of the optima it was fitted to

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.a != 0, "GrowthLaw", "a", self.a, "other than 0")
        low, high = self.measured_tpp or (1.0, 1.0)
        require(low <= high, "GrowthLaw", "measured_tpp", self.measured_tpp, "two rising numbers, or null")

    def expansion(self, tpp: float) -> float:
        """X_ρ*/X_2 (paper: E): the compute per token of the best transition over that without growth."""
        after = self.a * tpp + self.b
        return tpp / after if after else math.inf

    def tpp_without_growth(self, tpp: float) -> float:
        """TPP without growth at the compute that `tpp` tokens per parameter cost with the best growth."""
        return (tpp - self.b) / self.a

    def rho(self, arm: Arm, shape: Shape, tpp: float) -> float:
        """ρ*: the fraction of tokens after growth, for this shape's block allocation.

        `tpp` is without growth. Where the law gives no positive ρ (the paper's below a TPP of 2.2 tied, 0.9
        untied), its value at the lowest measured TPP is returned.
        """
        if self.measured_tpp is not None and not (tpp > 0 and self.expansion(tpp) > 1):
            tpp = self.measured_tpp[0]
        first, grown = relative_costs(arm, shape, arm.passes)
        if first == grown:
            raise UsageError(f"no law says when {arm.name} grows, whose matrices do not: give `rho`.")
        rho = (self.expansion(tpp) - first) / (grown - first)
        if not 0.0 < rho <= 1.0:
            raise UsageError(
                f"the growth law gives rho = {rho:.3g} at {tpp:g} tokens per parameter, which is not a "
                f"fraction: at depth {shape.depth} choose more tokens per parameter, or give `rho`."
            )
        return rho


@dataclass(frozen=True)
class Recipe(Checked):
    """How one arm is trained at any depth.

    `tpp` is tokens per parameter that the arm's shape stores at the passes of the first stage. For a growing
    arm, that many tokens without growth (of that network throughout) define the budget of matrix FLOPs (t_ref
    and N_ref in the paper); the tokens then follow from it and from ρ.
    """

    base: Hyperparameters
    # β of lr(N) = lr_base·(N/N_base)^β, N the parameters that `tpp` counts (Equation "glr-scaling").
    learning_rate_exponent: Exponent
    tpp: Positive
    base_depth: Size = 8
    learning_rate_base: Positive | None = None  # where it differs from the base table's
    rho: Share | None = None  # fraction of tokens after growth, if fixed
    # ρ by depth, for the paper's sizes at `tpp` tokens per parameter
    listed_rho: tuple[tuple[Size, Share], ...] = ()
    growth_law: GrowthLaw | None = None  # law that gives rho at every other size and budget
    batch_tokens: Annotated[int, Range(1, MAX_WHOLE)] = 524_288
    measured: tuple[Size, Size] | None = None  # the depths its ladder was measured at
    scaling: tuple[ScalingRule, ...] = ()  # of hyperparameters but the learning rate; none in the paper

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.measured or (1, 1)
        require(low <= high, "Recipe", "measured", self.measured, "two rising depths, or null")

    def learning_rate(self, arm: Arm, depth: int, size_rule: SizeRule | None = None) -> float:
        """The learning rate at a depth, by the anchored rule."""
        anchor = self.base.learning_rate if self.learning_rate_base is None else self.learning_rate_base
        size = recipe_parameters(arm, arm.shape(depth, size_rule), arm.passes.initial)
        base = recipe_parameters(arm, arm.shape(self.base_depth, size_rule), arm.passes.initial)
        return anchor * (base / size) ** -self.learning_rate_exponent  # the authors' order of operations

    def hyperparameters(self, arm: Arm, depth: int, size_rule: SizeRule | None = None) -> Hyperparameters:
        """The base values with the learning rate of this depth, and what else scales with size."""
        scaled = {rule.hyperparameter: self._scaled(rule, arm, depth, size_rule) for rule in self.scaling}
        return replace(self.base, learning_rate=self.learning_rate(arm, depth, size_rule), **scaled)

    def _scaled(self, rule: ScalingRule, arm: Arm, depth: int, size_rule: SizeRule | None) -> float:
        shapes = arm.shape(depth, size_rule), arm.shape(self.base_depth, size_rule)
        if rule.by == "width":
            size, base = (float(shape.width) for shape in shapes)
        else:
            size, base = (float(recipe_parameters(arm, shape, arm.passes.initial)) for shape in shapes)
        value = getattr(self.base, rule.hyperparameter) * (size / base) ** rule.exponent
        return min(1.0, value) if rule.hyperparameter == "warmdown_fraction" else value

    def with_tpp(self, tpp: float) -> Recipe:
        """The recipe at other tokens per parameter; ρ listed for its own no longer applies."""
        return self if tpp == self.tpp else replace(self, tpp=tpp, listed_rho=())

    def listed_fraction(self, arm: Arm, shape: Shape) -> float | None:
        """ρ as listed for this shape; None if it is not one of the paper's sizes."""
        listed = dict(self.listed_rho).get(shape.depth)
        return listed if listed is not None and shape == arm.shape(shape.depth) else None

    def growth_fraction(self, arm: Arm, shape: Shape, tpp: float | None = None) -> float | None:
        """ρ for this shape: None if the arm does not grow or its schedule gives every start.

        `tpp`: tokens per parameter without growth of a budget that is not the recipe's; ρ then follows the
        growth law there.
        """
        if all(stage.start is not None for stage in arm.passes.stages):
            return None
        if self.rho is not None:
            return self.rho
        listed = self.listed_fraction(arm, shape) if tpp is None else None
        if listed is not None:
            return listed
        if self.growth_law is None:
            raise UsageError(
                f"the recipe for {arm.name} does not say when it grows: give rho, or a law for it."
            )
        return self.growth_law.rho(arm, shape, self.tpp if tpp is None else tpp)

    def at(
        self, arm: Arm, depth: int, size_rule: SizeRule | None = None, *, rho: float | None = None
    ) -> PlannedRun:
        """The compute-optimal run of this arm at a depth: growth keeps the FLOPs of the matrices."""
        shape = arm.shape(depth, size_rule)
        fraction = self.growth_fraction(arm, shape) if rho is None else rho
        schedule = arm.passes.resolve(fraction)
        reference = self.tpp * recipe_parameters(arm, shape, arm.passes.initial)
        without = flops_per_token(arm, shape, arm.passes.initial).matrix
        tokens = reference * without / mean_flops_per_token(arm, shape, schedule).matrix
        return self.at_budget(arm, depth, size_rule, tokens=tokens, rho=fraction)

    def at_budget(
        self,
        arm: Arm,
        depth: int,
        size_rule: SizeRule | None = None,
        *,
        flops: float | None = None,
        tokens: float | None = None,
        rho: float | None = None,
        count: FlopCount = "total",
    ) -> PlannedRun:
        """A run at a depth whose length is set by compute or by tokens instead of by TPP.

        `count` says what `flops` counts: with "matrix", attention is left out.
        """
        if (flops is None) == (tokens is None):
            raise UsageError("give either flops or tokens to set the length of a run.")
        shape = arm.shape(depth, size_rule)
        if rho is None:
            stored = recipe_parameters(arm, shape, arm.passes.initial)
            if flops is not None:  # tokens per parameter that the budget would buy without growth
                tpp = flops / flops_per_token(arm, shape, arm.passes.initial).counted(count) / stored
            else:
                assert tokens is not None
                tpp = tokens / stored
                tpp = tpp if self.growth_law is None else self.growth_law.tpp_without_growth(tpp)
            rho = self.growth_fraction(arm, shape, tpp)
        schedule = arm.passes.resolve(rho)
        if tokens is None:
            assert flops is not None
            tokens = flops / mean_flops_per_token(arm, shape, schedule).counted(count)
        steps = max(1, round(tokens / self.batch_tokens))
        hyper = self.hyperparameters(arm, depth, size_rule)
        return PlannedRun(arm, shape, schedule, rho, hyper, self.batch_tokens, steps)


@dataclass(frozen=True)
class PlannedRun:
    """One planned run: an arm at a size, its number of steps, its stages and hyperparameters."""

    arm: Arm
    shape: Shape
    schedule: StageSchedule
    rho: float | None
    hyperparameters: Hyperparameters
    batch_tokens: int
    steps: int

    @property
    def tokens(self) -> int:
        """Tokens trained on: whole steps of the global batch."""
        return self.steps * self.batch_tokens

    @property
    def starts(self) -> tuple[int, ...]:
        """The step at which each stage of the schedule begins."""
        return stage_starts(self.schedule, self.steps)

    @property
    def growth_step(self) -> int | None:
        """The first step of the second stage, from 0: Algorithm 1's g is the number of steps before it."""
        return self.starts[1] if self.schedule.grows else None

    @property
    def stages(self) -> tuple[PlannedRun, ...]:
        """Each stage of the schedule as a run of its own, of the network as it is in that stage."""
        found: list[PlannedRun] = []
        for stage in self.schedule.stages:
            arm, shape = self.arm.at(stage, self.shape)
            found.append(replace(self, arm=arm, shape=shape, schedule=StageSchedule((Stage(stage.passes),))))
        return tuple(found)

    @property
    def stage_flops(self) -> tuple[Flops, ...]:
        """Expected FLOPs per token in each stage."""
        return tuple(mean_flops_per_token(one.arm, one.shape, one.schedule) for one in self.stages)

    @property
    def flops(self) -> Flops:
        """Expected FLOPs of the whole run, stage by stage at its whole steps."""
        return run_flops(self.arm, self.shape, self.schedule, self.steps, self.batch_tokens)

    @property
    def stored_parameters(self) -> int:
        """What the finished network stores."""
        return stored_parameters(self.arm, self.shape, self.schedule.max_passes)

    @property
    def initial_stored_parameters(self) -> int:
        """What the network stores at the start."""
        first = self.stages[0]
        return stored_parameters(first.arm, first.shape, self.schedule.initial)

    @property
    def recipe_parameters(self) -> int:
        """The count that TPP and the learning-rate rule are by: the arm's at the passes of the first stage.

        Of an arm that grows in passes only, it is that of the start; along other axes, of the end.
        """
        return recipe_parameters(self.arm, self.shape, self.schedule.initial)
