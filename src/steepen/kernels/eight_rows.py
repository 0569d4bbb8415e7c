"""Rounding rows to eight bits: what kernels that do it on the way share, and the one that does only that."""

# Triton's language is untyped.
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportReturnType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from steepen.kernels.fp8 import ACTIVATION, GRADIENT, TINY, RowwiseFp8, most
from steepen.kernels.row_launch import grid, tile

LEAST = tl.constexpr(TINY)
EXPONENT = tl.constexpr(0x7F800000)  # the bits that fp32 keeps its power of two in
# A thread takes as many neighbours of what it writes in eight bits as of what it reads in sixteen: sixteen
# bytes of the latter. Left alone, the compiler would have it write sixteen bytes too, and every number change
# threads on the way.
TOGETHER = tl.constexpr(8)


@triton.jit
def factors(largest, MOST: tl.constexpr):
    """What to multiply a row by whose largest number this is, and the scale that undoes it: powers of two."""
    factor = (MOST / tl.maximum(largest, LEAST)).to(tl.int32, bitcast=True) & EXPONENT
    factor = factor.to(tl.float32, bitcast=True)
    return factor, 1.0 / factor


@triton.jit
def write_rows(x, small_ptr, scale_ptr, row, rows, place, inside, MOST: tl.constexpr):
    """Write a tile of whole rows in eight bits, and their scales."""
    up, scale = factors(tl.max(tl.abs(x), axis=1), MOST)
    tl.store(scale_ptr + row, scale, mask=row < rows)
    there = tl.max_contiguous(small_ptr + place, [1, TOGETHER])
    tl.store(there, (x * up[:, None]).to(small_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _quantise_kernel(
    x_ptr, small_ptr, scale_ptr, rows, width, MOST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row[:, None] < rows) & (column < width)
    place = row[:, None] * width + column
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    write_rows(x, small_ptr, scale_ptr, row, rows, place, inside, MOST)


def room(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Memory for a matrix in eight bits and the scales of its rows."""
    small = torch.empty(rows, width, dtype=dtype, device=device)
    return small, torch.empty(rows, 1, dtype=torch.float32, device=device)


def _quantise(x: Tensor, dtype: torch.dtype) -> RowwiseFp8:
    assert x.is_contiguous(), "rows must follow one another"
    rows, width = x.shape
    small, scale = room(rows, width, dtype, x.device)
    size = tile(width)
    _quantise_kernel[grid(rows, size)](x, small, scale, rows, width, MOST=most(dtype), **size)
    return RowwiseFp8(x, small, scale)


def quantise_activation(x: Tensor) -> RowwiseFp8:
    """As `eager8.quantise_activation`."""
    return _quantise(x, ACTIVATION)


def quantise_gradient(d: Tensor) -> RowwiseFp8:
    """As `eager8.quantise_gradient`."""
    return _quantise(d, GRADIENT)
