"""A weight in eight bits, and its transpose, each with scales of its own; and the product with either."""

# The scaled product carries an underscore in torch, and is what its own libraries for eight bits are made of.
# Triton's language is untyped.
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportReturnType=false, reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from steepen.kernels.eight_rows import factors
from steepen.kernels.fp8 import ACTIVATION, RowwiseFp8, most

EDGE = 64  # of a tile, which is read along one side and written along both


@triton.jit
def _largest_kernel(weight_ptr, largest_ptr, rows, columns, EDGE: tl.constexpr):
    """The largest of each row, then of each column: as whole numbers, ordered as positive floats are."""
    across = tl.cdiv(columns, EDGE)
    row = (tl.program_id(0) // across) * EDGE + tl.arange(0, EDGE)
    column = (tl.program_id(0) % across) * EDGE + tl.arange(0, EDGE)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    place = row[:, None].to(tl.int64) * columns + column[None, :]
    size = tl.abs(tl.load(weight_ptr + place, mask=inside, other=0.0).to(tl.float32))
    of_rows = tl.max(size, axis=1).to(tl.int32, bitcast=True)
    tl.atomic_max(largest_ptr + row, of_rows, mask=row < rows, sem="relaxed")
    of_columns = tl.max(size, axis=0).to(tl.int32, bitcast=True)
    tl.atomic_max(largest_ptr + rows + column, of_columns, mask=column < columns, sem="relaxed")


@triton.jit
def _quantise_weight_kernel(
    weight_ptr, largest_ptr, small_ptr, scale_ptr, turned_ptr, turned_scale_ptr, rows, columns,
    MOST: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(columns, EDGE)
    row = (tl.program_id(0) // across) * EDGE + tl.arange(0, EDGE)
    column = (tl.program_id(0) % across) * EDGE + tl.arange(0, EDGE)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    place = row[:, None].to(tl.int64) * columns + column[None, :]
    weight = tl.load(weight_ptr + place, mask=inside, other=0.0).to(tl.float32)
    kind = small_ptr.dtype.element_ty

    largest = tl.load(largest_ptr + row, mask=row < rows, other=0).to(tl.float32, bitcast=True)
    factor, scale = factors(largest, MOST)
    tl.store(small_ptr + place, (weight * factor[:, None]).to(kind), mask=inside)
    tl.store(scale_ptr + row, scale, mask=(row < rows) & (tl.program_id(0) % across == 0))

    largest = tl.load(largest_ptr + rows + column, mask=column < columns, other=0).to(
        tl.float32, bitcast=True
    )
    factor, scale = factors(largest, MOST)
    turned = tl.trans(weight * factor[None, :]).to(kind)
    there = column[:, None].to(tl.int64) * rows + row[None, :]
    inside = (column[:, None] < columns) & (row[None, :] < rows)
    tl.store(turned_ptr + there, turned, mask=inside)
    tl.store(turned_scale_ptr + column, scale, mask=(column < columns) & (tl.program_id(0) < across))


def quantise_weight_(
    small: Tensor, scale: Tensor, turned: Tensor, turned_scale: Tensor, largest: Tensor, weight: Tensor
) -> None:
    """As `eager8.quantise_weight_`."""
    rows, columns = weight.shape
    grid = (triton.cdiv(rows, EDGE) * triton.cdiv(columns, EDGE),)
    largest.zero_()
    _largest_kernel[grid](weight, largest, rows, columns, EDGE=EDGE)
    _quantise_weight_kernel[grid](
        weight, largest, small, scale, turned, turned_scale, rows, columns,
        MOST=most(ACTIVATION), EDGE=EDGE,
    )  # fmt: skip


def multiply(x: RowwiseFp8, small: Tensor, scale: Tensor, dtype: torch.dtype, *, fast: bool) -> Tensor:
    """As `eager8.multiply`."""
    return torch._scaled_mm(x.small, small.t(), x.scale, scale, out_dtype=dtype, use_fast_accum=fast)
