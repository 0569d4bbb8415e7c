"""The plain twins of the kernels that also round to eight bits, under the names `eager` has them.

What a product takes comes as a `Twice`: activations, weights and gradients in e4m3, the gradient of logits in
e5m2, each row divided by a scale of its own that brings its largest number near the type's largest. Scales of
rows are powers of two, so that to go from one to another loses nothing but the least of the small.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from steepen.kernels import eager
from steepen.kernels.eager import rotate_norm_
from steepen.kernels.fp8 import ACTIVATION, GRADIENT, LOGITS, TINY, RowwiseFp8, TensorwisePending, most

__all__ = [
    "add_rms_norm",
    "cross_entropy_",
    "multiply",
    "multiply_turned",
    "normed",
    "quantise_activation",
    "quantise_gradient",
    "quantise_weight_",
    "rms_norm",
    "rms_norm_backward",
    "rotate_norm_",
    "rotate_norm_backward",
    "size_of",
    "swiglu",
    "swiglu_backward_",
    "turn",
    "whole",
]

MARGIN = 2.0**-20  # of a probability: what fp32 may have lost of it
TOKENS = 16  # a sum over tokens is of a multiple of these, for the GPU's products in eight bits


def rounded(x: Tensor, dtype: torch.dtype, largest: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x in eight bits and the scales of its rows; `largest` is a bound on each row where one is known."""
    wide = x.float()
    largest = (wide.abs().amax(-1) if largest is None else largest.float()).clamp_min(TINY)
    exact = most(dtype) / largest
    factor = torch.ldexp(torch.ones_like(exact), torch.frexp(exact).exponent - 1)
    factor = factor.where(exact != 0, 0.0)[:, None]  # a row that holds infinity becomes one of no numbers
    return (wide * factor).to(dtype), 1 / factor


def quantise_activation(x: Tensor) -> RowwiseFp8:
    """x as a product takes it."""
    return RowwiseFp8(x, *rounded(x, ACTIVATION))


def quantise_gradient(d: Tensor) -> RowwiseFp8:
    """d as the product that goes back takes it."""
    return RowwiseFp8(d, *rounded(d, GRADIENT))


def quantise_weight_(
    small: Tensor, scale: Tensor, turned: Tensor, turned_scale: Tensor, largest: Tensor, weight: Tensor
) -> None:
    """Write a weight in eight bits, row by row, and its transpose, row by row of that.

    Scales are (1, rows): second factors have columns. `largest` is memory to work in, of rows + columns.
    """
    del largest
    for there, sizes, matrix in ((small, scale, weight), (turned, turned_scale, weight.t())):
        values, found = rounded(matrix, ACTIVATION)
        there.copy_(values)
        sizes.copy_(found.t())


def multiply(x: RowwiseFp8, small: Tensor, scale: Tensor, dtype: torch.dtype, *, fast: bool) -> Tensor:
    """x times the transpose of a matrix in eight bits whose rows have these scales (1, rows), in `dtype`.

    `fast` lets a GPU sum in fewer bits than fp32's.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    product = (x.small.to(wide) * x.scale) @ (small.to(wide) * scale.t()).t()
    return product.to(dtype)


def rms_norm(x: Tensor, eps: float) -> tuple[RowwiseFp8, Tensor]:
    """As `eager.rms_norm`."""
    n, rstd = eager.rms_norm(x, eps)
    return quantise_activation(n), rstd


def add_rms_norm(x: Tensor, y: Tensor, eps: float) -> tuple[Tensor, RowwiseFp8, Tensor]:
    """As `eager.add_rms_norm`."""
    total, n, rstd = eager.add_rms_norm(x, y, eps)
    return total, quantise_activation(n), rstd


def rms_norm_backward(dn: Tensor, n: Tensor, rstd: Tensor, skip: Tensor | None = None) -> RowwiseFp8:
    """As `eager.rms_norm_backward`."""
    return quantise_gradient(eager.rms_norm_backward(dn, n, rstd, skip))


def rotate_norm_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor, rstd: Tensor, table: Tensor
) -> RowwiseFp8:
    """As `eager.rotate_norm_backward`, in eight bits only."""
    return RowwiseFp8(None, *rounded(eager.rotate_norm_backward(dq, dk, dv, qkv, rstd, table), GRADIENT))


def swiglu(gate_up: Tensor) -> RowwiseFp8:
    """As `eager.swiglu`, in eight bits only: the way back makes the exact product again."""
    return RowwiseFp8(None, *rounded(eager.swiglu(gate_up), ACTIVATION))


def swiglu_backward_(gate_up: Tensor, dh: Tensor) -> tuple[RowwiseFp8, RowwiseFp8]:
    """As `eager.swiglu_backward_`, in eight bits only."""
    d, h = eager.swiglu_backward_(gate_up, dh)
    return RowwiseFp8(None, *rounded(d, GRADIENT)), RowwiseFp8(None, *rounded(h, ACTIVATION))


def cross_entropy_(
    logits: Tensor, targets: Tensor, scale: float, softcap: float | None
) -> tuple[Tensor, RowwiseFp8]:
    """As `eager.cross_entropy_`. The largest of a row's gradient is the target's: 1 − p, p = exp(−loss)."""
    losses, d = eager.cross_entropy_(logits, targets, scale, softcap)
    bound = abs(scale) * (MARGIN - torch.expm1(-losses))
    return losses, RowwiseFp8(d, *rounded(d, LOGITS, bound))


def size_of(x: RowwiseFp8) -> Tensor:
    """The scale that all of x fits."""
    return x.scale.amax()


def whole(x: Tensor, size: Tensor) -> TensorwisePending:
    """x as the product that makes a weight's gradient takes it; `size` is what `size_of` gave of it."""
    return TensorwisePending(x, size)


def normed(n: Tensor) -> TensorwisePending:
    """The same for what came out of a norm: none of it exceeds the root of its width."""
    return TensorwisePending(n, torch.full((), n.shape[1] ** 0.5 / most(ACTIVATION), device=n.device))


def turn(x: RowwiseFp8 | TensorwisePending, size: Tensor) -> Tensor:
    """The transpose of x in eight bits, all with the scale `size`, and zeros to a multiple of `TOKENS`."""
    wide, kind = (
        (x.exact, ACTIVATION)
        if isinstance(x, TensorwisePending)
        else (x.small.float() * x.scale, x.small.dtype)
    )
    return functional.pad((wide.float() / size).t(), (0, padded(len(wide)) - len(wide))).to(kind)


def padded(rows: int) -> int:
    """How many tokens a sum over so many takes."""
    return math.ceil(rows / TOKENS) * TOKENS


def multiply_turned(d: Tensor, x: Tensor, d_size: Tensor, x_size: Tensor) -> Tensor:
    """What `turn` made of d times the transpose of what it made of x, in fp32."""
    return (d.float() @ x.float().t()) * (d_size * x_size)
