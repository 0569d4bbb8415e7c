"""A matrix of tokens turned on its side in eight bits, for the sum over tokens that is a weight's gradient.

The GPU multiplies eight bits only along rows, and a sum has one scale: those of the rows are evened out.
"""

# The scaled product carries an underscore in torch, and is what its own libraries for eight bits are made of.
# Triton's language is untyped.
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportReturnType=false, reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from steepen.kernels.eager8 import padded
from steepen.kernels.fp8 import ACTIVATION, RowwiseFp8, TensorwisePending

TILE = {"ROWS": 128, "COLUMNS": 64, "num_warps": 4}


@triton.jit
def _turn_kernel(
    x_ptr, scale_ptr, size_ptr, out_ptr, rows, columns, room,
    SCALED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(columns, COLUMNS)
    row = (tl.program_id(0) // across) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    x = tl.load(x_ptr + row.to(tl.int64)[:, None] * columns + column[None, :], mask=inside, other=0.0)
    factor = 1 / tl.load(size_ptr)
    if SCALED:
        factor *= tl.load(scale_ptr + row, mask=row < rows, other=0.0)[:, None]
    small = (x.to(tl.float32) * factor).to(out_ptr.dtype.element_ty)
    inside = (column < columns)[:, None] & (row < room)[None, :]
    tl.store(out_ptr + column.to(tl.int64)[:, None] * room + row[None, :], tl.trans(small), mask=inside)


def turn(x: RowwiseFp8 | TensorwisePending, size: Tensor) -> Tensor:
    """As `eager8.turn`."""
    matrix, scale, kind = (
        (x.exact, size, ACTIVATION) if isinstance(x, TensorwisePending) else (x.small, x.scale, x.small.dtype)
    )
    assert matrix.is_contiguous(), "rows must follow one another"
    rows, columns = matrix.shape
    out = torch.empty(columns, padded(rows), dtype=kind, device=matrix.device)
    grid = (triton.cdiv(out.shape[1], TILE["ROWS"]) * triton.cdiv(columns, TILE["COLUMNS"]),)
    _turn_kernel[grid](
        matrix, scale, size, out, rows, columns, out.shape[1], SCALED=isinstance(x, RowwiseFp8), **TILE
    )
    return out


def multiply_turned(d: Tensor, x: Tensor, d_size: Tensor, x_size: Tensor) -> Tensor:
    """As `eager8.multiply_turned`."""
    return torch._scaled_mm(d, x.t(), d_size, x_size, out_dtype=torch.float32, use_fast_accum=False)
