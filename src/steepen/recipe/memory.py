"""The memory that a training run needs on one GPU, and the size of its checkpoint."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from steepen.model.arm import Arm
from steepen.model.config import ModelOptions
from steepen.model.shape import Shape
from steepen.optim.config import STATE_BYTES, OptimizerConfig
from steepen.recipe.accelerators import Accelerator
from steepen.recipe.flops import stored_parameters
from steepen.recipe.recipe import PlannedRun
from steepen.recipe.sharding import Shard, StateMemory, state_memory

# What a block saves under torch.compile, relative to the fused kernels. With it and 4 bytes per logit the
# estimates are 8% and 4% above what compiled models of d8 and d12 took on an H200 (docs/performance.md).
COMPILED_ACTIVATIONS = 1.5


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU while training, by what they hold; activations are an estimate."""

    state: float  # fp32 weights, gradients and optimizer state
    compute_weights: float  # bf16 copies
    activations: float
    logits: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.state + self.compute_weights + self.activations + self.logits

    def to_dict(self) -> dict[str, float]:
        """In GiB, by part."""
        parts = {name: getattr(self, name) for name in ("state", "compute_weights", "activations", "logits")}
        return {name: value / 2**30 for name, value in {**parts, "total": self.total}.items()}


def training_memory(
    planned: PlannedRun,
    gpus: int,
    micro_batch: int,
    *,
    shard: Shard | None = None,
    optimizer: OptimizerConfig | None = None,
    options: ModelOptions | None = None,
    recompute: bool = False,
    fp8: bool = False,
) -> Memory:
    """Estimate the memory per GPU at the end of the run, when a growing network is largest.

    On one GPU weight and gradient are 8 bytes per parameter; the optimizer of the block matrices adds 4
    (Muon, the default) or 8, AdamW on embedding and head 8. On several, `shard` says what is divided among
    them (`recipe.sharding.state_memory`); by default the optimizer.

    Activations are what the fused kernels save in bf16 (`saved_by_block`) per token and executed block. Of
    the residual stream (bf16 or fp32) 4 widths exist outside the blocks, and one is saved by each boundary
    operator that normalizes and injects. Add 0.5 GiB for a chunk of logits and 0.125 GiB for library
    workspaces. Custom blocks and `--shard full`, which the fused kernels do not run, save about half as much
    again per block; `--shard full` also keeps all logits of a micro-batch, and their gradient, in bf16.
    Measured peaks: docs/performance.md.

    `fp8` adds a byte per logit of a micro-batch, and 2 per weight of a GEMM, for the weight and its
    transpose; its copies of activations are not counted, and `plan` counts bf16.

    With `recompute` every executed block keeps its input, one width of the residual stream, and one block
    at a time all that it saves.
    """
    shape, passes = planned.shape, planned.schedule.max_passes
    embedding_and_head = 2 * shape.vocabulary * shape.width
    blocks = planned.stored_parameters - embedding_and_head
    matrix_bytes = (optimizer or OptimizerConfig()).state_bytes
    tokens, executed = micro_batch * shape.context, shape.allocation.executed(passes)
    operators = (passes - 1) * (planned.arm.core_boundary == "norm+inject")
    operators += planned.arm.coda_boundary == "norm+inject"
    stream_bytes = 4 if (options or ModelOptions()).residual_stream == "fp32" else 2
    stream_bytes *= planned.arm.block_options.streams or 1
    held = StateMemory(
        state=(8 + matrix_bytes) * blocks + (8 + STATE_BYTES["adamw"]) * embedding_and_head,
        compute_weights=2 * (blocks + embedding_and_head),
    )
    if gpus > 1:
        held = state_memory(planned, gpus, shard or "optimizer", matrix_bytes)
    fp8_weights = 2 * (blocks + embedding_and_head / 2) if fp8 else 0.0
    full = gpus > 1 and shard == "full"
    fused_blocks = planned.arm.fused_block and not full
    of_block = 2.0 * saved_by_block(planned.arm, shape, fused=fused_blocks)
    of_block *= 1 if fused_blocks else COMPILED_ACTIVATIONS
    of_blocks = executed * stream_bytes * shape.width + of_block if recompute else executed * of_block
    logits = 4.0 * tokens * shape.vocabulary if full else min(2.0 * tokens * shape.vocabulary, 2**29)
    logits += tokens * shape.vocabulary if fp8 else 0
    return Memory(
        state=held.state,
        compute_weights=held.compute_weights + fp8_weights,
        activations=tokens * (of_blocks + stream_bytes * (4 + operators) * shape.width),
        logits=logits + 2**27,
    )


def saved_by_block(arm: Arm, shape: Shape, *, fused: bool) -> float:
    """Values per token that a block of an arm saves for its backward.

    Two normed inputs, the queries and the attention output are a width each; keys and values have their
    heads, the MLP its input to the activation and, in the fused kernels, its output. Experts also keep their
    inputs and outputs, once per expert that a token uses; hyper-connections the copies of the residual
    stream, in fp32, and what is read of them.
    """
    options, width = arm.block_options, shape.width
    saved = 4 * width + 2 * options.heads(shape) * shape.head_dim
    used = 1 if options.experts is None else options.active_experts + options.shared_experts
    hidden = used * options.mlp_width(shape)
    saved += ((2 if options.activation == "swiglu" else 1) + fused) * hidden
    if options.experts is not None:
        saved += 2 * options.active_experts * width
    if options.streams is not None:
        saved += 2 * (1 if options.parallel else 2) * (options.streams + 1) * width
    return saved


def automatic_micro_batch(rows: int, context: int, limit: int | None = None, *, gpu: bool = True) -> int:
    """The micro-batch (sequences) that training starts from where none is given; at least 1.

    The largest divisor of the rows of a device, so that all micro-batches are equal, within `limit` and
    within the tokens that keep a GPU busy, or that the caches of a CPU hold.
    """
    tokens = 65_536 if gpu else 8_192
    most = min(rows, max(1, tokens // context), rows if limit is None else max(1, limit))
    return max(divisor for divisor in range(1, most + 1) if rows % divisor == 0)


def checkpoint_bytes(arm: Arm, shape: Shape, passes: int, optimizer: OptimizerConfig | None = None) -> int:
    """Bytes of a checkpoint: fp32 weights and optimizer state at the largest number of passes."""
    embedding_and_head = 2 * shape.vocabulary * shape.width
    blocks = stored_parameters(arm, shape, passes) - embedding_and_head
    matrix_bytes = (optimizer or OptimizerConfig()).state_bytes
    return (4 + matrix_bytes) * blocks + (4 + STATE_BYTES["adamw"]) * embedding_and_head


def largest_micro_batch(
    planned: PlannedRun,
    gpus: int,
    gpu: Accelerator,
    *,
    shard: Shard | None = None,
    optimizer: OptimizerConfig | None = None,
    options: ModelOptions | None = None,
    recompute: bool = False,
) -> int:
    """Largest micro-batch (sequences) that leaves a tenth of the memory free by this estimate; 0 if none.

    At most the sequences that a GPU has in a step.
    """
    available = 0.9 * gpu.memory_gib * 2**30

    def needed(micro_batch: int) -> float:
        return training_memory(
            planned, gpus, micro_batch, shard=shard, optimizer=optimizer, options=options, recompute=recompute
        ).total

    rows = planned.batch_tokens // planned.shape.context // gpus
    return max(0, bisect.bisect_right(range(rows + 1), available, key=needed) - 1)
