"""The kernels' plain twins: what each computes, in torch's own operations, in any precision."""

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
