"""Parameters and FLOPs of a network, counted from its modules to verify `recipe.flops`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from steepen.model.block_variant import active_matrices
from steepen.model.network import Network


@dataclass(frozen=True)
class ModuleCount:
    """Parameters of a network, and FLOPs per token."""

    stored: int
    compute_active: int
    matmul_flops: int  # per token, forward and backward, blocks only
    attention_flops: int
    head_flops: int


def count(network: Network, passes: int | None = None) -> ModuleCount:
    """Count a network (on any device, meta included) at a number of core passes."""
    passes = network.passes if passes is None else passes
    applied: list[Any] = [*network.prelude, *network.coda]
    for core in network.applied_cores(passes):
        applied.extend(core)
    matrices, shape = sum(map(active_matrices, applied)), network.shape
    return ModuleCount(
        stored=sum(p.numel() for p in network.parameters()),
        compute_active=matrices + network.head.numel(),
        matmul_flops=6 * matrices,
        attention_flops=sum(block.attention_flops(shape, shape.context) for block in applied),
        head_flops=6 * network.head.numel(),
    )
