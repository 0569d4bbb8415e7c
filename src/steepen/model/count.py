"""Parameters and FLOPs counted from modules: for custom blocks, and to verify `recipe.flops`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from steepen.model.arm import Arm
from steepen.model.block_variant import make_block
from steepen.model.config import ModelOptions, Multipliers
from steepen.model.network import Network
from steepen.model.shape import Shape


@dataclass(frozen=True)
class ModuleCount:
    """Parameters of a network, and FLOPs per token."""

    stored: int
    compute_active: int
    matmul_flops: int  # per token, forward and backward, blocks only
    attention_flops: int
    head_flops: int


def active_matrices(block: nn.Module) -> int:
    """Parameters of the matrices that a token is multiplied by: all, unless the block says otherwise."""
    own = getattr(block, "active_parameters", None)
    return sum(p.numel() for p in block.parameters() if p.ndim >= 2) if own is None else own()


def count_block(arm: Arm, shape: Shape) -> tuple[int, int, int]:
    """Stored parameters of an arm's block, those of active matrices, and attention FLOPs per token."""
    with torch.device("meta"):
        block = make_block(arm, shape, Multipliers(), ModelOptions())
    stored = sum(p.numel() for p in block.parameters())
    return stored, active_matrices(block), block.attention_flops(shape, shape.context)


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
