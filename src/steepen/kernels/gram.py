"""Gram matrices X Xᵀ and quadratic polynomials of them, batched, for Muon's orthogonalization.

Both results are symmetric, so the Triton kernel computes only the tiles on and below the diagonal and stores
each one twice: half the FLOPs of a batched GEMM.
"""

# Triton kernels are untyped.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportReturnType=false, reportIndexIssue=false, reportOperatorIssue=false

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from steepen.kernels.triton_backend import TensorDescriptor, tl, triton


def gram_reference(x: Tensor, out: Tensor | None = None) -> Tensor:
    """x @ x.mT of each matrix of a (count, m, n) stack, accumulated in fp32, in x's dtype."""
    return torch.bmm(x, x.mT, out=out)


def symmetric_polynomial_reference(
    gram: Tensor, b: float, c: float, *, a: float = 0.0, out: Tensor | None = None
) -> Tensor:
    """a·I + b·G + c·G @ G of each symmetric matrix G of a (count, m, m) stack, in G's dtype."""
    result = torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=out)
    if a:
        result.diagonal(dim1=-2, dim2=-1).add_(a)
    return result


class TileConfig(NamedTuple):
    """Tiling of a symmetric GEMM: a size × size tile of the result, `depth` columns of x per step."""

    size: int
    depth: int
    warps: int
    stages: int


# The choice depends on the matrix size alone, never on the batch, so that a matrix's result does not depend
# on its neighbours. It is fixed because autotuning would be paid for at the start of every run.
SMALL_TILE = TileConfig(64, 64, 4, 4)  # up to 512 rows, larger tiles leave most multiprocessors idle
LARGE_TILE = TileConfig(128, 64, 8, 3)  # two fit on a multiprocessor: one computes while the other stores
SMALL_TILE_MAX_ROWS = 512
USE_TMA = True  # on Hopper and later, tiles are loaded by the tensor memory accelerator


