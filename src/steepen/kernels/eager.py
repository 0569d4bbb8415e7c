"""The kernels' plain twins: what each computes, in torch's own operations, in any precision."""

# The multi-tensor operators carry an underscore in torch, and are what its own optimizers are made of.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import torch
from torch import Tensor


def gram(x: Tensor, out: Tensor | None = None) -> Tensor:
    """x @ x.mT for each matrix of a (count, m, n) stack; sums in fp32, result in x's precision."""
    return torch.bmm(x, x.mT, out=out)


def symmetric_polynomial(
    gram: Tensor, b: float, c: float, *, a: float = 0.0, out: Tensor | None = None
) -> Tensor:
    """a·I + b·G + c·G @ G for each symmetric matrix G of a (count, m, m) stack, in G's precision."""
    result = torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=out)
    if a:
        result.diagonal(dim1=-2, dim2=-1).add_(a)
    return result


def momentum_into(
    out: list[Tensor], gradients: list[Tensor], momenta: list[Tensor], beta: float, nesterov: bool
) -> None:
    """Let each momentum follow its gradient, and write where it points (Nesterov's way or not) into `out`."""
    torch._foreach_lerp_(momenta, gradients, 1 - beta)
    directions = torch._foreach_lerp(gradients, momenta, beta) if nesterov else momenta
    torch._foreach_copy_(out, directions)


def decay_and_add(
    parameters: list[Tensor],
    updates: list[Tensor],
    lr: float | Tensor,
    scales: list[float],
    weight_decay: float,
) -> None:
    """p ← (1 − lr·wd)·p − lr·scale·update for each parameter, in its own precision."""
    steps = [u.to(p.dtype) * (lr * -scale) for p, u, scale in zip(parameters, updates, scales, strict=True)]
    torch._foreach_mul_(parameters, 1 - lr * weight_decay)
    torch._foreach_add_(parameters, steps)
