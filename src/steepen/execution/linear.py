"""Bias-free linear layers of the fused path: forward, dgrad and wgrad GEMMs in the compute dtype."""

# torch's multi-tensor (foreach) operators have no public name.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import torch
from torch import Tensor, nn

from steepen.kernels.cublaslt_gemm import gemm, gemm_add


class FusedLinear:
    """y = factor · x @ weightᵀ, with a copy of the weight in the compute dtype.

    The parameter is (out, in) or a stack (count, out, in) whose outputs are concatenated. wgrad is
    accumulated into the parameter's `.grad` in fp32. `head` marks the LM head.
    """

    def __init__(
        self, parameter: nn.Parameter, factor: float, dtype: torch.dtype, *, head: bool = False
    ) -> None:
        self.parameter, self.factor, self.head = parameter, factor, head
        self.rows = parameter.numel() // parameter.shape[-1]
        # Filled by `cast_weights` with the parameter times the factor.
        self.weight = torch.empty(self.rows, parameter.shape[-1], dtype=dtype, device=parameter.device)

    def __call__(self, x: Tensor) -> Tensor:
        """x @ weightᵀ, (tokens, in) → (tokens, out)."""
        return gemm(x, self.weight.t())

    def add_to_(self, total: Tensor, x: Tensor) -> Tensor:
        """total += x @ weightᵀ in place, rounded once to the dtype of `total`."""
        if total.dtype != x.dtype:
            accumulate_gemm_(total, x, self.weight.t(), 1.0)
            return total
        return gemm(x, self.weight.t(), accumulate_into=total)

    def added_to(self, total: Tensor, x: Tensor) -> Tensor | None:
        """total + x @ weightᵀ, rounded once; None if that would take a separate pass over the total."""
        return gemm_add(x, self.weight.t(), total)

    def dgrad(self, d: Tensor) -> Tensor:
        """Gradient of x from the gradient d of the output."""
        return gemm(d, self.weight)

    def wgrad(self, d: Tensor, x: Tensor) -> None:
        """Add the weight's gradient to `parameter.grad` in fp32, or create it if it is None."""
        parameter, beta = self.parameter, 1.0
        if parameter.grad is None:
            parameter.grad, beta = torch.empty_like(parameter), 0.0
        accumulate_gemm_(parameter.grad.view(self.rows, -1), d.t(), x, self.factor, beta)

    def backward(self, d: Tensor, x: Tensor) -> Tensor:
        """wgrad, then dgrad."""
        self.wgrad(d, x)
        return self.dgrad(d)


def accumulate_gemm_(total: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float = 1.0) -> None:
    """total ← beta·total + alpha·(a @ b), accumulated in total's dtype whatever that of a and b.

    With beta = 0 the old total is ignored, even if it is NaN.
    """
    if total.dtype == a.dtype:
        total.addmm_(a, b, beta=beta, alpha=alpha)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, alpha=alpha, out=total)
    else:  # a GEMM with mixed dtypes exists only on a GPU
        total.addmm_(a.to(total.dtype), b.to(total.dtype), beta=beta, alpha=alpha)


def cast_weights(linears: list[FusedLinear]) -> None:
    """Copy all parameters, times their factors, into the weights in the compute dtype."""
    torch._foreach_copy_([x.weight for x in linears], [x.parameter.view(x.rows, -1) for x in linears])
    scaled = [linear for linear in linears if linear.factor != 1.0]
    if scaled:
        torch._foreach_mul_([x.weight for x in scaled], [x.factor for x in scaled])
