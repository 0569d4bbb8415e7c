"""Bias-free linear layers of the fused path: forward, dgrad and wgrad GEMMs in the compute dtype."""

# torch's multi-tensor (foreach) operators have no public name.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from steepen.kernels.cublaslt_gemm import gemm, gemm_add


class GradientSignal:
    """Notifies a listener when the gradient of a parameter is complete: it is written here, outside of hooks.

    A parameter may be used several times in a forward pass (a tied core): its gradient is complete when the
    backward has written it as often.
    """

    def __init__(self) -> None:
        self.listener: Callable[[nn.Parameter], None] | None = None
        self.uses: dict[nn.Parameter, int] = {}

    def used(self, parameter: nn.Parameter) -> None:
        """Count one use in a forward pass that needs gradients."""
        self.uses[parameter] = self.uses.get(parameter, 0) + 1

    def written(self, parameter: nn.Parameter) -> None:
        """Count one write in the backward; after the last, call the listener."""
        left = self.uses[parameter] = self.uses.get(parameter, 1) - 1
        if left <= 0:
            self.uses.pop(parameter)
            if self.listener is not None:
                self.listener(parameter)

    def __deepcopy__(self, memo: dict[int, object]) -> GradientSignal:
        """Growth copies blocks: all blocks of a network share one signal."""
        return self


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
        self.signal: GradientSignal | None = None  # set by the network where someone may listen

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

    def used(self) -> None:
        """Note a use in a forward pass that needs gradients."""
        if self.signal is not None:
            self.signal.used(self.parameter)

    def written(self) -> None:
        """Note that a use's part of the weight's gradient has been written."""
        if self.signal is not None:
            self.signal.written(self.parameter)

    def cast_rows_(self, first: int, values: Tensor) -> None:
        """Fill the rows of the compute copy from `first` on with fp32 values, times the factor."""
        values = values.reshape(-1, self.weight.shape[1])
        rows = self.weight[first : first + len(values)]
        rows.copy_(values)
        if self.factor != 1.0:
            rows.mul_(self.factor)


def is_released(parameter: Tensor) -> bool:
    """Whether another rank owns the fp32 values: here the parameter is one zero, expanded to its shape."""
    return parameter.numel() > 1 and not any(parameter.stride())


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
    """Copy all parameters that are not released, times their factors, into the compute copies."""
    linears = [linear for linear in linears if not is_released(linear.parameter)]
    if not linears:
        return
    torch._foreach_copy_([x.weight for x in linears], [x.parameter.view(x.rows, -1) for x in linears])
    scaled = [linear for linear in linears if linear.factor != 1.0]
    if scaled:
        torch._foreach_mul_([x.weight for x in scaled], [x.factor for x in scaled])
