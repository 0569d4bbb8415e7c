"""Products with a weight on the fast path: forward, to the input, to the weight."""

# The multi-tensor operators carry an underscore in torch, and are what its own optimizers are made of.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import torch
from torch import Tensor, nn

from steepen.kernels.cublaslt_gemm import multiply, multiply_and_add


class FusedLinear:
    """A matrix (or a stack of matrices, side by side) times a fixed factor, in the compute precision.

    `head` says that logits come out.
    """

    def __init__(
        self, parameter: nn.Parameter, factor: float, dtype: torch.dtype, *, head: bool = False
    ) -> None:
        self.parameter, self.factor, self.head = parameter, factor, head
        self.rows = parameter.numel() // parameter.shape[-1]
        self.weight = torch.empty(
            self.rows, parameter.shape[-1], dtype=dtype, device=parameter.device
        )  # filled by `rounded`

    def __call__(self, x: Tensor) -> Tensor:
        """x times the transposed matrix."""
        return multiply(x, self.weight.t())

    def add_to_(self, total: Tensor, x: Tensor) -> Tensor:
        """Add x times the transposed matrix to `total`, rounding once."""
        return multiply(x, self.weight.t(), onto=total)

    def plus(self, total: Tensor, x: Tensor) -> Tensor | None:
        """Total and x times the transposed matrix, rounded once; None where that takes a pass of its own."""
        return multiply_and_add(x, self.weight.t(), total)

    def dgrad(self, d: Tensor) -> Tensor:
        """The gradient of x."""
        return multiply(d, self.weight)

    def wgrad(self, d: Tensor, x: Tensor) -> None:
        """Add the weight's gradient to the parameter's, summing in fp32 throughout; the first is written."""
        parameter, kept = self.parameter, 1.0
        if parameter.grad is None:
            parameter.grad, kept = torch.empty_like(parameter), 0.0
        accumulate_(parameter.grad.view(self.rows, -1), d.t(), x, self.factor, kept)

    def backward(self, d: Tensor, x: Tensor) -> Tensor:
        """Both: returns the gradient of x, adds that of the weight."""
        self.wgrad(d, x)
        return self.dgrad(d)


def accumulate_(total: Tensor, a: Tensor, b: Tensor, factor: float, kept: float = 1.0) -> None:
    """total ← kept·total + factor·(a @ b), summed in total's precision whatever that of a and b.

    With `kept` at 0 it does not matter what the total was, not even if that was no number.
    """
    if total.dtype == a.dtype:
        total.addmm_(a, b, beta=kept, alpha=factor)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=kept, alpha=factor, out=total)
    else:  # only a GPU's library mixes precisions in one product
        total.addmm_(a.to(total.dtype), b.to(total.dtype), beta=kept, alpha=factor)


def rounded(products: list[FusedLinear]) -> None:
    """Bring the products' weights up to date with their parameters, all at once."""
    torch._foreach_copy_([p.weight for p in products], [p.parameter.view(p.rows, -1) for p in products])
    scaled = [p for p in products if p.factor != 1.0]
    if scaled:
        torch._foreach_mul_([p.weight for p in scaled], [p.factor for p in scaled])
