"""A block that derives from nothing: `steepen study ladder --arms vanilla,one_head:OneHead` here."""

import dataclasses
from typing import ClassVar

import torch
from torch import nn

from steepen.model.arms import find_arm
from steepen.model.block import attend, linear, rms_norm, rotate


class OneHead(nn.Module):
    """Attention with one head of keys, which are the values too, and no MLP."""

    constant_init: ClassVar = {"out": 0.0}

    def __init__(self, shape, multipliers, options):
        super().__init__()
        self.eps, self.heads, self.residual = options.norm_eps, shape.heads, multipliers.residual
        self.query = nn.Parameter(torch.empty(shape.width, shape.width))
        self.key = nn.Parameter(torch.empty(shape.head_dim, shape.width))
        self.out = nn.Parameter(torch.empty(shape.width, shape.width))

    def attention_flops(self, shape, context):
        """FLOPs per token of the attention itself."""
        return 6 * shape.width * (context + 1)

    def forward(self, x, rotary, mask=None):
        """Hidden states (batch, time, width) → the same shape."""
        normed = rms_norm(x, self.eps).to(rotary.dtype)
        query = rotate(linear(normed, self.query).unflatten(-1, (self.heads, -1)), rotary).transpose(1, 2)
        key = rotate(linear(normed, self.key).unsqueeze(-2), rotary).transpose(1, 2)
        attended = attend(query, key, key, mask, key.shape[-1] ** -0.5)
        return x + self.residual * linear(attended.transpose(1, 2).flatten(-2), self.out)


ONE_HEAD = dataclasses.replace(find_arm("vanilla"), name="one-head", title="One head", block=OneHead)
