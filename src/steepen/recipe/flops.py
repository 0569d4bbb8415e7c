"""Parameters and FLOPs in closed form, by every convention (Appendix "TPP Relations…").

FLOPs per token = 6·(block matrices once per application + lm_head) + 12·L_exec·w·(context + 1)/2. The input
embedding costs nothing; attention is causal, so a query sees (context + 1)/2 keys on average. This gives the
FLOPs of the paper's published ladders to the last digit; its sweeps leave attention out (`Flops.matrix`).
Tests count the modules of networks instead, and compare the two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from steepen.errors import UsageError
from steepen.model.arm import Arm
from steepen.model.shape import Shape
from steepen.model.stages import Stage, StageSchedule

FlopCount = Literal["total", "matrix"]  # what a budget counts: everything, or all but attention


@dataclass(frozen=True)
class Flops:
    """FLOPs by term, of one token or of a whole run; whole numbers stay exact."""

    matmul: float  # matrices of the blocks, without the head (`matrix` is both)
    attention: float
    head: float

    @property
    def total(self) -> float:
        """All terms together."""
        return float(self.matmul + self.attention + self.head)

    @property
    def matrix(self) -> float:
        """FLOPs of the matrices (blocks and head), without attention, as in the paper's sweeps."""
        return float(self.matmul + self.head)

    def counted(self, count: FlopCount) -> float:
        """The total, or the FLOPs of the matrices only."""
        return self.total if count == "total" else self.matrix

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.matmul + other.matmul, self.attention + other.attention, self.head + other.head)

    def __mul__(self, factor: float) -> Flops:
        return Flops(self.matmul * factor, self.attention * factor, self.head * factor)

    def to_dict(self) -> dict[str, float]:
        """The terms and their total."""
        terms = {"matmul": self.matmul, "attention": self.attention, "head": self.head, "total": self.total}
        return {name: float(value) for name, value in terms.items()}


@dataclass(frozen=True)
class BlockCost:
    """Parameters of one block, and its cost per token."""

    stored: int
    matrices: int  # parameters that multiply every token
    attention_flops: int  # per token at the shape's context, forward and backward
    idle: int = 0  # parameters of the experts that a token does not use


def block_cost(arm: Arm, shape: Shape) -> BlockCost:
    """Cost of one block of an arm: in closed form, or counted from the module for a custom block."""
    if arm.block != "transformer":
        from steepen.model.block_variant import count_block

        return BlockCost(*count_block(arm, shape))
    width, options = shape.width, arm.block_options
    # Q and O, K and V, then the matrices of the MLP: three of a SwiGLU.
    attention = 2 * width**2 + 2 * width * options.heads(shape) * shape.head_dim
    mlp = (3 if options.activation == "swiglu" else 2) * width * options.mlp_width(shape)
    keys = round(12 * width * options.visible_keys(shape.context))
    vectors = options.connection_weights
    if options.experts is None:
        return BlockCost(attention + mlp + vectors, attention + mlp, keys)
    router, idle = options.experts * width, (options.experts - options.active_experts) * mlp
    active = attention + router + (options.active_experts + options.shared_experts) * mlp
    vectors += options.experts if options.balance == "bias" else 0
    return BlockCost(active + idle + vectors, active, keys, idle)


def head_parameters(shape: Shape) -> int:
    """Parameters of lm_head; the untied input embedding has as many."""
    return shape.vocabulary * shape.width


def stored_parameters(arm: Arm, shape: Shape, passes: int) -> int:
    """N_s: all parameters stored at this many passes, embedding and head included."""
    return block_cost(arm, shape).stored * arm.stored_blocks(shape.allocation, passes) + 2 * head_parameters(
        shape
    )


def recipe_parameters(arm: Arm, shape: Shape, passes: int) -> int:
    """The N of tokens per parameter and of the learning-rate rule: N_s, of experts those that a token uses.

    All experts of an arm then train on as many tokens as the dense MLP whose FLOPs they cost.
    """
    idle = block_cost(arm, shape).idle * arm.stored_blocks(shape.allocation, passes)
    return stored_parameters(arm, shape, passes) - idle


def compute_active_parameters(arm: Arm, shape: Shape, passes: int) -> int:
    """N_c: block matrices once per application, the head once, no input embedding; FLOPs follow it."""
    return block_cost(arm, shape).matrices * shape.allocation.executed(passes) + head_parameters(shape)


def flops_per_token(arm: Arm, shape: Shape, passes: int) -> Flops:
    """Training FLOPs of one token, forward and backward, at this many passes.

    Passes that truncated backpropagation leaves out cost their forward, a third.
    """
    executed = shape.allocation.executed(passes)
    block, forward_only = block_cost(arm, shape), shape.allocation.core * arm.passes_without_gradient(passes)
    return Flops(
        matmul=6 * block.matrices * executed - 4 * block.matrices * forward_only,
        attention=block.attention_flops * executed - 2 * block.attention_flops * forward_only // 3,
        head=6 * head_parameters(shape),
    )


def run_flops(
    arm: Arm, shape: Shape, schedule: StageSchedule, steps: int, batch_tokens: int, *, stop: int | None = None
) -> Flops:
    """FLOPs of a run, or of its first `stop` steps, by whole steps of each stage.

    For random pass counts it is the mean over the draws.
    """
    stop = steps if stop is None else stop
    starts = [*(min(start, stop) for start in stage_starts(schedule, steps)), stop]
    total = Flops(0, 0, 0)
    for stage, start, end in zip(schedule.stages, starts, starts[1:], strict=False):
        tokens, network = (end - start) * batch_tokens, arm.at(stage, shape)
        for passes in stage.passes:
            fraction = tokens if len(stage.passes) == 1 else tokens / len(stage.passes)
            total += flops_per_token(*network, passes) * fraction
    return total


def mean_flops_per_token(arm: Arm, shape: Shape, schedule: StageSchedule) -> Flops:
    """Expected FLOPs of one token over a schedule whose starts are all known."""
    total = Flops(0.0, 0.0, 0.0)
    for fraction, stage in stage_fractions(schedule):
        network = arm.at(stage, shape)
        for count in stage.passes:
            total += flops_per_token(*network, count) * (fraction / len(stage.passes))
    return total


def relative_costs(arm: Arm, shape: Shape, schedule: StageSchedule) -> tuple[float, float]:
    """Compute-active parameters over those without growth: of the first stage, and after growth on average.

    The average is over equal parts of the tokens after growth, the stages whose starts the recipe decides.
    """
    without = compute_active_parameters(arm, shape, schedule.initial)
    first, *later = (
        compute_active_parameters(*arm.at(stage, shape), stage.median_passes) / without
        for stage in schedule.stages
    )
    return first, sum(later) / len(later) if later else first


def stage_fractions(schedule: StageSchedule) -> list[tuple[float, Stage]]:
    """Fraction of the tokens in each stage."""
    starts = [stage.start for stage in schedule.stages]
    if any(start is None for start in starts):
        raise UsageError(
            "this schedule leaves the start of a stage to the recipe: resolve it with a rho first."
        )
    known = [start or 0.0 for start in starts]
    ends = [*known[1:], 1.0]
    return [(end - start, stage) for start, end, stage in zip(known, ends, schedule.stages, strict=True)]


def stage_starts(schedule: StageSchedule, steps: int) -> tuple[int, ...]:
    """First step of each stage in a run of `steps` steps: ⌊start·steps⌋ in doubles, as the authors do."""
    stage_fractions(schedule)  # raises UsageError if a start is left to the recipe
    return tuple(math.floor((stage.start or 0.0) * steps) for stage in schedule.stages)
