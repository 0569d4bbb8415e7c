"""Parameters and FLOPs in closed form, by every convention (Appendix "TPP Relations…").

FLOPs per token = 6·(block matrices once per application + lm_head) + 6·L_exec·w·context. The input embedding
costs nothing; attention is causal, so half the square is counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from steepen.errors import UsageError
from steepen.model.arm import Arm, PassSchedule
from steepen.model.shape import Shape


@dataclass(frozen=True)
class Flops:
    """FLOPs by term; of one token, or of a whole run."""

    matmul: float  # block matrices
    attention: float
    head: float

    @property
    def total(self) -> float:
        """All terms together."""
        return self.matmul + self.attention + self.head

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.matmul + other.matmul, self.attention + other.attention, self.head + other.head)

    def __mul__(self, factor: float) -> Flops:
        return Flops(self.matmul * factor, self.attention * factor, self.head * factor)

    def to_dict(self) -> dict[str, float]:
        """The terms and their total."""
        return {"matmul": self.matmul, "attention": self.attention, "head": self.head, "total": self.total}


@dataclass(frozen=True)
class BlockCost:
    """What one block stores, and what it costs a token."""

    stored: int
    matrices: int  # parameters that multiply every token
    attention_flops: int  # per token at the shape's context, forward and backward


def block_cost(arm: Arm, shape: Shape) -> BlockCost:
    """One block of an arm: in closed form, or counted from the module where the block is the user's own."""
    if arm.block == "transformer":
        # Q, K, V, O and the three SwiGLU matrices
        parameters = 4 * shape.width**2 + 3 * shape.width * shape.mlp_width
        return BlockCost(parameters, parameters, 6 * shape.width * shape.context)
    from steepen.model.count import count_block

    return BlockCost(*count_block(arm.block, shape))


def head_parameters(shape: Shape) -> int:
    """lm_head (and, apart from it, the input embedding: they are separate)."""
    return shape.vocabulary * shape.width


def stored_parameters(arm: Arm, shape: Shape, passes: int) -> int:
    """N_s: everything a checkpoint at this many passes holds, both embeddings included. Sets TPP."""
    return block_cost(arm, shape).stored * arm.stored_blocks(shape.allocation, passes) + 2 * head_parameters(
        shape
    )


def compute_active_parameters(arm: Arm, shape: Shape, passes: int) -> int:
    """N_c: matrices once per application, the head once, no input embedding. Sets cost."""
    return block_cost(arm, shape).matrices * shape.allocation.executed(passes) + head_parameters(shape)


def flops_per_token(arm: Arm, shape: Shape, passes: int) -> Flops:
    """Training FLOPs of one token, forward and backward, at this many passes."""
    executed = shape.allocation.executed(passes)
    block = block_cost(arm, shape)
    return Flops(
        matmul=6 * block.matrices * executed,
        attention=block.attention_flops * executed,
        head=6 * head_parameters(shape),
    )


def mean_flops_per_token(arm: Arm, shape: Shape, schedule: PassSchedule) -> Flops:
    """Expected FLOPs of one token over a schedule whose starts are all known."""
    total = Flops(0.0, 0.0, 0.0)
    for share, passes in stage_fractions(schedule):
        for count in passes:
            total += flops_per_token(arm, shape, count) * (share / len(passes))
    return total


def stage_fractions(schedule: PassSchedule) -> list[tuple[float, tuple[int, ...]]]:
    """Each stage's share of the tokens, with the counts it draws from."""
    starts = [stage.start for stage in schedule.stages]
    if any(start is None for start in starts):
        raise UsageError("this pass schedule leaves its change to a recipe: resolve it with a rho first.")
    known = [start or 0.0 for start in starts]
    ends = [*known[1:], 1.0]
    return [
        (end - start, stage.passes) for start, end, stage in zip(known, ends, schedule.stages, strict=True)
    ]


def stage_starts(schedule: PassSchedule, steps: int) -> tuple[int, ...]:
    """The step at which each stage begins in a run of so many steps."""
    stage_fractions(schedule)  # refuses a schedule with an open start
    return tuple(round((stage.start or 0.0) * steps) for stage in schedule.stages)


def expansion(arm: Arm, shape: Shape, passes: int) -> float:
    """E_K = N_c,K / N_c,1."""
    return compute_active_parameters(arm, shape, passes) / compute_active_parameters(arm, shape, 1)


def stored_expansion(arm: Arm, shape: Shape, passes: int) -> float:
    """S_K = N_s,K / N_s,1."""
    return stored_parameters(arm, shape, passes) / stored_parameters(arm, shape, 1)