def tile_config(rows: int, element_bytes: int) -> TileConfig:
    """Tiling for matrices of this many rows; the shared memory it takes does not depend on the dtype."""
    tile = SMALL_TILE if rows <= SMALL_TILE_MAX_ROWS else LARGE_TILE
    return tile._replace(depth=tile.depth * 2 // element_bytes)


@triton.jit
def _symmetric_gemm_kernel(
    x_ptr,
    row_tiles,
    out_ptr,
    rows,
    columns,
    stride_matrix,
    stride_row,
    stride_column,
    a,
    b,
    c,
    POLYNOMIAL: tl.constexpr,
    EVEN_ROWS: tl.constexpr,
    EVEN_COLUMNS: tl.constexpr,
    SIZE: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """x @ xᵀ, or for a symmetric x the polynomial a·I + b·x + c·x²: one tile and its mirror image."""
    # Tiles are numbered row by row down the triangle, so that neighbours share rows of x in the L2 cache.
    tile = tl.program_id(0)
    matrix = tl.program_id(1).to(tl.int64)
    i = ((tl.sqrt(8.0 * tile + 1.0) - 1.0) * 0.5).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > tile, i - 1, i)  # in case the square root was rounded across an integer
    i = tl.where((i + 1) * (i + 2) // 2 <= tile, i + 1, i)
    j = tile - i * (i + 1) // 2

    span = tl.arange(0, SIZE)
    depth = tl.arange(0, DEPTH)
    index_j, index_i = j * SIZE + span, i * SIZE + span
    row_i, row_j = index_i, index_j
    if not EVEN_ROWS:  # rows past the end wrap around and are not stored
        row_i, row_j = index_i % rows, index_j % rows
    x_ptr += matrix * stride_matrix
    left = x_ptr + row_i[:, None] * stride_row + depth[None, :] * stride_column
    right = x_ptr + row_j[None, :] * stride_row + depth[:, None] * stride_column
    first_i = tl.program_id(1) * rows + i * SIZE
    first_j = tl.program_id(1) * rows + j * SIZE
    total = tl.zeros((SIZE, SIZE), dtype=tl.float32)
    for start in range(0, columns, DEPTH):
        if row_tiles is not None:  # a TMA descriptor
            first = row_tiles.load([first_i, start])
            second = row_tiles.load([first_j, start]).T
        elif EVEN_COLUMNS:
            first = tl.load(left)
            second = tl.load(right)
        else:
            depth_mask = depth < columns - start
            first = tl.load(left, mask=depth_mask[None, :], other=0.0)
            second = tl.load(right, mask=depth_mask[:, None], other=0.0)
        total = tl.dot(first, second, total, input_precision="ieee")
        left += DEPTH * stride_column
        right += DEPTH * stride_column

    if POLYNOMIAL:
        x = tl.load(x_ptr + row_i[:, None] * stride_row + row_j[None, :] * stride_column)
        total = c * total + b * x.to(tl.float32)
        total += tl.where(index_i[:, None] == index_j[None, :], a, 0.0)
    result = total.to(out_ptr.dtype.element_ty)
    out_ptr += matrix * rows * rows
    lower = out_ptr + index_i[:, None] * rows + index_j[None, :]
    upper = out_ptr + index_j[:, None] * rows + index_i[None, :]
    if EVEN_ROWS:
        tl.store(lower, result)
        if i != j:
            tl.store(upper, tl.trans(result))
    else:
        tl.store(lower, result, mask=(index_i[:, None] < rows) & (index_j[None, :] < rows))
        if i != j:
            mask = (index_j[:, None] < rows) & (index_i[None, :] < rows)
            tl.store(upper, tl.trans(result), mask=mask)


def _launch(x: Tensor, out: Tensor | None, polynomial: tuple[float, float, float] | None) -> Tensor:
    count, rows, columns = x.shape
    if out is None:
        out = torch.empty(count, rows, rows, dtype=x.dtype, device=x.device)
    assert out.shape == (count, rows, rows) and out.is_contiguous(), "out must be contiguous, (count, m, m)"
    assert out.data_ptr() != x.data_ptr(), "out cannot be the input: tiles are still being read from it"
    a, b, c = polynomial or (0.0, 0.0, 0.0)
    tile = tile_config(rows, x.element_size())
    tiles_down = triton.cdiv(rows, tile.size)
    even_rows = rows % tile.size == 0
    _symmetric_gemm_kernel[tiles_down * (tiles_down + 1) // 2, count](
        x,
        _row_tiles(x, tile) if even_rows else None,
        out,
        rows,
        columns,
        *x.stride(),
        a,
        b,
        c,
        POLYNOMIAL=polynomial is not None,
        EVEN_ROWS=even_rows,
        EVEN_COLUMNS=columns % tile.depth == 0,
        SIZE=tile.size,
        DEPTH=tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def _row_tiles(x: Tensor, tile: TileConfig) -> TensorDescriptor | None:
    """TMA descriptor of all rows of the stack, or None if TMA is missing or x is not aligned for it."""
    aligned = x.is_contiguous() and x.data_ptr() % 16 == 0 and x.shape[2] * x.element_size() % 16 == 0
    has_tma = not x.is_cuda or torch.cuda.get_device_capability(x.device) >= (9, 0)
    if not (USE_TMA and aligned and has_tma):
        return None
    return TensorDescriptor.from_tensor(x.view(-1, x.shape[2]), [tile.size, tile.depth])


def gram_triton(x: Tensor, out: Tensor | None = None) -> Tensor:
    """`gram_reference` in Triton."""
    return _launch(x, out, None)


def symmetric_polynomial_triton(
    gram: Tensor, b: float, c: float, *, a: float = 0.0, out: Tensor | None = None
) -> Tensor:
    """`symmetric_polynomial_reference` in Triton."""
    return _launch(gram, out, (a, b, c))
