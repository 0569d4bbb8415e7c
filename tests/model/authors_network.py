"""The network of the paper's authors as one plain function in fp64, from a description of their code.

It shares nothing with the package: it takes arrays of weights and numbers, and no arm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NORM_EPS = 1.1920928955078125e-07  # machine epsilon of fp32
ROPE_BASE = 10_000


@dataclass(frozen=True)
class Block:
    """Seven matrices, each (out, in)."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Operator:
    """What follows a core pass: x ← Norm(x), then x ← x + alpha·e; the last injection may be left out."""

    alpha: float
    norm: bool = True
    inject: bool = True
    inject_before_coda: bool = True


def norm(x: Tensor) -> Tensor:
    """RMSNorm without gain."""
    return x * ((x**2).sum(-1, keepdim=True) / x.shape[-1] + NORM_EPS) ** -0.5


def rope(x: Tensor) -> Tensor:
    """Rotate (batch, heads, time, head_dim) by position: component i with component i + head_dim/2.

    The sign is the opposite of the usual one: the same network with the second half of every query and key
    negated, and those are drawn from a symmetric distribution.
    """
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2]).double()[:, None] / ROPE_BASE ** (torch.arange(half).double() / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angle.cos() + b * angle.sin(), b * angle.cos() - a * angle.sin()), -1)


def block(x: Tensor, weights: Block, heads: int, residual: float) -> Tensor:
    """Attention branch, then MLP branch, each times the residual multiplier."""
    batch, time, width = x.shape

    def split(y: Tensor) -> Tensor:
        return y.view(batch, time, heads, width // heads).transpose(1, 2)

    n = norm(x)
    q, k, v = (split(n @ matrix.T) for matrix in (weights.q, weights.k, weights.v))
    q, k = norm(rope(q)), norm(rope(k))
    scores = q @ k.mT / (width // heads) ** 0.5
    scores = scores + torch.full((time, time), float("-inf"), dtype=x.dtype).triu(1)
    attended = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, time, width)
    x = x + residual * (attended @ weights.o.T)
    n = norm(x)
    gate = n @ weights.gate.T
    return x + residual * ((gate * torch.sigmoid(gate) * (n @ weights.up.T)) @ weights.down.T)


def logits(
    tokens: Tensor,
    embedding: Tensor,
    prelude: Sequence[Block],
    cores: Sequence[Sequence[Block]],  # one per pass; a tied core is given once per pass
    coda: Sequence[Block],
    head: Tensor,
    *,
    heads: int,
    residual: float,
    output: float,
    operator: Operator | None,
    real_vocabulary: int,
    norm_prelude: bool = False,
    backprop_passes: int | None = None,
) -> Tensor:
    """Logits (batch, time, real vocabulary)."""
    x = norm(embedding[tokens])
    for weights in prelude:
        x = block(x, weights, heads, residual)
    e = x = norm(x) if norm_prelude else x
    for index, core in enumerate(cores):
        if backprop_passes is not None and index == len(cores) - backprop_passes:
            # The state is cut, not e: the prelude learns from the injections of the passes that are left.
            before = operator.alpha * e if operator is not None and operator.inject and index else 0
            x = (x - before).detach() + before
        for weights in core:
            x = block(x, weights, heads, residual)
        if operator is not None:
            last = index == len(cores) - 1
            x = norm(x) if operator.norm else x
            if operator.inject and (operator.inject_before_coda or not last):
                x = x + operator.alpha * e
    for weights in coda:
        x = block(x, weights, heads, residual)
    return output * (norm(x) @ head.T)[..., :real_vocabulary]


def loss(found: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats."""
    right = found.gather(-1, targets[..., None])[..., 0]
    return (found.logsumexp(-1) - right).mean()
