"""RMSNorm and what stands beside it: a residual sum, the boundary's injection, the embedding's rows.

For products in eight bits, whose largest number is MOST, norms and their inputs' gradients are in them too.
"""

# Triton's language is untyped.
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportCallIssue=false, reportReturnType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from steepen.kernels.eight_rows import write_rows
from steepen.kernels.row_launch import grid, tile


@triton.jit
def rms_norm_kernel(
    x_ptr, y_ptr, sum_ptr, n_ptr, rstd_ptr, small_ptr, scale_ptr, rows, width, eps,
    ADD: tl.constexpr, MOST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The norm of x, or of x + y."""
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
    if MOST is not None:
        write_rows(n.to(tl.float32), small_ptr, scale_ptr, row, rows, place, inside, MOST)


@triton.jit
def rms_norm_backward_kernel(
    d_ptr, n_ptr, rstd_ptr, skip_ptr, factor_ptr, dx_ptr, small_ptr, scale_ptr, rows, width,
    SKIP: tl.constexpr, FACTOR: tl.constexpr, MOST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of a norm's input, and what else flows into that."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row[:, None] < rows) & (column < width)
    place = row[:, None] * width + column
    d = tl.load(d_ptr + place, mask=inside, other=0.0).to(tl.float32)
    n = tl.load(n_ptr + place, mask=inside, other=0.0).to(tl.float32)
    rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
    if FACTOR:
        d *= tl.load(factor_ptr + row, mask=row < rows, other=0.0)[:, None]
    dx = rstd[:, None] * (d - n * (tl.sum(d * n, axis=1) / width)[:, None])
    if SKIP:
        dx += tl.load(skip_ptr + place, mask=inside, other=0.0).to(tl.float32)
    dx = dx.to(dx_ptr.dtype.element_ty)
    tl.store(dx_ptr + place, dx, mask=inside)
    if MOST is not None:
        write_rows(dx.to(tl.float32), small_ptr, scale_ptr, row, rows, place, inside, MOST)


@triton.jit
def _norm_inject_kernel(h_ptr, e_ptr, out_ptr, rstd_ptr, width, alpha, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    h = tl.load(h_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
    e = tl.load(e_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(h * h) / width + eps)
    tl.store(rstd_ptr + row, rstd)
    tl.store(out_ptr + row * width + column, (h * rstd + alpha * e).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _norm_inject_backward_kernel(d_ptr, h_ptr, rstd_ptr, dh_ptr, de_ptr, width, alpha, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    rstd = tl.load(rstd_ptr + row)
    d = tl.load(d_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
    h = tl.load(h_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
    n = (h * rstd).to(h_ptr.dtype.element_ty).to(tl.float32)
    dh = rstd * (d - n * (tl.sum(d * n) / width))
    tl.store(dh_ptr + row * width + column, dh.to(dh_ptr.dtype.element_ty), mask=inside)
    tl.store(de_ptr + row * width + column, (alpha * d).to(de_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _embed_norm_kernel(token_ptr, table_ptr, n_ptr, rstd_ptr, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    token = tl.load(token_ptr + row).to(tl.int64)
    x = tl.load(table_ptr + token * width + column, mask=inside, other=0.0)
    x = x.to(n_ptr.dtype.element_ty).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x) / width + eps)
    tl.store(rstd_ptr + row, rstd)
    tl.store(n_ptr + row * width + column, (x * rstd).to(n_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _embed_norm_backward_kernel(token_ptr, d_ptr, n_ptr, rstd_ptr, grad_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    token = tl.load(token_ptr + row).to(tl.int64)
    d = tl.load(d_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
    n = tl.load(n_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
    dx = tl.load(rstd_ptr + row) * (d - n * (tl.sum(d * n) / width))
    # Rows of one token meet here in any order: their sum is reproducible up to fp32 rounding.
    tl.atomic_add(grad_ptr + token * width + column, dx, mask=inside, sem="relaxed")


def _block(width: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(max(block // 256, 1), 16)}


def _reciprocals(x: Tensor) -> Tensor:
    return torch.empty(len(x), dtype=torch.float32, device=x.device)


def rms_norm(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `eager.rms_norm`."""
    rows, width = x.shape
    n, rstd = torch.empty_like(x), _reciprocals(x)
    size = tile(width, each=8)
    rms_norm_kernel[grid(rows, size)](
        x, x, x, n, rstd, n, rstd, rows, width, eps, ADD=False, MOST=None, **size
    )
    return n, rstd


def add_rms_norm(x: Tensor, y: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """As `eager.add_rms_norm`."""
    rows, width = x.shape
    total, n, rstd = torch.empty_like(x), torch.empty_like(x), _reciprocals(x)
    size = tile(width, each=8)
    rms_norm_kernel[grid(rows, size)](
        x, y, total, n, rstd, n, rstd, rows, width, eps, ADD=True, MOST=None, **size
    )
    return total, n, rstd


def rms_norm_backward(
    dn: Tensor,
    n: Tensor,
    rstd: Tensor,
    skip: Tensor | None = None,
    *,
    factor: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """As `eager.rms_norm_backward`."""
    rows, width = dn.shape
    dx = torch.empty_like(dn) if out is None else out
    size = tile(width, each=8)
    rms_norm_backward_kernel[grid(rows, size)](
        dn, n, rstd, dn if skip is None else skip, rstd if factor is None else factor, dx, dx, rstd,
        rows, width, SKIP=skip is not None, FACTOR=factor is not None, MOST=None, **size,
    )  # fmt: skip
    return dx


def norm_inject(h: Tensor, e: Tensor, alpha: float, eps: float) -> tuple[Tensor, Tensor]:
    """As `eager.norm_inject`."""
    rows, width = h.shape
    out, rstd = torch.empty_like(h), _reciprocals(h)
    _norm_inject_kernel[(rows,)](h, e, out, rstd, width, alpha, eps, **_block(width))
    return out, rstd


def norm_inject_backward(d: Tensor, h: Tensor, rstd: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """As `eager.norm_inject_backward`."""
    rows, width = h.shape
    dh, de = torch.empty_like(h), torch.empty_like(h)
    _norm_inject_backward_kernel[(rows,)](d, h, rstd, dh, de, width, alpha, **_block(width))
    return dh, de


def embed_norm(tokens: Tensor, table: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As `eager.embed_norm`."""
    rows, width = len(tokens), table.shape[1]
    n = torch.empty(rows, width, dtype=dtype, device=table.device)
    rstd = _reciprocals(n)
    _embed_norm_kernel[(rows,)](tokens, table, n, rstd, width, eps, **_block(width))
    return n, rstd


def embed_norm_backward_(grad: Tensor, tokens: Tensor, dn: Tensor, n: Tensor, rstd: Tensor) -> None:
    """As `eager.embed_norm_backward_`."""
    rows, width = dn.shape
    _embed_norm_backward_kernel[(rows,)](tokens, dn, n, rstd, grad, width, **_block(width))
