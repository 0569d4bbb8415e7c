"""Products in eight bits: forward and to the input. The weight's gradient stays in the compute precision.

Each row of the first factor has a scale, and each column of the second: both come out of a sum over the
width. Out of the sum over tokens that makes the weight's gradient they would not.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor, nn

from steepen.kernels import kernels_for
from steepen.kernels.twice import ACTIVATION, Twice, exact
from steepen.model.products import Product

MULTIPLE = 16  # of both sides of a matrix, for the GPU's products in eight bits


class Product8(Product):
    """A `Product` that computes in eight bits what it is given in eight bits, and the rest as ever."""

    def __init__(self, parameter: nn.Parameter, factor: float, dtype: torch.dtype) -> None:
        super().__init__(parameter, factor, dtype)
        rows, columns = self.weight.shape
        device = parameter.device
        # All filled by `quantised`. `turned` is the transpose: a product takes both factors along the sum.
        self.small = torch.empty(rows, columns, dtype=ACTIVATION, device=device)
        self.turned = torch.empty(columns, rows, dtype=ACTIVATION, device=device)
        self.scale = torch.empty(1, rows, dtype=torch.float32, device=device)
        self.turned_scale = torch.empty(1, columns, dtype=torch.float32, device=device)
        self.largest = torch.empty(rows + columns, dtype=torch.int32, device=device)

    def __call__(self, x: Tensor | Twice) -> Tensor:
        """x times the transposed matrix."""
        if isinstance(x, Tensor):
            return super().__call__(x)
        return self._kernels.multiply(x, self.small, self.scale, self.weight.dtype, fast=True)

    def add_to_(self, total: Tensor, x: Tensor | Twice) -> Tensor:
        """Add x times the transposed matrix to `total`."""
        return super().add_to_(total, x) if isinstance(x, Tensor) else total.add_(self(x))

    def to_input(self, d: Tensor | Twice) -> Tensor:
        """The gradient of x."""
        if isinstance(d, Tensor):
            return super().to_input(d)
        return self._kernels.multiply(d, self.turned, self.turned_scale, self.weight.dtype, fast=False)

    def to_weight(self, d: Tensor | Twice, x: Tensor | Twice) -> None:
        """Add the weight's gradient to the parameter's, from what was not rounded."""
        super().to_weight(exact(d), exact(x))

    def back(self, d: Tensor | Twice, x: Tensor | Twice) -> Tensor:
        """Both: returns the gradient of x, adds that of the weight."""
        self.to_weight(d, x)
        return self.to_input(d)

    def quantise(self) -> None:
        """Bring the weight in eight bits up to date with the weight."""
        self._kernels.quantise_weight_(
            self.small, self.scale, self.turned, self.turned_scale, self.largest, self.weight
        )

    @property
    def _kernels(self) -> ModuleType:
        return kernels_for(self.weight, eight=True)


def eight_where_it_fits(parameter: nn.Parameter, factor: float, dtype: torch.dtype) -> Product:
    """A product in eight bits, or as ever where the matrix has sides that those do not take."""
    columns = parameter.shape[-1]
    fits = columns % MULTIPLE == 0 and parameter.numel() // columns % MULTIPLE == 0
    return (Product8 if fits else Product)(parameter, factor, dtype)


def quantised(products: list[Product]) -> None:
    """Bring those of the products that have weights in eight bits up to date, after `rounded`."""
    for product in products:
        if isinstance(product, Product8):
            product.quantise()
