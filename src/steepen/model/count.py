"""Parameters and FLOPs counted from modules: for custom blocks, and to verify `recipe.flops`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from steepen.model.block import find_block
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


def count_block(block: str, shape: Shape) -> tuple[int, int, int]:
    """A block's stored parameters, matrix parameters, and attention FLOPs per token."""
    kind = find_block(block)
    with torch.device("meta"):
        parameters = list(kind(shape, Multipliers(), ModelOptions()).parameters())
    matrices = sum(p.numel() for p in parameters if p.ndim >= 2)
    return sum(p.numel() for p in parameters), matrices, kind.attention_flops(shape, shape.context)


def count(network: Network, passes: int | None = None) -> ModuleCount:
    """Count a network (on any device, meta included) at a number of core passes."""
    passes = network.passes if passes is None else passes
    applied: list[nn.Module] = [*network.prelude, *network.coda]
    for core in network.applied_cores(passes):
        applied.extend(core)
    matrices = sum(p.numel() for block in applied for p in block.parameters() if p.ndim >= 2)
    shape = network.shape
    return ModuleCount(
        stored=sum(p.numel() for p in network.parameters()),
        compute_active=matrices + network.head.numel(),
        matmul_flops=6 * matrices,
        attention_flops=len(applied) * find_block(network.arm.block).attention_flops(shape, shape.context),
        head_flops=6 * network.head.numel(),
    )
