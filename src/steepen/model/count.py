"""Parameters and FLOPs of custom blocks, counted from their modules."""

from __future__ import annotations

import torch
from torch import nn

from steepen.model.arm import Arm
from steepen.model.block_variant import make_block
from steepen.model.config import ModelOptions, Multipliers
from steepen.model.shape import Shape


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
