"""RMSNorm and operations fused with it: a residual add, the boundary injection, the embedding lookup.

Matrices are (rows, width) with contiguous rows. Reductions are in fp32 (fp64 for fp64 inputs in the
reference). `rstd` is the reciprocal root mean square of each row. A trailing underscore marks functions that
overwrite their first argument.
"""

# Triton kernels are untyped.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportReturnType=false, reportIndexIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from steepen.kernels.fp8 import (
    ACTIVATION_DTYPE,
    GRADIENT_DTYPE,
    RowwiseFp8,
    empty_rowwise,
    fp8_max,
    quantize_activation_reference,
    quantize_gradient_reference,
    store_rows_fp8,
)
from steepen.kernels.triton_backend import row_grid, row_tile, tl, triton


def at_least_fp32(x: Tensor) -> Tensor:
    """x in fp32, or in fp64 if it is that already."""
    return x if x.dtype == torch.float64 else x.float()


# --- RMSNorm, and RMSNorm of a sum --------------------------------------------------------------------------


def rms_norm_reference(x: Tensor, eps: float, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """RMSNorm of each row without gain, in `dtype` (by default that of x); returns (normed, rstd)."""
    wide = at_least_fp32(x)
    rstd = torch.rsqrt(wide.square().mean(-1) + eps)
    return (wide * rstd[:, None]).to(dtype or x.dtype), rstd


def add_rms_norm_reference(
    x: Tensor, y: Tensor, eps: float, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """x + y in the dtype of x, and its RMSNorm in `dtype`; returns (sum, normed, rstd)."""
    total = x + y
    return (total, *rms_norm_reference(total, eps, dtype))


def rms_norm_backward_reference(
    dn: Tensor,
    n: Tensor,
    rstd: Tensor,
    residual_grad: Tensor | None = None,
    *,
    row_factor: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Gradient of an RMSNorm's input from the gradient dn of its output n.

    `row_factor` (rows,) multiplies dn first. `residual_grad` is the gradient that reaches the input along the
    residual connection, and is added. The result has the dtype of `out`, which may be n, else of
    `residual_grad`, else of dn.
    """
    d, y = at_least_fp32(dn), at_least_fp32(n)
    if row_factor is not None:
        d = d * row_factor[:, None]
    dx = rstd[:, None] * (d - y * (d * y).mean(-1, keepdim=True))
    if residual_grad is not None:
        dx = dx + at_least_fp32(residual_grad)
    return dx.to((dn if residual_grad is None else residual_grad).dtype) if out is None else out.copy_(dx)


def rms_norm_backward_rounded_reference(
    dn: Tensor, n: Tensor, rstd: Tensor, residual_grad: Tensor
) -> tuple[Tensor, Tensor]:
    """`rms_norm_backward_reference` and its result rounded to the dtype of dn, for GEMMs."""
    dx = rms_norm_backward_reference(dn, n, rstd, residual_grad)
    return dx, dx.to(dn.dtype)


# The norms are bound by memory: a row is read once, stays in registers while its sum of squares is formed,
# and everything that is made of it (sum, normed row, fp8 row) is written by the same program. All arithmetic
# is in fp32; a value is rounded only where it is stored.
@triton.jit
def _rms_norm_kernel(
    x_ptr, y_ptr, sum_ptr, n_ptr, rstd_ptr, fp8_ptr, scale_ptr, rows, width, eps,
    ADD: tl.constexpr, FP8_MAX: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """RMSNorm of x, or with ADD of x + y; with FP8_MAX also quantized."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row[:, None] < rows) & (column < width)
    offset = row[:, None] * width + column
    x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        y = tl.load(y_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        # The norm is that of the rounded sum: the backward pass has no other to differentiate at.
        total = (x + y).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + offset, total, mask=mask)
        x = total.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / width + eps)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    n = (x * rstd[:, None]).to(n_ptr.dtype.element_ty)
    tl.store(n_ptr + offset, n, mask=mask)
    if FP8_MAX is not None:
        store_rows_fp8(n.to(tl.float32), fp8_ptr, scale_ptr, row, rows, offset, mask, FP8_MAX)


# With n = x·rstd, dx = rstd·(dn − n·mean(dn·n)): the normed row and rstd are enough, so the input of a norm
# is never saved. The gradient along the residual connection is added here, where dx is in registers, and what
# the next GEMMs read (a rounded or an fp8 copy) is written in the same pass.
@triton.jit
def _rms_norm_backward_kernel(
    d_ptr, n_ptr, rstd_ptr, residual_ptr, factor_ptr, dx_ptr, rounded_ptr, fp8_ptr, scale_ptr, rows, width,
    RESIDUAL: tl.constexpr, FACTOR: tl.constexpr, ROUNDED: tl.constexpr, FP8_MAX: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradient of an RMSNorm's input; with ROUNDED also in a second dtype, with FP8_MAX also quantized."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row[:, None] < rows) & (column < width)
    offset = row[:, None] * width + column
    d = tl.load(d_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    n = tl.load(n_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
    if FACTOR:
        d *= tl.load(factor_ptr + row, mask=row < rows, other=0.0)[:, None]
    dx = rstd[:, None] * (d - n * (tl.sum(d * n, axis=1) / width)[:, None])
    if RESIDUAL:
        dx += tl.load(residual_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    dx = dx.to(dx_ptr.dtype.element_ty)
    tl.store(dx_ptr + offset, dx, mask=mask)
    if ROUNDED:
        tl.store(rounded_ptr + offset, dx.to(rounded_ptr.dtype.element_ty), mask=mask)
    if FP8_MAX is not None:
        store_rows_fp8(dx.to(tl.float32), fp8_ptr, scale_ptr, row, rows, offset, mask, FP8_MAX)


def _empty_rstd(x: Tensor) -> Tensor:
    return torch.empty(len(x), dtype=torch.float32, device=x.device)


def rms_norm_triton(x: Tensor, eps: float, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """`rms_norm_reference` in Triton."""
    rows, width = x.shape
    n, rstd = torch.empty_like(x, dtype=dtype), _empty_rstd(x)
    tile = row_tile(width, elements_per_thread=8)
    _rms_norm_kernel[row_grid(rows, tile)](
        x, x, x, n, rstd, n, rstd, rows, width, eps, ADD=False, FP8_MAX=None, **tile
    )
    return n, rstd


def add_rms_norm_triton(
    x: Tensor, y: Tensor, eps: float, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`add_rms_norm_reference` in Triton."""
    rows, width = x.shape
    total, n, rstd = torch.empty_like(x), torch.empty_like(x, dtype=dtype), _empty_rstd(x)
    tile = row_tile(width, elements_per_thread=8)
    _rms_norm_kernel[row_grid(rows, tile)](
        x, y, total, n, rstd, n, rstd, rows, width, eps, ADD=True, FP8_MAX=None, **tile
    )
    return total, n, rstd


def rms_norm_backward_triton(
    dn: Tensor,
    n: Tensor,
    rstd: Tensor,
    residual_grad: Tensor | None = None,
    *,
    row_factor: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`rms_norm_backward_reference` in Triton."""
    rows, width = dn.shape
    dx = torch.empty_like(dn if residual_grad is None else residual_grad) if out is None else out
    tile = row_tile(width, elements_per_thread=8)
    _rms_norm_backward_kernel[row_grid(rows, tile)](
        dn, n, rstd, dn if residual_grad is None else residual_grad,
        rstd if row_factor is None else row_factor, dx, dx, dx, rstd, rows, width,
        RESIDUAL=residual_grad is not None, FACTOR=row_factor is not None, ROUNDED=False, FP8_MAX=None,
        **tile,
    )  # fmt: skip
    return dx


def rms_norm_backward_rounded_triton(
    dn: Tensor, n: Tensor, rstd: Tensor, residual_grad: Tensor
) -> tuple[Tensor, Tensor]:
    """`rms_norm_backward_rounded_reference` in Triton."""
    if residual_grad.dtype == dn.dtype:
        dx = rms_norm_backward_triton(dn, n, rstd, residual_grad)
        return dx, dx
    rows, width = dn.shape
    dx, rounded = torch.empty_like(residual_grad), torch.empty_like(dn)
    tile = row_tile(width, elements_per_thread=8)
    _rms_norm_backward_kernel[row_grid(rows, tile)](
        dn, n, rstd, residual_grad, rstd, dx, rounded, dx, rstd, rows, width,
        RESIDUAL=True, FACTOR=False, ROUNDED=True, FP8_MAX=None, **tile,
    )  # fmt: skip
    return dx, rounded


def rms_norm_fp8_reference(
    x: Tensor, eps: float, dtype: torch.dtype | None = None
) -> tuple[RowwiseFp8, Tensor]:
    """`rms_norm_reference` with the output also quantized."""
    n, rstd = rms_norm_reference(x, eps, dtype)
    return quantize_activation_reference(n), rstd


def add_rms_norm_fp8_reference(
    x: Tensor, y: Tensor, eps: float, dtype: torch.dtype | None = None
) -> tuple[Tensor, RowwiseFp8, Tensor]:
    """`add_rms_norm_reference` with the normed output also quantized."""
    total, n, rstd = add_rms_norm_reference(x, y, eps, dtype)
    return total, quantize_activation_reference(n), rstd


def rms_norm_backward_fp8_reference(
    dn: Tensor, n: Tensor, rstd: Tensor, residual_grad: Tensor
) -> tuple[Tensor, RowwiseFp8]:
    """`rms_norm_backward_reference` and its result quantized, for GEMMs."""
    dx = rms_norm_backward_reference(dn, n, rstd, residual_grad)
    return dx, quantize_gradient_reference(dx)


def _norm_fp8_triton(
    x: Tensor, y: Tensor | None, eps: float, dtype: torch.dtype | None
) -> tuple[Tensor, RowwiseFp8, Tensor]:
    rows, width = x.shape
    total = x if y is None else torch.empty_like(x)
    n, rstd = torch.empty_like(x, dtype=dtype), _empty_rstd(x)
    data, scale = empty_rowwise(rows, width, ACTIVATION_DTYPE, x.device)
    tile = row_tile(width)
    _rms_norm_kernel[row_grid(rows, tile)](
        x, x if y is None else y, total, n, rstd, data, scale, rows, width, eps,
        ADD=y is not None, FP8_MAX=fp8_max(ACTIVATION_DTYPE), **tile,
    )  # fmt: skip
    return total, RowwiseFp8(n, data, scale), rstd


def rms_norm_fp8_triton(x: Tensor, eps: float, dtype: torch.dtype | None = None) -> tuple[RowwiseFp8, Tensor]:
    """`rms_norm_fp8_reference` in Triton."""
    return _norm_fp8_triton(x, None, eps, dtype)[1:]


def add_rms_norm_fp8_triton(
    x: Tensor, y: Tensor, eps: float, dtype: torch.dtype | None = None
) -> tuple[Tensor, RowwiseFp8, Tensor]:
    """`add_rms_norm_fp8_reference` in Triton."""
    return _norm_fp8_triton(x, y, eps, dtype)


def rms_norm_backward_fp8_triton(
    dn: Tensor, n: Tensor, rstd: Tensor, residual_grad: Tensor
) -> tuple[Tensor, RowwiseFp8]:
    """`rms_norm_backward_fp8_reference` in Triton."""
    rows, width = dn.shape
    dx = torch.empty_like(residual_grad)
    data, scale = empty_rowwise(rows, width, GRADIENT_DTYPE, dn.device)
    tile = row_tile(width)
    _rms_norm_backward_kernel[row_grid(rows, tile)](
        dn, n, rstd, residual_grad, rstd, dx, dx, data, scale, rows, width,
        RESIDUAL=True, FACTOR=False, ROUNDED=False, FP8_MAX=fp8_max(GRADIENT_DTYPE), **tile,
    )  # fmt: skip
    return dx, RowwiseFp8(dx, data, scale)


# --- boundary: RMSNorm of the state plus an injection -------------------------------------------------------


def norm_inject_reference(h: Tensor, e: Tensor, alpha: float, eps: float) -> tuple[Tensor, Tensor]:
    """RMSNorm(h) + alpha·e; returns (result, rstd of h)."""
    wide = at_least_fp32(h)
    rstd = torch.rsqrt(wide.square().mean(-1) + eps)
    return (wide * rstd[:, None] + alpha * at_least_fp32(e)).to(h.dtype), rstd


def norm_inject_backward_reference(d: Tensor, h: Tensor, rstd: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Gradients of h and e."""
    n = (at_least_fp32(h) * rstd[:, None]).to(h.dtype)
    return rms_norm_backward_reference(d, n, rstd), (alpha * at_least_fp32(d)).to(d.dtype)


# The boundary operator, RMSNorm(h) + α·e, in one read of h and e; with two kernels the normed stream would be
# written and read once more.
@triton.jit
def _norm_inject_kernel(h_ptr, e_ptr, out_ptr, rstd_ptr, width, alpha, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < width
    h = tl.load(h_ptr + row * width + column, mask=mask, other=0.0).to(tl.float32)
    e = tl.load(e_ptr + row * width + column, mask=mask, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(h * h) / width + eps)
    tl.store(rstd_ptr + row, rstd)
    tl.store(out_ptr + row * width + column, (h * rstd + alpha * e).to(out_ptr.dtype.element_ty), mask=mask)


# The normed h is computed again from h and rstd instead of being kept.
@triton.jit
def _norm_inject_backward_kernel(d_ptr, h_ptr, rstd_ptr, dh_ptr, de_ptr, width, alpha, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < width
    rstd = tl.load(rstd_ptr + row)
    d = tl.load(d_ptr + row * width + column, mask=mask, other=0.0).to(tl.float32)
    h = tl.load(h_ptr + row * width + column, mask=mask, other=0.0).to(tl.float32)
    n = (h * rstd).to(h_ptr.dtype.element_ty).to(tl.float32)
    dh = rstd * (d - n * (tl.sum(d * n) / width))
    tl.store(dh_ptr + row * width + column, dh.to(dh_ptr.dtype.element_ty), mask=mask)
    tl.store(de_ptr + row * width + column, (alpha * d).to(de_ptr.dtype.element_ty), mask=mask)


def _one_row(width: int) -> dict[str, int]:
    """Launch options of a kernel with one program per row."""
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(max(block // 256, 1), 16)}


def norm_inject_triton(h: Tensor, e: Tensor, alpha: float, eps: float) -> tuple[Tensor, Tensor]:
    """`norm_inject_reference` in Triton."""
    rows, width = h.shape
    out, rstd = torch.empty_like(h), _empty_rstd(h)
    _norm_inject_kernel[(rows,)](h, e, out, rstd, width, alpha, eps, **_one_row(width))
    return out, rstd


def norm_inject_backward_triton(d: Tensor, h: Tensor, rstd: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """`norm_inject_backward_reference` in Triton."""
    rows, width = h.shape
    dh, de = torch.empty_like(h), torch.empty_like(h)
    _norm_inject_backward_kernel[(rows,)](d, h, rstd, dh, de, width, alpha, **_one_row(width))
    return dh, de


# --- embedding lookup with RMSNorm --------------------------------------------------------------------------


def embed_norm_reference(
    tokens: Tensor, table: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """RMSNorm of the embedding rows of (rows,) tokens, in `dtype`; returns (normed, rstd)."""
    return rms_norm_reference(functional.embedding(tokens, table).to(dtype), eps)


def embed_norm_backward_reference_(grad: Tensor, tokens: Tensor, dn: Tensor, n: Tensor, rstd: Tensor) -> None:
    """Add the gradients of the embedding rows to the table's gradient."""
    grad.index_add_(0, tokens, rms_norm_backward_reference(dn, n, rstd).to(grad.dtype))


# Lookup and norm together: rows are read where they lie in the table, and only normed ones are written.
@triton.jit
def _embed_norm_kernel(token_ptr, table_ptr, n_ptr, rstd_ptr, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < width
    token = tl.load(token_ptr + row).to(tl.int64)
    x = tl.load(table_ptr + token * width + column, mask=mask, other=0.0)
    x = x.to(n_ptr.dtype.element_ty).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x) / width + eps)
    tl.store(rstd_ptr + row, rstd)
    tl.store(n_ptr + row * width + column, (x * rstd).to(n_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _embed_norm_backward_kernel(token_ptr, d_ptr, n_ptr, rstd_ptr, grad_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < width
    token = tl.load(token_ptr + row).to(tl.int64)
    d = tl.load(d_ptr + row * width + column, mask=mask, other=0.0).to(tl.float32)
    n = tl.load(n_ptr + row * width + column, mask=mask, other=0.0).to(tl.float32)
    dx = tl.load(rstd_ptr + row) * (d - n * (tl.sum(d * n) / width))
    # Atomic adds of one token's rows come in any order, so the sum is reproducible up to fp32 rounding.
    tl.atomic_add(grad_ptr + token * width + column, dx, mask=mask, sem="relaxed")


def embed_norm_triton(tokens: Tensor, table: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`embed_norm_reference` in Triton."""
    rows, width = len(tokens), table.shape[1]
    n = torch.empty(rows, width, dtype=dtype, device=table.device)
    rstd = _empty_rstd(n)
    _embed_norm_kernel[(rows,)](tokens, table, n, rstd, width, eps, **_one_row(width))
    return n, rstd


def embed_norm_backward_triton_(grad: Tensor, tokens: Tensor, dn: Tensor, n: Tensor, rstd: Tensor) -> None:
    """`embed_norm_backward_reference_` in Triton."""
    rows, width = dn.shape
    _embed_norm_backward_kernel[(rows,)](tokens, dn, n, rstd, grad, width, **_one_row(width))
