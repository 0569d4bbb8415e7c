"""fp8 quantization and GEMMs: the number formats, the quantized matrices and every scale in one place.

Activations, weights and gradients are e4m3, gradients of logits e5m2. A forward or dgrad GEMM contracts over
features, so each row of its operands has its own scale (rowwise scaling): a power of two, so that
requantizing to another scale only loses values that become subnormal. A wgrad GEMM contracts over tokens, so
its operands are transposed and requantized with one scale per matrix (tensorwise scaling). Kernels of other
modules that quantize their own output call `fp8_row_scale` and `store_rows_fp8`. The gradient of logits has a
bound, so that one scale serves its rows and its transpose: `cross_entropy` writes both.
"""

# Triton kernels are untyped, and torch's fp8 GEMM has no public name.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportReturnType=false, reportPrivateUsage=false
# pyright: reportPrivateImportUsage=false, reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from steepen.kernels.triton_backend import row_grid, row_tile, tl, triton

ACTIVATION_DTYPE = torch.float8_e4m3fn  # 3 mantissa bits, largest value 448; for weights too
GRADIENT_DTYPE = torch.float8_e4m3fn  # rows have their own scales, so precision matters more than range
LOGIT_GRADIENT_DTYPE = torch.float8_e5m2  # 2 mantissa bits, but a range that holds the tails of a softmax
AMAX_MIN = 1e-30  # lower bound on a row's amax, so that a row of zeros has a finite scale
WGRAD_TOKEN_MULTIPLE = 16  # an fp8 GEMM contracts over a multiple of 16; tokens are padded with zeros


def fp8_max(dtype: torch.dtype) -> float:
    """Largest finite value of a dtype."""
    return torch.finfo(dtype).max


@dataclass(frozen=True)
class RowwiseFp8:
    """A (rows, columns) matrix in fp8 with one fp32 scale per row, (rows, 1): original ≈ data · scale.

    `original` is the matrix before quantization, or None if only the quantized form is needed.
    """

    original: Tensor | None
    data: Tensor
    scale: Tensor

    def __getitem__(self, rows: slice) -> RowwiseFp8:
        """A slice of the rows."""
        original = None if self.original is None else self.original[rows]
        return RowwiseFp8(original, self.data[rows], self.scale[rows])


@dataclass(frozen=True)
class DeferredFp8:
    """A matrix still in bf16, with the tensorwise scale (fp32 scalar) with which wgrad will quantize it."""

    original: Tensor
    scale: Tensor


@dataclass(frozen=True)
class TransposedFp8:
    """The transpose of a (tokens, features) matrix in fp8, (features, padded_tokens), with one scale (fp32
    scalar), as a wgrad GEMM reads it.
    """

    data: Tensor
    scale: Tensor


def unquantized(x: Tensor | RowwiseFp8 | DeferredFp8) -> Tensor:
    """The matrix before quantization, or the tensor itself."""
    if isinstance(x, Tensor):
        return x
    assert x.original is not None, "only the fp8 form of this matrix was kept"
    return x.original


# --- rowwise quantization -----------------------------------------------------------------------------------


