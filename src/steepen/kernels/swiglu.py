"""The gated activation of the MLP, and back."""

# Triton's language is untyped.
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportCallIssue=false, reportReturnType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# A tile of rows and columns; the paper's hidden widths are multiples of 256.
TILE = {"ROWS": 8, "COLUMNS": 256, "num_warps": 8}


@triton.jit
def _swiglu_kernel(x_ptr, h_ptr, rows, hidden, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (row < rows) & (column < hidden)
    place = x_ptr + row * (2 * hidden) + column
    gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(place + hidden, mask=inside, other=0.0).to(tl.float32)
    h = gate * tl.sigmoid(gate) * up
    tl.store(h_ptr + row * hidden + column, h.to(h_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward_kernel(
    x_ptr, d_ptr, rows, hidden, AGAIN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (row < rows) & (column < hidden)
    place = x_ptr + row * (2 * hidden) + column
    gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(place + hidden, mask=inside, other=0.0).to(tl.float32)
    product = d_ptr + row * hidden + column
    d = tl.load(product, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    silu = gate * share
    kind = x_ptr.dtype.element_ty
    tl.store(place, (d * up * share * (1 + gate * (1 - share))).to(kind), mask=inside)
    tl.store(place + hidden, (d * silu).to(kind), mask=inside)
    if AGAIN:
        tl.store(product, (silu * up).to(kind), mask=inside)


def _grid(rows: int, hidden: int) -> tuple[int, int]:
    return triton.cdiv(rows, TILE["ROWS"]), triton.cdiv(hidden, TILE["COLUMNS"])


def swiglu(gate_up: Tensor) -> Tensor:
    """As `eager.swiglu`."""
    rows, hidden = len(gate_up), gate_up.shape[1] // 2
    h = torch.empty(rows, hidden, dtype=gate_up.dtype, device=gate_up.device)
    _swiglu_kernel[_grid(rows, hidden)](gate_up, h, rows, hidden, **TILE)
    return h


def swiglu_backward_(gate_up: Tensor, dh: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As `eager.swiglu_backward_`."""
    rows, hidden = dh.shape
    _swiglu_backward_kernel[_grid(rows, hidden)](gate_up, dh, rows, hidden, AGAIN=h is None, **TILE)
    return gate_up, dh if h is None else h
