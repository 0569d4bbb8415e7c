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
from steepen.kernels.split_fp32 import SplitFp32, joined, load_split, store_split
from steepen.kernels.triton_backend import row_grid, row_tile, tl, triton


def at_least_fp32(x: Tensor) -> Tensor:
    """x in fp32, or in fp64 if it is that already."""
    return x if x.dtype == torch.float64 else x.float()


Addends = tuple[Tensor] | tuple[Tensor, Tensor]


def _split_if_wider(d: Tensor, operand: Tensor) -> tuple[Tensor | SplitFp32, Tensor]:
    """A gradient of the stream, and the same in the dtype of GEMM operands."""
    if d.dtype == operand.dtype:
        return d, d
    split = SplitFp32.split(d)
    return split, split.rounded


# --- RMSNorm, and RMSNorm of a sum --------------------------------------------------------------------------


def rms_norm_reference(x: Tensor, eps: float, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """RMSNorm of each row without gain, in `dtype` (by default that of x); returns (normed, rstd)."""
    wide = at_least_fp32(x)
    rstd = torch.rsqrt(wide.square().mean(-1) + eps)
    return (wide * rstd[:, None]).to(dtype or x.dtype), rstd


def add_rms_norm_reference(
    x: Tensor,
    addends: Addends,
    eps: float,
    dtype: torch.dtype | None = None,
    *,
    keep_sum: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """x plus one or two addends in the dtype of x, and its RMSNorm in `dtype`; returns (sum, normed, rstd).

    Without `keep_sum` the sum is not stored, and x stands in its place: a later call adds the same terms and
    more, which reads less than storing the sum would write.
    """
    total = at_least_fp32(x)
    for addend in addends:
        total = total + addend
    if keep_sum:
        total = total.to(x.dtype)
    return (total if keep_sum else x, *rms_norm_reference(total, eps, dtype or x.dtype))


def rms_norm_backward_reference(
    dn: Tensor,
    n: Tensor,
    rstd: Tensor,
    residual_grad: Tensor | SplitFp32 | None = None,
    *,
    row_factor: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Gradient of an RMSNorm's input from the gradient dn of its output n.

    `row_factor` (rows,) multiplies dn first. `residual_grad` is the gradient that reaches the input along the
    residual connection, and is added. The result has the dtype of `out`, which may be n, else of
    `residual_grad`, else of dn.
    """
    residual = None if residual_grad is None else joined(residual_grad)
    d, y = at_least_fp32(dn), at_least_fp32(n)
    if row_factor is not None:
        d = d * row_factor[:, None]
    dx = rstd[:, None] * (d - y * (d * y).mean(-1, keepdim=True))
    if residual is not None:
        dx = dx + at_least_fp32(residual)
    return dx.to((dn if residual is None else residual).dtype) if out is None else out.copy_(dx)


def rms_norm_backward_split_reference(
    dn: Tensor, n: Tensor, rstd: Tensor, residual_grad: Tensor | SplitFp32
) -> tuple[Tensor | SplitFp32, Tensor]:
    """`rms_norm_backward_reference`, and its result in the dtype of dn for GEMMs, which is a half of it."""
    return _split_if_wider(rms_norm_backward_reference(dn, n, rstd, residual_grad), dn)


# The norms are bound by memory: a row is read once, stays in registers while its sum of squares is formed,
# and everything that is made of it (sum, normed row, fp8 row) is written by the same program. All arithmetic
# is in fp32; a value is rounded only where it is stored.
@triton.jit
def _rms_norm_kernel(
    x_ptr, y_ptr, z_ptr, sum_ptr, n_ptr, rstd_ptr, fp8_ptr, scale_ptr, rows, width, eps,
    ADDENDS: tl.constexpr, KEEP_SUM: tl.constexpr, FP8_MAX: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """RMSNorm of x, of x + y or of x + y + z; with FP8_MAX also quantized."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row[:, None] < rows) & (column < width)
    offset = row[:, None] * width + column
    x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    if ADDENDS > 0:
        x += tl.load(y_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    if ADDENDS > 1:
        x += tl.load(z_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    if KEEP_SUM:
        # The norm is that of the rounded sum: the next block has no other to continue from.
        total = x.to(sum_ptr.dtype.element_ty)
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
# the next GEMMs read (the rounded half, or an fp8 copy) is written in the same pass.
@triton.jit
def _rms_norm_backward_kernel(
    d_ptr, n_ptr, rstd_ptr, residual_ptr, factor_ptr, dx_ptr, fp8_ptr, scale_ptr, rows, width,
    RESIDUAL: tl.constexpr, FACTOR: tl.constexpr, SPLIT_IN: tl.constexpr, SPLIT_OUT: tl.constexpr,
    FP8_MAX: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradient of an RMSNorm's input; with SPLIT_OUT as `SplitFp32`, with FP8_MAX also quantized.

    With SPLIT_IN the residual's gradient is a `SplitFp32`. Pointers to these are of int16.
    """
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
    half = tl.cast(rows, tl.int64) * width  # elements of a half
    if SPLIT_IN:
        dx += load_split(residual_ptr, offset, half, mask)
    elif RESIDUAL:
        dx += tl.load(residual_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    if SPLIT_OUT:
        store_split(dx_ptr, dx, offset, half, mask)
    else:
        dx = dx.to(dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + offset, dx, mask=mask)
    if FP8_MAX is not None:
        store_rows_fp8(dx.to(tl.float32), fp8_ptr, scale_ptr, row, rows, offset, mask, FP8_MAX)


def _norm_triton(
    x: Tensor,
    addends: tuple[Tensor, ...],
    eps: float,
    dtype: torch.dtype | None,
    *,
    keep_sum: bool,
    fp8: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(sum or x, normed, rstd); also quantized into `fp8`, data and scale."""
    rows, width = x.shape
    total = torch.empty_like(x) if keep_sum else x
    n, rstd = torch.empty_like(x, dtype=dtype), torch.empty(rows, dtype=torch.float32, device=x.device)
    y, z = (*addends, x, x)[:2]
    data, scale = fp8 or (n, rstd)
    tile = row_tile(width) if fp8 else row_tile(width, elements_per_thread=8)
    _rms_norm_kernel[row_grid(rows, tile)](
        x, y, z, total, n, rstd, data, scale, rows, width, eps,
        ADDENDS=len(addends), KEEP_SUM=keep_sum, FP8_MAX=fp8_max(data.dtype) if fp8 else None, **tile,
    )  # fmt: skip
    return total, n, rstd


def rms_norm_triton(x: Tensor, eps: float, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """`rms_norm_reference` in Triton."""
    return _norm_triton(x, (), eps, dtype, keep_sum=False)[1:]


def add_rms_norm_triton(
    x: Tensor,
    addends: Addends,
    eps: float,
    dtype: torch.dtype | None = None,
    *,
    keep_sum: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """`add_rms_norm_reference` in Triton."""
    return _norm_triton(x, addends, eps, dtype, keep_sum=keep_sum)


def _norm_backward_triton(
    dn: Tensor,
    n: Tensor,
    rstd: Tensor,
    residual_grad: Tensor | SplitFp32 | None,
    out: Tensor | SplitFp32,
    *,
    row_factor: Tensor | None = None,
    fp8: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Write the gradient of an RMSNorm's input to `out`; also quantized into `fp8`, data and scale."""
    rows, width = dn.shape
    residual, dx = (
        x.halves.view(torch.int16) if isinstance(x, SplitFp32) else x for x in (residual_grad, out)
    )
    data, scale = fp8 or (dn, rstd)
    tile = row_tile(width) if fp8 else row_tile(width, elements_per_thread=8)
    _rms_norm_backward_kernel[row_grid(rows, tile)](
        dn, n, rstd, dn if residual is None else residual, rstd if row_factor is None else row_factor,
        dx, data, scale, rows, width,
        RESIDUAL=residual is not None, FACTOR=row_factor is not None,
        SPLIT_IN=isinstance(residual_grad, SplitFp32), SPLIT_OUT=isinstance(out, SplitFp32),
        FP8_MAX=fp8_max(data.dtype) if fp8 else None, **tile,
    )  # fmt: skip


def rms_norm_backward_triton(
    dn: Tensor,
    n: Tensor,
    rstd: Tensor,
    residual_grad: Tensor | SplitFp32 | None = None,
    *,
    row_factor: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`rms_norm_backward_reference` in Triton."""
    split = isinstance(residual_grad, SplitFp32)
    like = dn if residual_grad is None or split else residual_grad
    dx = torch.empty_like(like, dtype=torch.float32 if split else like.dtype) if out is None else out
    _norm_backward_triton(dn, n, rstd, residual_grad, dx, row_factor=row_factor)
    return dx


def rms_norm_backward_split_triton(
    dn: Tensor, n: Tensor, rstd: Tensor, residual_grad: Tensor | SplitFp32
) -> tuple[Tensor | SplitFp32, Tensor]:
    """`rms_norm_backward_split_reference` in Triton."""
    if not isinstance(residual_grad, SplitFp32) and residual_grad.dtype == dn.dtype:
        dx = rms_norm_backward_triton(dn, n, rstd, residual_grad)
        return dx, dx
    split = SplitFp32.empty(*dn.shape, dn.device)
    _norm_backward_triton(dn, n, rstd, residual_grad, split)
    return split, split.rounded


def rms_norm_fp8_reference(
    x: Tensor, eps: float, dtype: torch.dtype | None = None
) -> tuple[RowwiseFp8, Tensor]:
    """`rms_norm_reference` with the output also quantized."""
    n, rstd = rms_norm_reference(x, eps, dtype)
    return quantize_activation_reference(n), rstd


def add_rms_norm_fp8_reference(
    x: Tensor,
    addends: Addends,
    eps: float,
    dtype: torch.dtype | None = None,
    *,
    keep_sum: bool = True,
) -> tuple[Tensor, RowwiseFp8, Tensor]:
    """`add_rms_norm_reference` with the normed output also quantized."""
    total, n, rstd = add_rms_norm_reference(x, addends, eps, dtype, keep_sum=keep_sum)
    return total, quantize_activation_reference(n), rstd


def rms_norm_backward_fp8_reference(
    dn: Tensor, n: Tensor, rstd: Tensor, residual_grad: Tensor
) -> tuple[Tensor, RowwiseFp8]:
    """`rms_norm_backward_reference` and its result quantized, for GEMMs."""
    dx = rms_norm_backward_reference(dn, n, rstd, residual_grad)
    return dx, quantize_gradient_reference(dx)


def _norm_fp8_triton(
    x: Tensor, addends: tuple[Tensor, ...], eps: float, dtype: torch.dtype | None, *, keep_sum: bool
) -> tuple[Tensor, RowwiseFp8, Tensor]:
    fp8 = empty_rowwise(*x.shape, ACTIVATION_DTYPE, x.device)
    total, n, rstd = _norm_triton(x, addends, eps, dtype, keep_sum=keep_sum, fp8=fp8)
    return total, RowwiseFp8(n, *fp8), rstd


def rms_norm_fp8_triton(x: Tensor, eps: float, dtype: torch.dtype | None = None) -> tuple[RowwiseFp8, Tensor]:
    """`rms_norm_fp8_reference` in Triton."""
    return _norm_fp8_triton(x, (), eps, dtype, keep_sum=False)[1:]


def add_rms_norm_fp8_triton(
    x: Tensor,
    addends: Addends,
    eps: float,
    dtype: torch.dtype | None = None,
    *,
    keep_sum: bool = True,
) -> tuple[Tensor, RowwiseFp8, Tensor]:
    """`add_rms_norm_fp8_reference` in Triton."""
    return _norm_fp8_triton(x, addends, eps, dtype, keep_sum=keep_sum)


def rms_norm_backward_fp8_triton(
    dn: Tensor, n: Tensor, rstd: Tensor, residual_grad: Tensor
) -> tuple[Tensor, RowwiseFp8]:
    """`rms_norm_backward_fp8_reference` in Triton."""
    dx, fp8 = torch.empty_like(residual_grad), empty_rowwise(*dn.shape, GRADIENT_DTYPE, dn.device)
    _norm_backward_triton(dn, n, rstd, residual_grad, dx, fp8=fp8)
    return dx, RowwiseFp8(dx, *fp8)


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


def inject_norm_reference(
    h: Tensor, e: Tensor, alpha: float, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x = RMSNorm(h) + alpha·e, and RMSNorm of x in `dtype`; returns (x, rstd of h, normed, rstd of x)."""
    x, h_rstd = norm_inject_reference(h, e, alpha, eps)
    return (x, h_rstd, *rms_norm_reference(x, eps, dtype))


def inject_norm_backward_reference(
    dn: Tensor,
    n: Tensor,
    rstd: Tensor,
    residual_grad: Tensor | SplitFp32,
    h: Tensor,
    h_rstd: Tensor,
    alpha: float,
) -> tuple[Tensor | SplitFp32, Tensor, Tensor]:
    """Gradient of h, the same as an operand of GEMMs, and the gradient of e, from those of the normed x and
    of x itself.
    """
    dx = rms_norm_backward_reference(dn, n, rstd, residual_grad)
    dh, de = norm_inject_backward_reference(dx, h, h_rstd, alpha)
    return *_split_if_wider(dh, dn), de


# The boundary operator, RMSNorm(h) + α·e, in one read of h and e; with two kernels the normed stream would be
# written and read once more. With NORM also the RMSNorm of the result, with which the next block begins.
@triton.jit
def _norm_inject_kernel(
    h_ptr, e_ptr, out_ptr, rstd_ptr, n_ptr, n_rstd_ptr, width, alpha, eps,
    NORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < width
    h = tl.load(h_ptr + row * width + column, mask=mask, other=0.0).to(tl.float32)
    e = tl.load(e_ptr + row * width + column, mask=mask, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(h * h) / width + eps)
    tl.store(rstd_ptr + row, rstd)
    out = (h * rstd + alpha * e).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * width + column, out, mask=mask)
    if NORM:
        x = out.to(tl.float32)
        n_rstd = tl.rsqrt(tl.sum(x * x) / width + eps)
        tl.store(n_rstd_ptr + row, n_rstd)
        tl.store(n_ptr + row * width + column, (x * n_rstd).to(n_ptr.dtype.element_ty), mask=mask)


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


# The gradient of x, between the two norms, exists in registers only.
@triton.jit
def _inject_norm_backward_kernel(
    d_ptr, n_ptr, rstd_ptr, residual_ptr, h_ptr, h_rstd_ptr, dh_ptr, de_ptr, rows, width, alpha,
    SPLIT_IN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < width
    offset, half = row * width + column, tl.cast(rows, tl.int64) * width
    d = tl.load(d_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    n = tl.load(n_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    dx = tl.load(rstd_ptr + row) * (d - n * (tl.sum(d * n) / width))
    if SPLIT_IN:
        dx += load_split(residual_ptr, offset, half, mask)
    else:
        dx += tl.load(residual_ptr + offset, mask=mask, other=0.0)
    tl.store(de_ptr + offset, alpha * dx, mask=mask)
    h_rstd = tl.load(h_rstd_ptr + row)
    n = tl.load(h_ptr + offset, mask=mask, other=0.0) * h_rstd
    store_split(dh_ptr, h_rstd * (dx - n * (tl.sum(dx * n) / width)), offset, half, mask)


def _one_row(width: int) -> dict[str, int]:
    """Launch options of a kernel with one program per row."""
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(max(block // 256, 1), 16)}


def norm_inject_triton(h: Tensor, e: Tensor, alpha: float, eps: float) -> tuple[Tensor, Tensor]:
    """`norm_inject_reference` in Triton."""
    rows, width = h.shape
    out, rstd = torch.empty_like(h), torch.empty(rows, dtype=torch.float32, device=h.device)
    _norm_inject_kernel[(rows,)](h, e, out, rstd, out, rstd, width, alpha, eps, NORM=False, **_one_row(width))
    return out, rstd


def inject_norm_triton(
    h: Tensor, e: Tensor, alpha: float, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`inject_norm_reference` in Triton."""
    rows, width = h.shape
    x, n = torch.empty_like(h), torch.empty_like(h, dtype=dtype)
    h_rstd, rstd = torch.empty(2, rows, dtype=torch.float32, device=h.device)
    _norm_inject_kernel[(rows,)](h, e, x, h_rstd, n, rstd, width, alpha, eps, NORM=True, **_one_row(width))
    return x, h_rstd, n, rstd


def inject_norm_backward_triton(
    dn: Tensor,
    n: Tensor,
    rstd: Tensor,
    residual_grad: Tensor | SplitFp32,
    h: Tensor,
    h_rstd: Tensor,
    alpha: float,
) -> tuple[SplitFp32, Tensor, Tensor]:
    """`inject_norm_backward_reference` in Triton, for a stream in fp32 and GEMMs in bf16."""
    rows, width = h.shape
    dh, de = SplitFp32.empty(rows, width, h.device), torch.empty_like(h)
    split = isinstance(residual_grad, SplitFp32)
    residual = residual_grad.halves.view(torch.int16) if split else residual_grad
    _inject_norm_backward_kernel[(rows,)](
        dn, n, rstd, residual, h, h_rstd, dh.halves.view(torch.int16), de, rows, width, alpha,
        SPLIT_IN=split, **_one_row(width),
    )  # fmt: skip
    return dh, dh.rounded, de


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
    rstd = torch.empty(rows, dtype=torch.float32, device=table.device)
    _embed_norm_kernel[(rows,)](tokens, table, n, rstd, width, eps, **_one_row(width))
    return n, rstd


def embed_norm_backward_triton_(grad: Tensor, tokens: Tensor, dn: Tensor, n: Tensor, rstd: Tensor) -> None:
    """`embed_norm_backward_reference_` in Triton."""
    rows, width = dn.shape
    _embed_norm_backward_kernel[(rows,)](tokens, dn, n, rstd, grad, width, **_one_row(width))
