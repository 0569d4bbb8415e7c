"""A recipe: base hyperparameters and the rules that scale them with size."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from steepen.errors import UsageError, require, require_positive
from steepen.model.arm import Arm
from steepen.model.shape import MAX_SIZE, Shape, SizeRule
from steepen.model.stages import PassSchedule, Stage
from steepen.recipe.flops import (
    FlopCount,
    Flops,
    flops_per_token,
    mean_flops_per_token,
    recipe_parameters,
    run_flops,
    stage_starts,
    stored_parameters,
)
from steepen.recipe.growth_law import GrowthLaw
from steepen.recipe.hyperparameters import Hyperparameters, full_name

# What a rule may scale: numbers that keep their meaning when multiplied.
SCALABLE = (
    "embedding_lr_multiplier", "head_lr_multiplier", "residual_multiplier", "output_multiplier",
    "injection_weight", "weight_decay", "embedding_init_std", "init_scale", "warmdown_fraction",
)  # fmt: skip


@dataclass(frozen=True)
class ScalingRule:
    """A hyperparameter as a power of size: base·(size/size at the base depth)^exponent.

    `by` is "parameters" (stored at the start) or "width"; muP's output multiplier has exponent −1 by width.
    """

    hyperparameter: str
    exponent: float
    by: Literal["parameters", "width"] = "parameters"

    def __post_init__(self) -> None:
        object.__setattr__(self, "hyperparameter", full_name(self.hyperparameter))
        known = self.hyperparameter in SCALABLE
        require(known, "ScalingRule", "hyperparameter", self.hyperparameter, f"one of {', '.join(SCALABLE)}")
        require(abs(self.exponent) <= 100, "ScalingRule", "exponent", self.exponent, "from -100 to 100")
        require(self.by in ("parameters", "width"), "ScalingRule", "by", self.by, "parameters or width")


@dataclass(frozen=True)
class Recipe:
    """How one arm is trained at any depth.

    `tpp` is tokens per parameter that the arm's shape stores at the passes of the first stage. For a growing
    arm, that many tokens without growth (of that network throughout) define the budget of matrix FLOPs (t_ref
    and N_ref in the paper); the tokens then follow from it and from ρ.
    """

    base: Hyperparameters
    # β of lr(N) = lr_base·(N/N_base)^β, N the parameters that `tpp` counts (Equation "glr-scaling").
    learning_rate_exponent: float
    tpp: float
    base_depth: int = 8
    learning_rate_base: float | None = None  # where it differs from the base table's
    rho: float | None = None  # fraction of tokens after growth, if fixed
    # ρ by depth, for the paper's sizes at `tpp` tokens per parameter
    listed_rho: tuple[tuple[int, float], ...] = ()
    growth_law: GrowthLaw | None = None  # law that gives rho at every other size and budget
    batch_tokens: int = 524_288
    measured: tuple[int, int] | None = None  # the depths its ladder was measured at
    scaling: tuple[
        ScalingRule, ...
    ] = ()  # of other hyperparameters than the learning rate; none in the paper

    def __post_init__(self) -> None:
        require_positive(self, ("batch_tokens",))
        require_positive(self, ("base_depth",), MAX_SIZE)
        require(0 < self.tpp <= 1e9, "Recipe", "tpp", self.tpp, "positive and at most 1e9")
        exponent, anchor = self.learning_rate_exponent, self.learning_rate_base
        require(abs(exponent) <= 100, "Recipe", "learning_rate_exponent", exponent, "from -100 to 100")
        good = anchor is None or 0 < anchor <= 1e9
        require(good, "Recipe", "learning_rate_base", anchor, "positive and at most 1e9, or None")
        require(
            self.rho is None or 0 < self.rho <= 1, "Recipe", "rho", self.rho, "a fraction in (0, 1] or None"
        )
        inside = all(1 <= depth <= MAX_SIZE and 0 < rho <= 1 for depth, rho in self.listed_rho)
        accepted = f"pairs of a depth (1 to {MAX_SIZE:,}) and a fraction in (0, 1]"
        require(inside, "Recipe", "listed_rho", self.listed_rho, accepted)
        low, high = self.measured or (1, 1)
        good = 1 <= low <= high <= MAX_SIZE
        require(good, "Recipe", "measured", self.measured, f"two depths from 1 to {MAX_SIZE:,}, or null")

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
        return self._plan(arm, shape, size_rule, schedule, fraction, tokens)

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
            rho = self.growth_fraction(arm, shape, self._tpp_without_growth(arm, shape, flops, tokens, count))
        schedule = arm.passes.resolve(rho)
        if tokens is None:
            assert flops is not None
            tokens = flops / mean_flops_per_token(arm, shape, schedule).counted(count)
        return self._plan(arm, shape, size_rule, schedule, rho, tokens)

    def _tpp_without_growth(
        self, arm: Arm, shape: Shape, flops: float | None, tokens: float | None, count: FlopCount
    ) -> float:
        """Tokens per parameter that a budget would buy without growth."""
        stored = recipe_parameters(arm, shape, arm.passes.initial)
        if tokens is None:
            assert flops is not None
            return flops / flops_per_token(arm, shape, arm.passes.initial).counted(count) / stored
        tpp = tokens / stored
        return tpp if self.growth_law is None else self.growth_law.tpp_without_growth(tpp)

    def _plan(
        self,
        arm: Arm,
        shape: Shape,
        size_rule: SizeRule | None,
        schedule: PassSchedule,
        rho: float | None,
        tokens: float,
    ) -> PlannedRun:
        return PlannedRun(
            arm=arm,
            shape=shape,
            schedule=schedule,
            rho=rho,
            hyperparameters=self.hyperparameters(arm, shape.depth, size_rule),
            batch_tokens=self.batch_tokens,
            steps=max(1, round(tokens / self.batch_tokens)),
        )


@dataclass(frozen=True)
class PlannedRun:
    """One planned run: an arm at a size, its number of steps, its stages and hyperparameters."""

    arm: Arm
    shape: Shape
    schedule: PassSchedule
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
            found.append(replace(self, arm=arm, shape=shape, schedule=PassSchedule((Stage(stage.passes),))))
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
