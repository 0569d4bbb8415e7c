"""Products that come out symmetric, at half the work: only the tiles on and below the diagonal are computed.

The plain twins in `eager` have the same names.
"""

# Inside a kernel the names are Triton's own language, which carries no types for a checker to follow,
# and a launch takes options that the kernel's signature does not have.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportCallIssue=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


class Tiles(NamedTuple):
    """How a product is cut up: an edge × edge tile of the result, `depth` columns of the factor at a time."""

    edge: int
    depth: int
    warps: int
    stages: int


# By size alone and never by what else is in the batch, so that a matrix's result does not depend on it;
# fixed rather than searched for, since a search would be paid at the start of every run.
SMALL = Tiles(64, 64, 4, 4)  # up to 512 rows larger tiles would leave most of a GPU's processors idle
LARGE = Tiles(128, 64, 8, 3)  # two fit on a processor: one computes while the other stores
COPY_ENGINE = True  # on Hopper and later, have tiles fetched by the copy engine and not by the threads


def tiles_for(rows: int, bytes_each: int) -> Tiles:
    """The tiles for matrices of this many rows, its numbers of so many bytes."""
    tiles = SMALL if rows <= 512 else LARGE
    return tiles._replace(depth=tiles.depth * 2 // bytes_each)  # always as much shared memory


@triton.jit
def _symmetric_product(
    x_ptr,
    strips,
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
    EDGE: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """x·xᵀ, or for a symmetric x the polynomial a + b·x + c·x²: one tile, and its mirror image."""
    # Tiles are numbered row by row down the triangle: neighbours share a strip of x in the cache.
    tile = tl.program_id(0)
    matrix = tl.program_id(1).to(tl.int64)
    i = ((tl.sqrt(8.0 * tile + 1.0) - 1.0) * 0.5).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > tile, i - 1, i)  # should the root have been rounded across a whole number
    i = tl.where((i + 1) * (i + 2) // 2 <= tile, i + 1, i)
    j = tile - i * (i + 1) // 2

    span = tl.arange(0, EDGE)
    across = tl.arange(0, DEPTH)
    above, below = j * EDGE + span, i * EDGE + span
    row_i, row_j = below, above
    if not EVEN_ROWS:  # rows past the end read others instead, and are not stored
        row_i, row_j = below % rows, above % rows
    x_ptr += matrix * stride_matrix
    left = x_ptr + row_i[:, None] * stride_row + across[None, :] * stride_column
    right = x_ptr + row_j[None, :] * stride_row + across[:, None] * stride_column
    first_i = tl.program_id(1) * rows + i * EDGE
    first_j = tl.program_id(1) * rows + j * EDGE
    total = tl.zeros((EDGE, EDGE), dtype=tl.float32)
    for start in range(0, columns, DEPTH):
        if strips is not None:  # the copy engine fetches the tiles
            first = strips.load([first_i, start])
            second = strips.load([first_j, start]).T
        elif EVEN_COLUMNS:
            first = tl.load(left)
            second = tl.load(right)
        else:
            inside = across < columns - start
            first = tl.load(left, mask=inside[None, :], other=0.0)
            second = tl.load(right, mask=inside[:, None], other=0.0)
        total = tl.dot(first, second, total, input_precision="ieee")
        left += DEPTH * stride_column
        right += DEPTH * stride_column

    if POLYNOMIAL:
        itself = tl.load(x_ptr + row_i[:, None] * stride_row + row_j[None, :] * stride_column)
        total = c * total + b * itself.to(tl.float32)
        total += tl.where(below[:, None] == above[None, :], a, 0.0)
    result = total.to(out_ptr.dtype.element_ty)
    out_ptr += matrix * rows * rows
    here = out_ptr + below[:, None] * rows + above[None, :]
    mirrored = out_ptr + above[:, None] * rows + below[None, :]
    if EVEN_ROWS:
        tl.store(here, result)
        if i != j:
            tl.store(mirrored, tl.trans(result))
    else:
        tl.store(here, result, mask=(below[:, None] < rows) & (above[None, :] < rows))
        if i != j:
            mask = (above[:, None] < rows) & (below[None, :] < rows)
            tl.store(mirrored, tl.trans(result), mask=mask)


def _launch(x: Tensor, out: Tensor | None, polynomial: tuple[float, float, float] | None) -> Tensor:
    count, rows, columns = x.shape
    if out is None:
        out = torch.empty(count, rows, rows, dtype=x.dtype, device=x.device)
    assert out.shape == (count, rows, rows) and out.is_contiguous(), "out must be contiguous, (count, m, m)"
    assert out.data_ptr() != x.data_ptr(), "out cannot be the input: tiles are still being read from it"
    a, b, c = polynomial or (0.0, 0.0, 0.0)
    tiles = tiles_for(rows, x.element_size())
    along = triton.cdiv(rows, tiles.edge)
    even = rows % tiles.edge == 0
    _symmetric_product[along * (along + 1) // 2, count](
        x,
        _strips(x, tiles) if even else None,
        out,
        rows,
        columns,
        *x.stride(),
        a,
        b,
        c,
        POLYNOMIAL=polynomial is not None,
        EVEN_ROWS=even,
        EVEN_COLUMNS=columns % tiles.depth == 0,
        EDGE=tiles.edge,
        DEPTH=tiles.depth,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return out


def _strips(x: Tensor, tiles: Tiles) -> TensorDescriptor | None:
    """All rows of the stack for the copy engine, where its alignment allows."""
    aligned = x.is_contiguous() and x.data_ptr() % 16 == 0 and x.shape[2] * x.element_size() % 16 == 0
    able = not x.is_cuda or torch.cuda.get_device_capability(x.device) >= (9, 0)
    if not (COPY_ENGINE and aligned and able):
        return None
    return TensorDescriptor.from_tensor(x.view(-1, x.shape[2]), [tiles.edge, tiles.depth])


def gram(x: Tensor, out: Tensor | None = None) -> Tensor:
    """x @ x.mT for each matrix of a (count, m, n) stack; sums in fp32, result in x's precision."""
    return _launch(x, out, None)


def symmetric_polynomial(
    gram: Tensor, b: float, c: float, *, a: float = 0.0, out: Tensor | None = None
) -> Tensor:
    """a·I + b·G + c·G @ G for each symmetric matrix G of a (count, m, m) stack, in G's precision."""
    return _launch(gram, out, (a, b, c))
