"""Products in eight bits: forward, to the input, to the weight.

Each row of the first factor has a scale, and each column of the second: both come out of a sum over the
width. Out of the sum over tokens that makes the weight's gradient they would not: there each factor has one.

The head is spared twice. Its sum on the way back, over the vocabulary, is made in fp32: in fewer bits that
costs loss (docs/performance.md). And its own gradient is in the compute precision, for rare tokens' sake.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor, nn

from steepen.execution.linear import FusedLinear
from steepen.kernels import kernels_for
from steepen.kernels.fp8 import ACTIVATION, RowwiseFp8, TensorwisePending, exact

MULTIPLE = 16  # of both sides of a matrix, for the GPU's products in eight bits


class Float8Linear(FusedLinear):
    """A `Product` that computes in eight bits what it is given in eight bits, and the rest as ever."""

    def __init__(
        self, parameter: nn.Parameter, factor: float, dtype: torch.dtype, *, head: bool = False
    ) -> None:
        super().__init__(parameter, factor, dtype, head=head)
        rows, columns = self.weight.shape
        device = parameter.device
        # All filled by `quantised`. `turned` is the transpose: a product takes both factors along the sum.
        self.small = torch.empty(rows, columns, dtype=ACTIVATION, device=device)
        self.turned = torch.empty(columns, rows, dtype=ACTIVATION, device=device)
        self.scale = torch.empty(1, rows, dtype=torch.float32, device=device)
        self.turned_scale = torch.empty(1, columns, dtype=torch.float32, device=device)
        self.largest = torch.empty(rows + columns, dtype=torch.int32, device=device)

    def __call__(self, x: Tensor | RowwiseFp8) -> Tensor:
        """x times the transposed matrix."""
        if isinstance(x, Tensor):
            return super().__call__(x)
        return self._kernels.multiply(x, self.small, self.scale, self.weight.dtype, fast=True)

    def add_to_(self, total: Tensor, x: Tensor | RowwiseFp8) -> Tensor:
        """Add x times the transposed matrix to `total`."""
        return super().add_to_(total, x) if isinstance(x, Tensor) else total.add_(self(x))

    def plus(self, total: Tensor, x: Tensor | RowwiseFp8) -> Tensor | None:
        """Total and x times the transposed matrix; None where that takes a pass of its own."""
        return super().plus(total, x) if isinstance(x, Tensor) else None

    def dgrad(self, d: Tensor | RowwiseFp8) -> Tensor:
        """The gradient of x."""
        if isinstance(d, Tensor):
            return super().dgrad(d)
        fast = not self.head
        return self._kernels.multiply(d, self.turned, self.turned_scale, self.weight.dtype, fast=fast)

    def wgrad(self, d: Tensor | RowwiseFp8, x: Tensor | RowwiseFp8 | TensorwisePending) -> None:
        """Add the weight's gradient to the parameter's: summed in fp32, and added in it."""
        if isinstance(d, Tensor) or isinstance(x, Tensor) or self.head:
            return super().wgrad(exact(d), exact(x))
        kernels, parameter = self._kernels, self.parameter
        d_size = kernels.size_of(d)
        x_size = x.size if isinstance(x, TensorwisePending) else kernels.size_of(x)
        across, along = kernels.turn(d, d_size), kernels.turn(x, x_size)
        gradient = kernels.multiply_turned(across, along, d_size * self.factor, x_size)
        if parameter.grad is None:
            parameter.grad = gradient.view(parameter.shape)
        else:
            parameter.grad += gradient.view(parameter.shape)

    def backward(self, d: Tensor | RowwiseFp8, x: Tensor | RowwiseFp8 | TensorwisePending) -> Tensor:
        """Both: returns the gradient of x, adds that of the weight."""
        self.wgrad(d, x)
        return self.dgrad(d)

    def quantise(self) -> None:
        """Bring the weight in eight bits up to date with the weight."""
        self._kernels.quantise_weight_(
            self.small, self.scale, self.turned, self.turned_scale, self.largest, self.weight
        )

    @property
    def _kernels(self) -> ModuleType:
        return kernels_for(self.weight, eight=True)


def float8_linear_where_aligned(
    parameter: nn.Parameter, factor: float, dtype: torch.dtype, *, head: bool = False
) -> FusedLinear:
    """A product in eight bits, or as ever where the matrix has sides that those do not take."""
    columns = parameter.shape[-1]
    fits = columns % MULTIPLE == 0 and parameter.numel() // columns % MULTIPLE == 0
    return (Float8Linear if fits else FusedLinear)(parameter, factor, dtype, head=head)


def quantised(products: list[FusedLinear]) -> None:
    """Bring those of the products that have weights in eight bits up to date, after `rounded`."""
    for product in products:
        if isinstance(product, Float8Linear):
            product.quantise()
