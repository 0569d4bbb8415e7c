"""Estimates for one run on several GPUs: what each holds, what a step communicates, and how long that takes.

`--shard optimizer` (ZeRO-1) keeps compute weights and accumulated gradients on every GPU; `--shard full`
(FSDP2) gathers the weights of a block when they are needed. Transfers are modelled from bytes and the
bandwidths below; the time of a rank's optimizer and copies is measured (`recipe.rank_work`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from steepen.distributed.owners import (
    ROW_SHARDED,
    assign_owners,
    orthogonalization_cost,
    owned_by,
)
from steepen.model.arm import Arm
from steepen.model.shape import Shape
from steepen.optim.config import STATE_BYTES
from steepen.recipe.rank_work import PEAK_FLOPS, rank_seconds
from steepen.recipe.recipe import PlannedRun

Shard = Literal["optimizer", "full"]
SHARDS: tuple[Shard, ...] = ("optimizer", "full")

GPUS_PER_NODE = 8
# Bytes per second and direction of one GPU that a large collective reaches: 80% of NVLink's 450 GB/s, and of
# one 400 Gb/s adapter per GPU between nodes.
NVLINK, NETWORK = 0.8 * 450e9, 0.8 * 50e9


def parameter_shapes(arm: Arm, shape: Shape, passes: int) -> dict[str, tuple[int, ...]]:
    """Shapes of all parameters of a network with fused blocks, by name, in the order of its modules."""
    width, hidden = shape.width, shape.mlp_width
    heads = arm.block_options.kv_heads
    block: dict[str, tuple[int, ...]] = {"qkv": (3, width, width)} if heads is None else {}
    block["out"] = (width, width)
    if heads is not None:
        block |= {"query": (width, width), "key_value": (2, heads * shape.head_dim, width)}
    block |= {"gate_up": (2, hidden, width), "down": (width, hidden)}
    table, paths = (shape.vocabulary, width), arm.block_paths(shape.allocation, passes)
    blocks = {f"{path}.{name}": size for path in paths for name, size in block.items()}
    return {"embedding": table, "head": table, **blocks}


def _busiest_owner(planned: PlannedRun, gpus: int) -> tuple[float, float]:
    """Parameters of the rank that owns most at the end of the run; an equal share for other blocks.

    Those of block matrices, and of rows of embedding and head.
    """
    shape = planned.shape
    tables = 2.0 * shape.vocabulary * shape.width
    if not planned.arm.fused_block:
        return (planned.stored_parameters - tables) / gpus, tables / gpus
    pieces = assign_owners(parameter_shapes(planned.arm, shape, planned.schedule.max_passes), gpus)
    each: list[tuple[float, float]] = []
    for mine in (owned_by(pieces, rank).values() for rank in range(gpus)):
        rows = sum(piece.elements for piece in mine if piece.name in ROW_SHARDED)
        each.append((float(sum(piece.elements for piece in mine) - rows), float(rows)))
    return max(each, key=sum)


def _largest_cost(planned: PlannedRun, gpus: int) -> float:
    """Cost of orthogonalizing the matrices of the rank that has most of it; not known of other blocks."""
    if not planned.arm.fused_block:
        return 0.0
    costs = [0.0] * gpus
    shapes = parameter_shapes(planned.arm, planned.shape, planned.schedule.max_passes)
    for piece in assign_owners(shapes, gpus):
        if piece.name not in ROW_SHARDED:
            costs[piece.owner] += orthogonalization_cost(piece.shape)
    return max(costs)


@dataclass(frozen=True)
class StateMemory:
    """Bytes on one GPU that do not depend on the micro-batch."""

    state: float  # fp32 weights, gradients, optimizer state
    compute_weights: float


def state_memory(planned: PlannedRun, gpus: int, shard: Shard, matrix_state_bytes: int) -> StateMemory:
    """Weights, gradients and optimizer state of the busiest rank.

    ZeRO-1: fp32 gradients and bf16 compute weights of everything (the embedding is computed from fp32),
    fp32 weights and state of what the rank owns. FSDP2: fp32 weights and gradients divided by the ranks,
    fp32 copies and state of the matrices it owns, and the most that is whole at a time: in the backward of
    a block (in bf16 embedding, head, a tied core, their gradients so far, two blocks and a block's gradient,
    also in fp32), or at its end, when the gradients of embedding, head and core are in bf16 and fp32.
    """
    table = float(planned.shape.vocabulary * planned.shape.width)
    blocks = planned.stored_parameters - 2 * table
    adam, (own_matrices, own_rows) = STATE_BYTES["adamw"], _busiest_owner(planned, gpus)
    matrices = (4 + matrix_state_bytes) * own_matrices
    if shard == "optimizer":
        # The fp32 rows of the embedding are those of the table that every rank has.
        rows = adam * own_rows + 4 * own_rows / 2
        return StateMemory(4 * (blocks + 2 * table) + matrices + rows, 2 * (blocks + table) + 4 * table)
    block, repeated = _block(planned), _repeated(planned)
    shards = (8 * blocks + (8 + adam) * 2 * table) / gpus
    in_a_block = 6 * table + 4 * repeated + 10 * block
    return StateMemory(shards + matrices, max(in_a_block, 6 * (2 * table + repeated)))


def _block(planned: PlannedRun) -> float:
    """Parameters of one block."""
    blocks = planned.stored_parameters - 2.0 * planned.shape.vocabulary * planned.shape.width
    return blocks / max(1, planned.arm.stored_blocks(planned.shape.allocation, planned.schedule.max_passes))


def _repeated(planned: PlannedRun) -> float:
    """Parameters of a tied core that is applied several times: FSDP2 gathers it once per micro-batch."""
    tied = planned.arm.tied and planned.schedule.max_passes > 1
    return _block(planned) * planned.shape.allocation.core if tied else 0.0


@dataclass(frozen=True)
class Communication:
    """Bytes that each GPU sends in one step, and what becomes of the speed.

    `rank_seconds` are those of the busiest rank's optimizer and copies, from a measurement; `seconds` and
    `exposed_seconds` are a model. `efficiency` is the part of a step that is forward and backward.
    """

    gradient_bytes: float
    weight_bytes: float
    seconds: float  # of all of it
    exposed_seconds: float  # that no computation hides
    rank_seconds: float
    efficiency: float

    def to_dict(self) -> dict[str, float]:
        """As JSON values."""
        return {
            "gradient_gib": self.gradient_bytes / 2**30,
            "weight_gib": self.weight_bytes / 2**30,
            "seconds": self.seconds,
            "exposed_seconds": self.exposed_seconds,
            "rank_seconds": self.rank_seconds,
            "efficiency": self.efficiency,
        }


def communication(
    planned: PlannedRun,
    gpus: int,
    shard: Shard,
    *,
    micro_batch: int,
    step_seconds: float,
    peak_flops: float = PEAK_FLOPS,
) -> Communication:
    """Communication of one step at the end of the run; `step_seconds` is its forward and backward.

    ZeRO-1 reduces fp32 gradients once per step, hidden behind the last micro-batch's backward (two thirds
    of its time), all but those that the backward ends with, and broadcasts compute weights after the step,
    hidden behind the next forward, all but those that it begins with: of the embedding and a block. FSDP2
    gathers the weights of a block in bf16 for every application, forward and backward, and reduces
    gradients in fp32, for every micro-batch; the next block's transfer is hidden behind a block's
    computation. Owners then gather gradients and scatter fp32 weights.
    """
    table = float(planned.shape.vocabulary * planned.shape.width)
    blocks = planned.stored_parameters - 2 * table
    rate = NVLINK if gpus <= GPUS_PER_NODE else NETWORK
    rows = max(1, planned.batch_tokens // planned.shape.context // gpus)
    micro_batches = -(-rows // micro_batch)
    others = (gpus - 1) / gpus
    if shard == "optimizer":
        gradients, weights = 4 * (blocks + 2 * table), 2 * (blocks + table) + 4 * table
        if gpus == 1:
            gradients = weights = 0.0
        backward, forward = 2 / 3 * step_seconds / micro_batches, 1 / 3 * step_seconds / micro_batches
        alone = gpus > 1  # what is ready last, and what is used first
        last, first = alone * 4 * (table + _block(planned)), alone * (4 * table + 2 * _block(planned))
        exposed = max(last / rate, gradients / rate - backward) + max(first / rate, weights / rate - forward)
    else:
        once = _repeated(planned) + 2 * table  # gathered for forward and backward together
        gradients = others * (4 * micro_batches * (blocks + 2 * table) + 4 * blocks / gpus)
        weights = others * (2 * micro_batches * (2 * (blocks + 2 * table) - once) + 4 * blocks / gpus)
        exposed = max(0.0, (gradients + weights) / rate - 0.9 * step_seconds)
    seconds = (gradients + weights) / rate
    own = rank_seconds(planned.stored_parameters, _largest_cost(planned, gpus), peak_flops)
    efficiency = step_seconds / (step_seconds + own + exposed)
    return Communication(gradients, weights, seconds, exposed, own, efficiency)