def quantize_rows_reference(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize each row to fp8; returns (data, scale)."""
    wide = x.float()
    exact = fp8_max(dtype) / wide.abs().amax(-1).clamp_min(AMAX_MIN)
    multiplier = torch.ldexp(torch.ones_like(exact), torch.frexp(exact).exponent - 1)
    multiplier = multiplier.where(exact != 0, 0.0)[:, None]  # a row with an infinity becomes NaN
    return (wide * multiplier).to(dtype), 1 / multiplier


def quantize_activation_reference(x: Tensor) -> RowwiseFp8:
    """Quantize a (tokens, features) activation for a forward GEMM."""
    return RowwiseFp8(x, *quantize_rows_reference(x, ACTIVATION_DTYPE))


def quantize_gradient_reference(d: Tensor) -> RowwiseFp8:
    """Quantize a (tokens, features) gradient for a dgrad GEMM."""
    return RowwiseFp8(d, *quantize_rows_reference(d, GRADIENT_DTYPE))


TL_AMAX_MIN = tl.constexpr(AMAX_MIN)
FP32_EXPONENT_BITS = tl.constexpr(0x7F800000)
# A thread stores as many neighbouring fp8 values as it loads bf16 values: 8, a 16-byte load. Without this
# hint the compiler also makes the store 16 bytes wide and moves every value to another thread for it.
FP8_STORE_ELEMENTS = tl.constexpr(8)


@triton.jit
def fp8_row_scale(amax, FP8_MAX: tl.constexpr):
    """The power of two that scales a row with this amax into fp8, and its reciprocal."""
    multiplier = (FP8_MAX / tl.maximum(amax, TL_AMAX_MIN)).to(tl.int32, bitcast=True) & FP32_EXPONENT_BITS
    multiplier = multiplier.to(tl.float32, bitcast=True)
    return multiplier, 1.0 / multiplier


@triton.jit
def store_rows_fp8(x, fp8_ptr, scale_ptr, row, rows, offset, mask, FP8_MAX: tl.constexpr):
    """Quantize a tile of whole rows and store it with its scales."""
    multiplier, scale = fp8_row_scale(tl.max(tl.abs(x), axis=1), FP8_MAX)
    tl.store(scale_ptr + row, scale, mask=row < rows)
    target = tl.max_contiguous(fp8_ptr + offset, [1, FP8_STORE_ELEMENTS])
    tl.store(target, (x * multiplier[:, None]).to(fp8_ptr.dtype.element_ty), mask=mask)


# A program holds whole rows, so that the amax of a row and its fp8 values come from one read of it.
@triton.jit
def _quantize_rows_kernel(
    x_ptr, fp8_ptr, scale_ptr, rows, width, FP8_MAX: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row[:, None] < rows) & (column < width)
    offset = row[:, None] * width + column
    x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    store_rows_fp8(x, fp8_ptr, scale_ptr, row, rows, offset, mask, FP8_MAX)


def empty_rowwise(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Uninitialized fp8 data (rows, width) and fp32 scales (rows, 1)."""
    data = torch.empty(rows, width, dtype=dtype, device=device)
    return data, torch.empty(rows, 1, dtype=torch.float32, device=device)


def _quantize_rows_triton(x: Tensor, dtype: torch.dtype) -> RowwiseFp8:
    assert x.is_contiguous(), "the matrix must be contiguous"
    rows, width = x.shape
    data, scale = empty_rowwise(rows, width, dtype, x.device)
    tile = row_tile(width)
    _quantize_rows_kernel[row_grid(rows, tile)](x, data, scale, rows, width, FP8_MAX=fp8_max(dtype), **tile)
    return RowwiseFp8(x, data, scale)


def quantize_activation_triton(x: Tensor) -> RowwiseFp8:
    """`quantize_activation_reference` in Triton."""
    return _quantize_rows_triton(x, ACTIVATION_DTYPE)


def quantize_gradient_triton(d: Tensor) -> RowwiseFp8:
    """`quantize_gradient_reference` in Triton."""
    return _quantize_rows_triton(d, GRADIENT_DTYPE)


# --- weights ------------------------------------------------------------------------------------------------


def quantize_weight_reference_(
    data: Tensor, scale: Tensor, transposed: Tensor, transposed_scale: Tensor, amax: Tensor, weight: Tensor
) -> None:
    """Quantize a (rows, columns) weight rowwise into `data`, and its transpose rowwise into `transposed`.

    Scales are (1, rows) and (1, columns), as the second operand of a GEMM has them. `amax` is int32 workspace
    of rows + columns elements.
    """
    del amax
    for target, target_scale, matrix in (
        (data, scale, weight),
        (transposed, transposed_scale, weight.t()),
    ):
        values, scales = quantize_rows_reference(matrix, ACTIVATION_DTYPE)
        target.copy_(values)
        target_scale.copy_(scales.t())


WEIGHT_TILE = 64  # rows and columns of a tile: loads run along one side, stores along both


@triton.jit
def _weight_amax_kernel(weight_ptr, amax_ptr, rows, columns, TILE: tl.constexpr):
    """The amax of each row, then of each column, as int32: positive floats order as their bit patterns do."""
    tiles_across = tl.cdiv(columns, TILE)
    row = (tl.program_id(0) // tiles_across) * TILE + tl.arange(0, TILE)
    column = (tl.program_id(0) % tiles_across) * TILE + tl.arange(0, TILE)
    mask = (row[:, None] < rows) & (column[None, :] < columns)
    offset = row[:, None].to(tl.int64) * columns + column[None, :]
    magnitude = tl.abs(tl.load(weight_ptr + offset, mask=mask, other=0.0).to(tl.float32))
    row_amax = tl.max(magnitude, axis=1).to(tl.int32, bitcast=True)
    tl.atomic_max(amax_ptr + row, row_amax, mask=row < rows, sem="relaxed")
    column_amax = tl.max(magnitude, axis=0).to(tl.int32, bitcast=True)
    tl.atomic_max(amax_ptr + rows + column, column_amax, mask=column < columns, sem="relaxed")


# After `_weight_amax_kernel` both scales of every element are known, so one read of a tile writes the weight
# and its transpose, each contiguously. dgrad contracts over the weight's rows and needs the transpose.
@triton.jit
def _quantize_weight_kernel(
    weight_ptr, amax_ptr, fp8_ptr, scale_ptr, transposed_ptr, transposed_scale_ptr, rows, columns,
    FP8_MAX: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    tiles_across = tl.cdiv(columns, TILE)
    row = (tl.program_id(0) // tiles_across) * TILE + tl.arange(0, TILE)
    column = (tl.program_id(0) % tiles_across) * TILE + tl.arange(0, TILE)
    mask = (row[:, None] < rows) & (column[None, :] < columns)
    offset = row[:, None].to(tl.int64) * columns + column[None, :]
    weight = tl.load(weight_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    dtype = fp8_ptr.dtype.element_ty

    amax = tl.load(amax_ptr + row, mask=row < rows, other=0).to(tl.float32, bitcast=True)
    multiplier, scale = fp8_row_scale(amax, FP8_MAX)
    tl.store(fp8_ptr + offset, (weight * multiplier[:, None]).to(dtype), mask=mask)
    tl.store(scale_ptr + row, scale, mask=(row < rows) & (tl.program_id(0) % tiles_across == 0))

    amax = tl.load(amax_ptr + rows + column, mask=column < columns, other=0).to(tl.float32, bitcast=True)
    multiplier, scale = fp8_row_scale(amax, FP8_MAX)
    transposed = tl.trans(weight * multiplier[None, :]).to(dtype)
    offset = column[:, None].to(tl.int64) * rows + row[None, :]
    mask = (column[:, None] < columns) & (row[None, :] < rows)
    tl.store(transposed_ptr + offset, transposed, mask=mask)
    first_row = tl.program_id(0) < tiles_across
    tl.store(transposed_scale_ptr + column, scale, mask=(column < columns) & first_row)


def quantize_weight_triton_(
    data: Tensor, scale: Tensor, transposed: Tensor, transposed_scale: Tensor, amax: Tensor, weight: Tensor
) -> None:
    """`quantize_weight_reference_` in Triton."""
    rows, columns = weight.shape
    grid = (triton.cdiv(rows, WEIGHT_TILE) * triton.cdiv(columns, WEIGHT_TILE),)
    amax.zero_()
    _weight_amax_kernel[grid](weight, amax, rows, columns, TILE=WEIGHT_TILE)
    _quantize_weight_kernel[grid](
        weight, amax, data, scale, transposed, transposed_scale, rows, columns,
        FP8_MAX=fp8_max(ACTIVATION_DTYPE), TILE=WEIGHT_TILE,
    )  # fmt: skip


# --- forward and dgrad GEMM ---------------------------------------------------------------------------------


def fp8_gemm_reference(
    x: RowwiseFp8, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype, *, fast_accumulation: bool
) -> Tensor:
    """x @ weightᵀ in `dtype`, for an fp8 weight with one scale per row, (1, rows).

    `fast_accumulation` lets the GPU accumulate in fewer bits than fp32.
    """
    del fast_accumulation
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    product = (x.data.to(wide) * x.scale) @ (weight.to(wide) * weight_scale.t()).t()
    return product.to(dtype)


def fp8_gemm_cublas(
    x: RowwiseFp8, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype, *, fast_accumulation: bool
) -> Tensor:
    """`fp8_gemm_reference` on fp8 tensor cores."""
    return torch._scaled_mm(
        x.data, weight.t(), x.scale, weight_scale, out_dtype=dtype, use_fast_accum=fast_accumulation
    )


# --- wgrad GEMM ---------------------------------------------------------------------------------------------


def tensor_scale_reference(x: RowwiseFp8) -> Tensor:
    """Tensorwise scale: the maximum of the row scales (fp32 scalar)."""
    return x.scale.amax()


# One program: a matrix has so few rows that the time of a reduction by several is that of their cooperation.
@triton.jit
def _tensor_scale_kernel(scale_ptr, out_ptr, rows, BLOCK: tl.constexpr):
    largest = tl.zeros([BLOCK], tl.float32)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.load(scale_ptr + row, mask=row < rows, other=0.0))
    tl.store(out_ptr, tl.max(largest))


def tensor_scale_triton(x: RowwiseFp8) -> Tensor:
    """`tensor_scale_reference` in Triton."""
    out = torch.empty((), dtype=torch.float32, device=x.scale.device)
    _tensor_scale_kernel[(1,)](x.scale, out, len(x.scale), BLOCK=16_384, num_warps=32)
    return out


def defer_quantization(x: Tensor, scale: Tensor) -> DeferredFp8:
    """Leave the quantization of an activation to its wgrad GEMM; `scale` is its `tensor_scale`."""
    return DeferredFp8(x, scale)


def defer_quantization_of_norm(n: Tensor) -> DeferredFp8:
    """`defer_quantization` of an RMSNorm output, whose amax is at most √width."""
    scale = n.shape[1] ** 0.5 / fp8_max(ACTIVATION_DTYPE)
    return DeferredFp8(n, torch.full((), scale, device=n.device))


def padded_tokens(tokens: int) -> int:
    """Number of tokens rounded up to what a wgrad GEMM contracts over."""
    return math.ceil(tokens / WGRAD_TOKEN_MULTIPLE) * WGRAD_TOKEN_MULTIPLE


def empty_transposed(tokens: int, features: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialized fp8 data of a `TransposedFp8`, with its padding set to zero."""
    data = torch.empty(features, padded_tokens(tokens), dtype=dtype, device=device)
    data[:, tokens:].zero_()
    return data


def transpose_quantize_reference(x: RowwiseFp8 | DeferredFp8, scale: Tensor) -> Tensor:
    """Transpose a (tokens, features) matrix and quantize it to fp8 with one scale, as the wgrad GEMM needs.

    Returns (features, padded_tokens); the padding is zero.
    """
    if isinstance(x, DeferredFp8):
        wide, dtype = x.original, ACTIVATION_DTYPE
    else:
        wide, dtype = x.data.float() * x.scale, x.data.dtype
    return functional.pad((wide.float() / scale).t(), (0, padded_tokens(len(wide)) - len(wide))).to(dtype)


# GROUP tiles of a column follow each other, then those of the next column, so that programs that run at once
# read and write neighbouring bytes. A thread has PER_THREAD neighbouring rows, a 32-bit word of the result:
# words pass through shared memory, not single bytes.
TRANSPOSE_TILE = {"ROWS": 128, "COLUMNS": 64, "PER_THREAD": 4, "num_warps": 4}
ROWWISE_GROUP, DEFERRED_GROUP = 8, 2  # the fastest of 2, 8 and 32 on an H200: docs/log.md


def transpose_grid(rows: int, columns: int, tile: dict[str, int]) -> tuple[int, int, int]:
    """Launch grid of a kernel that calls `transpose_tile`."""
    group = tile["GROUP"]
    return group, triton.cdiv(columns, tile["COLUMNS"]), triton.cdiv(rows, tile["ROWS"] * group)


@triton.jit
def transpose_tile(GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PER_THREAD: tl.constexpr):
    """First row, rows (PER_THREAD, ROWS / PER_THREAD, 1) and columns (1, 1, COLUMNS) of a program's tile."""
    first = (tl.program_id(2) * GROUP + tl.program_id(0)) * ROWS
    within = tl.arange(0, ROWS // PER_THREAD)[None, :, None] * PER_THREAD
    row = first + within + tl.arange(0, PER_THREAD)[:, None, None]
    return first, row, tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, None, :]


# Loads run along features and stores along tokens, both contiguous.
@triton.jit
def store_transposed(
    x, out_ptr, first, rows, columns, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Store the transpose of a `transpose_tile` of fp8 values into a (columns, rows) matrix with a stride."""
    row = first + tl.arange(0, ROWS)[None, :]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[:, None]
    target = out_ptr + column.to(tl.int64) * stride + row
    tile = tl.reshape(tl.permute(x, (2, 1, 0)), (COLUMNS, ROWS))
    tl.store(target, tile, mask=(column < columns) & (row < rows))


@triton.jit
def _transpose_quantize_kernel(
    x_ptr, row_scale_ptr, scale_ptr, out_ptr, rows, columns, padded_rows,
    ROWWISE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PER_THREAD: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    first, row, column = transpose_tile(GROUP, ROWS, COLUMNS, PER_THREAD)
    mask = (row < rows) & (column < columns)
    x = tl.load(x_ptr + row.to(tl.int64) * columns + column, mask=mask, other=0.0)
    multiplier = 1 / tl.load(scale_ptr)
    if ROWWISE:
        multiplier *= tl.load(row_scale_ptr + row, mask=row < rows, other=0.0)
    quantized = (x.to(tl.float32) * multiplier).to(out_ptr.dtype.element_ty)
    store_transposed(quantized, out_ptr, first, padded_rows, columns, padded_rows, ROWS, COLUMNS)


def transpose_quantize_triton(x: RowwiseFp8 | DeferredFp8, scale: Tensor) -> Tensor:
    """`transpose_quantize_reference` in Triton."""
    if isinstance(x, DeferredFp8):
        matrix, row_scale, dtype = x.original, scale, ACTIVATION_DTYPE
    else:
        matrix, row_scale, dtype = x.data, x.scale, x.data.dtype
    assert matrix.is_contiguous(), "the matrix must be contiguous"
    rows, columns = matrix.shape
    out = torch.empty(columns, padded_tokens(rows), dtype=dtype, device=matrix.device)
    rowwise = isinstance(x, RowwiseFp8)
    tile = TRANSPOSE_TILE | {"GROUP": ROWWISE_GROUP if rowwise else DEFERRED_GROUP}
    _transpose_quantize_kernel[transpose_grid(out.shape[1], columns, tile)](
        matrix, row_scale, scale, out, rows, columns, out.shape[1], ROWWISE=rowwise, **tile
    )
    return out


def fp8_wgrad_gemm_reference(d: Tensor, x: Tensor, d_scale: Tensor, x_scale: Tensor) -> Tensor:
    """d @ xᵀ in fp32, for (features, padded_tokens) matrices that `transpose_quantize` returned."""
    return (d.float() @ x.float().t()) * (d_scale * x_scale)


def fp8_wgrad_gemm_cublas(d: Tensor, x: Tensor, d_scale: Tensor, x_scale: Tensor) -> Tensor:
    """`fp8_wgrad_gemm_reference` on fp8 tensor cores, accumulated in fp32."""
    return torch._scaled_mm(d, x.t(), d_scale, x_scale, out_dtype=torch.float32, use_fast_accum=False)
