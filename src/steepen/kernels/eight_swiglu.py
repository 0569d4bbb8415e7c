"""The gated activation in eight bits, and its way back: a program sees whole rows, and so their scale."""

# Triton's language is untyped.
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportReturnType=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from steepen.kernels.eight_rows import TOGETHER, factors, room, write_rows
from steepen.kernels.fp8 import ACTIVATION, GRADIENT, RowwiseFp8, most
from steepen.kernels.row_launch import grid, tile

NUMBERS = 4096  # of a program's share of the hidden width, at least


@triton.jit
def _swiglu8_kernel(
    x_ptr, small_ptr, scale_ptr, rows, hidden, MOST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row[:, None] < rows) & (column < hidden)
    place = x_ptr + row[:, None] * (2 * hidden) + column
    gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(place + hidden, mask=inside, other=0.0).to(tl.float32)
    h = (gate * tl.sigmoid(gate) * up).to(x_ptr.dtype.element_ty).to(tl.float32)
    there = row[:, None] * hidden + column
    write_rows(h, small_ptr, scale_ptr, row, rows, there, inside, MOST)


@triton.jit
def _swiglu_backward8_kernel(
    x_ptr, d_ptr, small_ptr, scale_ptr, h_ptr, h_scale_ptr, rows, hidden,
    MOST: tl.constexpr, MOST_H: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row[:, None] < rows) & (column < hidden)
    place = row[:, None] * (2 * hidden) + column
    gate = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + place + hidden, mask=inside, other=0.0).to(tl.float32)
    product = row[:, None] * hidden + column
    d = tl.load(d_ptr + product, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    silu = gate * share
    # Rounded to sixteen bits on the way, as forward rounds it: the same eight come out.
    h = (silu * up).to(x_ptr.dtype.element_ty).to(tl.float32)
    write_rows(h, h_ptr, h_scale_ptr, row, rows, product, inside, MOST_H)
    dgate = d * up * share * (1 + gate * (1 - share))
    dup = d * silu
    factor, scale = factors(tl.max(tl.maximum(tl.abs(dgate), tl.abs(dup)), axis=1), MOST)
    tl.store(scale_ptr + row, scale, mask=row < rows)
    there = tl.max_contiguous(small_ptr + place, [1, TOGETHER])
    kind = small_ptr.dtype.element_ty
    tl.store(there, (dgate * factor[:, None]).to(kind), mask=inside)
    tl.store(there + hidden, (dup * factor[:, None]).to(kind), mask=inside)


def swiglu(gate_up: Tensor) -> RowwiseFp8:
    """As `eager8.swiglu`."""
    rows, hidden = len(gate_up), gate_up.shape[1] // 2
    small, scale = room(rows, hidden, ACTIVATION, gate_up.device)
    size = tile(hidden, NUMBERS)
    _swiglu8_kernel[grid(rows, size)](gate_up, small, scale, rows, hidden, MOST=most(ACTIVATION), **size)
    return RowwiseFp8(None, small, scale)


def swiglu_backward_(gate_up: Tensor, dh: Tensor) -> tuple[RowwiseFp8, RowwiseFp8]:
    """As `eager8.swiglu_backward_`."""
    rows, hidden = dh.shape
    small, scale = room(rows, 2 * hidden, GRADIENT, dh.device)
    h, h_scale = room(rows, hidden, ACTIVATION, dh.device)
    size = tile(hidden, NUMBERS)
    _swiglu_backward8_kernel[grid(rows, size)](
        gate_up, dh, small, scale, h, h_scale, rows, hidden,
        MOST=most(GRADIENT), MOST_H=most(ACTIVATION), **size,
    )  # fmt: skip
    return RowwiseFp8(None, small, scale), RowwiseFp8(None, h, h_scale)
