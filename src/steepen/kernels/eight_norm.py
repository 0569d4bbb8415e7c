"""RMSNorm and its way back, whose results are also written in eight bits for the product that takes them."""

# Triton's language is untyped.
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportReturnType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from steepen.kernels.eight_rows import grid, room, tile, write_rows
from steepen.kernels.twice import ACTIVATION, GRADIENT, Twice, most


@triton.jit
def _rms_norm8_kernel(
    x_ptr, y_ptr, sum_ptr, n_ptr, rstd_ptr, small_ptr, scale_ptr, rows, width, eps,
    MOST: tl.constexpr, ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row[:, None] < rows) & (column < width)
    place = row[:, None] * width + column
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        y = tl.load(y_ptr + place, mask=inside, other=0.0).to(tl.float32)
        total = (x + y).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + place, total, mask=inside)
        x = total.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / width + eps)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    n = (x * rstd[:, None]).to(n_ptr.dtype.element_ty)
    tl.store(n_ptr + place, n, mask=inside)
    write_rows(n.to(tl.float32), small_ptr, scale_ptr, row, rows, place, inside, MOST)


@triton.jit
def _rms_norm_backward8_kernel(
    d_ptr, n_ptr, rstd_ptr, skip_ptr, dx_ptr, small_ptr, scale_ptr, rows, width,
    MOST: tl.constexpr, SKIP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row[:, None] < rows) & (column < width)
    place = row[:, None] * width + column
    d = tl.load(d_ptr + place, mask=inside, other=0.0).to(tl.float32)
    n = tl.load(n_ptr + place, mask=inside, other=0.0).to(tl.float32)
    rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
    mean = tl.sum(d * n, axis=1) / width
    dx = rstd[:, None] * (d - n * mean[:, None])
    if SKIP:
        dx += tl.load(skip_ptr + place, mask=inside, other=0.0).to(tl.float32)
    dx = dx.to(dx_ptr.dtype.element_ty)
    tl.store(dx_ptr + place, dx, mask=inside)
    write_rows(dx.to(tl.float32), small_ptr, scale_ptr, row, rows, place, inside, MOST)


def _norm(x: Tensor, y: Tensor | None, eps: float) -> tuple[Tensor, Twice, Tensor]:
    rows, width = x.shape
    total = x if y is None else torch.empty_like(x)
    n, rstd = torch.empty_like(x), torch.empty(rows, dtype=torch.float32, device=x.device)
    small, scale = room(rows, width, ACTIVATION, x.device)
    size = tile(width)
    _rms_norm8_kernel[grid(rows, size)](
        x, x if y is None else y, total, n, rstd, small, scale, rows, width, eps,
        MOST=most(ACTIVATION), ADD=y is not None, **size,
    )  # fmt: skip
    return total, Twice(n, small, scale), rstd


def rms_norm(x: Tensor, eps: float) -> tuple[Twice, Tensor]:
    """As `eager8.rms_norm`."""
    return _norm(x, None, eps)[1:]


def add_rms_norm(x: Tensor, y: Tensor, eps: float) -> tuple[Tensor, Twice, Tensor]:
    """As `eager8.add_rms_norm`."""
    return _norm(x, y, eps)


def rms_norm_backward(dn: Tensor, n: Tensor, rstd: Tensor, skip: Tensor | None = None) -> Twice:
    """As `eager8.rms_norm_backward`."""
    rows, width = dn.shape
    dx = torch.empty_like(dn)
    small, scale = room(rows, width, GRADIENT, dn.device)
    size = tile(width)
    _rms_norm_backward8_kernel[grid(rows, size)](
        dn, n, rstd, dn if skip is None else skip, dx, small, scale, rows, width,
        MOST=most(GRADIENT), SKIP=skip is not None, **size,
    )  # fmt: skip
    return Twice(dx, small, scale)
