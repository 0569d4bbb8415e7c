"""SwiGLU: silu(gate)·up of the two halves of each row of (tokens, 2·hidden), and its backward pass."""

# Triton kernels are untyped.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportReturnType=false, reportIndexIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from steepen.kernels.fp8 import (
    ACTIVATION_DTYPE,
    FP8_STORE_ELEMENTS,
    GRADIENT_DTYPE,
    RowwiseFp8,
    empty_rowwise,
    fp8_max,
    fp8_row_scale,
    quantize_rows_reference,
    store_rows_fp8,
)
from steepen.kernels.norm import at_least_fp32
from steepen.kernels.triton_backend import row_grid, row_tile, tl, triton


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """silu(gate)·up, (tokens, hidden)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (functional.silu(at_least_fp32(gate)) * at_least_fp32(up)).to(gate_up.dtype)


def swiglu_backward_reference_(gate_up: Tensor, dh: Tensor) -> Tensor:
    """Overwrite `gate_up` with its gradient, given the gradient dh of the output."""
    gate, up = (at_least_fp32(half) for half in gate_up.chunk(2, dim=-1))
    sigmoid, d = torch.sigmoid(gate), at_least_fp32(dh)
    d_gate_up = [d * up * sigmoid * (1 + gate * (1 - sigmoid)), d * gate * sigmoid]
    return gate_up.copy_(torch.cat(d_gate_up, dim=-1))


def swiglu_fp8_reference(gate_up: Tensor) -> RowwiseFp8:
    """`swiglu_reference`, quantized; the unquantized output is not kept, since no GEMM reads it."""
    return RowwiseFp8(None, *quantize_rows_reference(swiglu_reference(gate_up), ACTIVATION_DTYPE))


def swiglu_backward_fp8_reference(gate_up: Tensor, dh: Tensor) -> RowwiseFp8:
    """`swiglu_backward_reference_` with the gradient quantized only; leaves its arguments as they are."""
    d = swiglu_backward_reference_(gate_up.clone(), dh)
    return RowwiseFp8(None, *quantize_rows_reference(d, GRADIENT_DTYPE))


# Rows and columns of a program's tile; the paper's hidden widths are multiples of 256.
SWIGLU_TILE = {"ROWS": 8, "COLUMNS": 256, "num_warps": 8}


# Elementwise, so tiles of any shape do: gate and up of a tile are two runs of 512 bytes, enough for coalesced
# loads. The activation is not fused into the GEMM before it: that epilogue was slower than this pass
# (benchmarks/epilogues.py).
@triton.jit
def _swiglu_kernel(x_ptr, h_ptr, rows, hidden, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    mask = (row < rows) & (column < hidden)
    pointer = x_ptr + row * (2 * hidden) + column
    gate = tl.load(pointer, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(pointer + hidden, mask=mask, other=0.0).to(tl.float32)
    h = gate * tl.sigmoid(gate) * up
    tl.store(h_ptr + row * hidden + column, h.to(h_ptr.dtype.element_ty), mask=mask)


# The gradient takes the place of gate and up, which are read for the last time here. The activation, which
# wgrad needs, is saved in the forward pass: recomputing it here would write it once more.
@triton.jit
def _swiglu_backward_kernel(x_ptr, d_ptr, rows, hidden, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    mask = (row < rows) & (column < hidden)
    pointer = x_ptr + row * (2 * hidden) + column
    gate = tl.load(pointer, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(pointer + hidden, mask=mask, other=0.0).to(tl.float32)
    d = tl.load(d_ptr + row * hidden + column, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    dtype = x_ptr.dtype.element_ty
    tl.store(pointer, (d * up * sigmoid * (1 + gate * (1 - sigmoid))).to(dtype), mask=mask)
    tl.store(pointer + hidden, (d * gate * sigmoid).to(dtype), mask=mask)


def _grid(rows: int, hidden: int) -> tuple[int, int]:
    return triton.cdiv(rows, SWIGLU_TILE["ROWS"]), triton.cdiv(hidden, SWIGLU_TILE["COLUMNS"])


def swiglu_triton(gate_up: Tensor) -> Tensor:
    """`swiglu_reference` in Triton."""
    rows, hidden = len(gate_up), gate_up.shape[1] // 2
    h = torch.empty(rows, hidden, dtype=gate_up.dtype, device=gate_up.device)
    _swiglu_kernel[_grid(rows, hidden)](gate_up, h, rows, hidden, **SWIGLU_TILE)
    return h


def swiglu_backward_triton_(gate_up: Tensor, dh: Tensor) -> Tensor:
    """`swiglu_backward_reference_` in Triton."""
    rows, hidden = dh.shape
    _swiglu_backward_kernel[_grid(rows, hidden)](gate_up, dh, rows, hidden, **SWIGLU_TILE)
    return gate_up


# The fp8 kernels need the amax of a whole row, so a program processes whole rows of at least this many
# elements.
FP8_MIN_ELEMENTS = 4096


# The activation is rounded to bf16 before its fp8 scale is found, as the reference does.
@triton.jit
def _swiglu_fp8_kernel(
    x_ptr, fp8_ptr, scale_ptr, rows, hidden, FP8_MAX: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row[:, None] < rows) & (column < hidden)
    pointer = x_ptr + row[:, None] * (2 * hidden) + column
    gate = tl.load(pointer, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(pointer + hidden, mask=mask, other=0.0).to(tl.float32)
    h = (gate * tl.sigmoid(gate) * up).to(x_ptr.dtype.element_ty).to(tl.float32)
    offset = row[:, None] * hidden + column
    store_rows_fp8(h, fp8_ptr, scale_ptr, row, rows, offset, mask, FP8_MAX)


@triton.jit
def _swiglu_backward_fp8_kernel(
    x_ptr, d_ptr, fp8_ptr, scale_ptr, rows, hidden,
    FP8_MAX: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row[:, None] < rows) & (column < hidden)
    offset = row[:, None] * (2 * hidden) + column
    gate = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + offset + hidden, mask=mask, other=0.0).to(tl.float32)
    d = tl.load(d_ptr + row[:, None] * hidden + column, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    dgate = d * up * sigmoid * (1 + gate * (1 - sigmoid))
    dup = d * gate * sigmoid
    multiplier, scale = fp8_row_scale(tl.max(tl.maximum(tl.abs(dgate), tl.abs(dup)), axis=1), FP8_MAX)
    tl.store(scale_ptr + row, scale, mask=row < rows)
    target = tl.max_contiguous(fp8_ptr + offset, [1, FP8_STORE_ELEMENTS])
    dtype = fp8_ptr.dtype.element_ty
    tl.store(target, (dgate * multiplier[:, None]).to(dtype), mask=mask)
    tl.store(target + hidden, (dup * multiplier[:, None]).to(dtype), mask=mask)


def swiglu_fp8_triton(gate_up: Tensor) -> RowwiseFp8:
    """`swiglu_fp8_reference` in Triton."""
    rows, hidden = len(gate_up), gate_up.shape[1] // 2
    data, scale = empty_rowwise(rows, hidden, ACTIVATION_DTYPE, gate_up.device)
    tile = row_tile(hidden, FP8_MIN_ELEMENTS)
    _swiglu_fp8_kernel[row_grid(rows, tile)](
        gate_up, data, scale, rows, hidden, FP8_MAX=fp8_max(ACTIVATION_DTYPE), **tile
    )
    return RowwiseFp8(None, data, scale)


def swiglu_backward_fp8_triton(gate_up: Tensor, dh: Tensor) -> RowwiseFp8:
    """`swiglu_backward_fp8_reference` in Triton."""
    rows, hidden = dh.shape
    data, scale = empty_rowwise(rows, 2 * hidden, GRADIENT_DTYPE, dh.device)
    tile = row_tile(hidden, FP8_MIN_ELEMENTS)
    _swiglu_backward_fp8_kernel[row_grid(rows, tile)](
        gate_up, dh, data, scale, rows, hidden, FP8_MAX=fp8_max(GRADIENT_DTYPE), **tile
    )
    return RowwiseFp8(None, data, scale)
