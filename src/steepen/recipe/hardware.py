"""Accelerators by name, and what a run needs of them: memory, hours, money."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from steepen.errors import UsageError, nearest
from steepen.model.shape import KEEP_ACTIVATION_MAX_WIDTH
from steepen.recipe.recipe import Rung


@dataclass(frozen=True)
class Accelerator:
    """Dense bf16 peak and memory, from the vendor's data sheet."""

    name: str
    peak_flops: float
    memory_gib: float


ACCELERATORS = {
    gpu.name: gpu
    for gpu in (
        Accelerator("a100", 312e12, 74.5),  # the 80 GB part
        Accelerator("h100", 989.4e12, 74.5),
        Accelerator("h200", 989.4e12, 131.3),
        Accelerator("b200", 2250e12, 167.6),
        Accelerator("gh200", 989.4e12, 89.4),
        Accelerator("l40s", 362e12, 44.7),
        Accelerator("rtx4090", 165.2e12, 22.4),
        Accelerator("mi300x", 1307.4e12, 178.8),
    )
}


def find_accelerator(name: str) -> Accelerator:
    """An accelerator by name."""
    key = name.strip().lower().replace(" ", "").replace("-", "")
    if key not in ACCELERATORS:
        raise UsageError(f"there is no accelerator {name!r}; known are {nearest(key, ACCELERATORS, 4)}.")
    return ACCELERATORS[key]


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


def training_memory(rung: Rung, gpus: int, micro_batch: int, *, sharded: bool) -> Memory:
    """Memory per GPU at the end of the run, when a growing network is largest.

    Muon keeps one fp32 number per block weight beside weight and gradient (12 bytes), AdamW two per embedding
    and head weight (16 bytes). Sharding divides these by the GPUs; two gathered blocks in bf16 remain.
    Activations are what the fast path keeps in bf16: 6 widths and 2 hidden widths (in small networks 3) per
    token and executed block, 4 widths at the ends; half a gibibyte of logits at a time, and an eighth for
    libraries' workspaces. A block of your own keeps about twice as much. Peaks: docs/performance.md.
    """
    shape, passes = rung.shape, rung.schedule.max_passes
    ends = 2 * shape.vocabulary * shape.width
    blocks = rung.stored_parameters - ends
    share = gpus if sharded else 1
    block = blocks / max(1, rung.arm.stored_blocks(shape.allocation, passes))
    tokens, executed = micro_batch * shape.context, shape.allocation.executed(passes)
    kept = 6 * shape.width + (3 if shape.mlp_width <= KEEP_ACTIVATION_MAX_WIDTH else 2) * shape.mlp_width
    return Memory(
        state=(12 * blocks + 16 * ends) / share,
        compute_weights=2 * (2 * block + ends) if sharded else 2 * (blocks + ends),
        activations=2.0 * tokens * (executed * kept + 4 * shape.width),
        logits=min(2.0 * tokens * shape.vocabulary, 2**29) + 2**27,
    )


def largest_micro_batch(rung: Rung, gpus: int, gpu: Accelerator, *, sharded: bool) -> int:
    """The most sequences at a time that fit by this estimate, a tenth of the memory spared; 0 if none."""
    room = 0.9 * gpu.memory_gib * 2**30

    def needed(micro_batch: int) -> float:
        return training_memory(rung, gpus, micro_batch, sharded=sharded).total

    return max(0, bisect.bisect_right(range(2**20), room, key=needed) - 1)
