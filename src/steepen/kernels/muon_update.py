"""Elementwise passes of the Muon optimizer: momentum, Frobenius normalization, weight decay and update.

Each element of gradients, momentum and weights is read and written once.
"""

# Triton kernels are untyped, and torch's multi-tensor (foreach) operators have no public name.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportReturnType=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import torch
from torch import Tensor

from steepen.kernels.triton_backend import tl, triton


def update_momentum_reference(
    out: list[Tensor],
    gradients: list[Tensor],
    momenta: list[Tensor],
    row_squares: list[Tensor] | None = None,
    *,
    beta: float | Tensor,
    nesterov: bool,
) -> None:
    """momentum ← lerp(momentum, gradient, 1 − beta) in place; write the update direction into `out`.

    The direction is the momentum, or with `nesterov` lerp(gradient, momentum, beta). `row_squares` receives
    the sum of squares of each row of the direction, in partial sums (count, row_square_parts(columns), rows).
    """
    if isinstance(beta, Tensor):  # 0-d, on the device
        weights = [beta.to(momentum.dtype) for momentum in momenta]
        for momentum, gradient, weight in zip(momenta, gradients, weights, strict=True):
            momentum.lerp_(gradient, 1 - weight)
        directions = [
            gradient.lerp(momentum, weight) if nesterov else momentum
            for momentum, gradient, weight in zip(momenta, gradients, weights, strict=True)
        ]
    else:
        torch._foreach_lerp_(momenta, gradients, 1 - beta)
        directions = torch._foreach_lerp(gradients, momenta, beta) if nesterov else momenta
    torch._foreach_copy_(out, directions)
    for squares, direction in zip(row_squares or (), directions if row_squares else (), strict=True):
        squares.zero_()
        squares[:, 0] = direction.reshape(-1, *direction.shape[-2:]).square().sum(-1)


def row_square_parts(columns: int) -> int:
    """Number of partial sums into which `update_momentum` splits a row's sum of squares."""
    return -(-columns // UPDATE_TILE)


def scale_matrices_reference_(matrices: Tensor, factors: Tensor) -> None:
    """Multiply a (count, m, n) stack in place by factors (count, m, 1) or (count, 1, n)."""
    matrices.mul_(factors)


def frobenius_normalize_reference(matrices: Tensor, factor: float, eps: float) -> Tensor:
    """Each matrix of a (count, m, n) stack divided by factor·(its Frobenius norm) + eps."""
    wide = torch.promote_types(matrices.dtype, torch.float32)
    norm = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True, dtype=wide)
    return torch.div(matrices, norm * factor + eps, out=torch.empty_like(matrices))


def apply_update_reference(
    parameters: list[Tensor],
    updates: list[Tensor],
    scales: list[float],
    factors: list[Tensor] | None = None,
    *,
    lr: float | Tensor,
    weight_decay: float,
    cautious: bool = False,
    scaled_decay: bool = False,
) -> None:
    """p ← (1 − lr·weight_decay)·p − lr·scale·update for each parameter, in the parameter's dtype.

    `factors` multiply the update: (…, rows, 1) or (…, 1, columns) for a parameter (…, rows, columns). With
    `cautious`, weights whose sign differs from the update's do not decay. With `scaled_decay` the decay is
    lr·scale·weight_decay.
    """
    steps = [u.to(p.dtype) * (lr * -scale) for p, u, scale in zip(parameters, updates, scales, strict=True)]
    if factors is not None:
        steps = [step * factor for step, factor in zip(steps, factors, strict=True)]
    if cautious or scaled_decay:
        for parameter, step, scale in zip(parameters, steps, scales, strict=True):
            amount = (lr * scale if scaled_decay else lr) * weight_decay
            decay = amount * (parameter * step <= 0).to(parameter.dtype) if cautious else amount
            parameter.mul_(1 - decay)
    else:
        torch._foreach_mul_(parameters, 1 - lr * weight_decay)
    torch._foreach_add_(parameters, steps)


NORM_BLOCK = 2048  # elements a program of the norm kernels processes per iteration
NORM_MAX_PROGRAMS = 128  # programs per matrix
# Rows and columns of a tile: it is loaded along one side and may be stored along the other (transposed), so
# both sides must be long enough for coalesced access.
UPDATE_TILE = 64
SCALE_TILE = 16, 256  # rows and columns: loaded and stored along rows


# The direction is written in the dtype and the orientation that orthogonalization reads: tall matrices are
# transposed, so that all of one shape are one batch. Row sums of squares, by which rows may be normalized,
# are left as one partial sum per tile: adding them up here would need atomics, whose order is random.
@triton.jit
def _update_momentum_kernel(
    gradient_ptr,
    momentum_ptr,
    out_ptr,
    squares_ptr,
    beta_ptr,
    rows,
    columns,
    stride_matrix,
    stride_row,
    stride_column,
    NESTEROV: tl.constexpr,
    ROW_SQUARES: tl.constexpr,
    TILE: tl.constexpr,
):
    tiles_across = tl.cdiv(columns, TILE)
    row = (tl.program_id(0) // tiles_across) * TILE + tl.arange(0, TILE)[:, None]
    column = (tl.program_id(0) % tiles_across) * TILE + tl.arange(0, TILE)[None, :]
    mask = (row < rows) & (column < columns)
    matrix = tl.program_id(1).to(tl.int64)
    offset = matrix * rows * columns + row * columns + column
    one_minus_beta = 1.0 - tl.load(beta_ptr)
    gradient = tl.load(gradient_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    momentum = tl.load(momentum_ptr + offset, mask=mask, other=0.0)
    momentum += one_minus_beta * (gradient - momentum)
    tl.store(momentum_ptr + offset, momentum, mask=mask)
    direction = momentum
    if NESTEROV:
        direction += one_minus_beta * (gradient - momentum)
    target = out_ptr + matrix * stride_matrix + row * stride_row + column * stride_column
    tl.store(target, direction.to(out_ptr.dtype.element_ty), mask=mask)
    if ROW_SQUARES:
        squares = tl.sum(direction * direction, axis=1)
        line = (tl.program_id(0) // tiles_across) * TILE + tl.arange(0, TILE)
        part = matrix * tiles_across + tl.program_id(0) % tiles_across
        tl.store(squares_ptr + part * rows + line, squares, mask=line < rows)


# Muon's variance reduction: a factor for each row or column, of a whole stack of matrices in one launch.
@triton.jit
def _scale_matrices_kernel(
    x_ptr, factor_ptr, rows, columns, BY_ROW: tl.constexpr, TILE: tl.constexpr, WIDE_TILE: tl.constexpr
):
    tiles_across = tl.cdiv(columns, WIDE_TILE)
    row = (tl.program_id(0) // tiles_across) * TILE + tl.arange(0, TILE)[:, None]
    column = (tl.program_id(0) % tiles_across) * WIDE_TILE + tl.arange(0, WIDE_TILE)[None, :]
    mask = (row < rows) & (column < columns)
    matrix = tl.program_id(1).to(tl.int64)
    if BY_ROW:
        factor = tl.load(factor_ptr + matrix * rows + row, mask=row < rows)
    else:
        factor = tl.load(factor_ptr + matrix * columns + column, mask=column < columns)
    target = x_ptr + matrix * rows * columns + row * columns + column
    x = tl.load(target, mask=mask).to(tl.float32)
    tl.store(target, (x * factor).to(x_ptr.dtype.element_ty), mask=mask)


# Decay and step in one pass over the fp32 weights. The learning rate is read from memory, so that a captured
# CUDA graph replays with the rate of its step.
@triton.jit
def _apply_update_kernel(
    parameter_ptr,
    update_ptr,
    lr_ptr,
    factor_ptr,
    rows,
    columns,
    stride_matrix,
    stride_row,
    stride_column,
    scale,
    weight_decay,
    ROW_FACTORS: tl.constexpr,
    COLUMN_FACTORS: tl.constexpr,
    CAUTIOUS: tl.constexpr,
    TILE: tl.constexpr,
):
    tiles_across = tl.cdiv(columns, TILE)
    row = (tl.program_id(0) // tiles_across) * TILE + tl.arange(0, TILE)[:, None]
    column = (tl.program_id(0) % tiles_across) * TILE + tl.arange(0, TILE)[None, :]
    mask = (row < rows) & (column < columns)
    matrix = tl.program_id(1).to(tl.int64)
    lr = tl.load(lr_ptr)
    source = update_ptr + matrix * stride_matrix + row * stride_row + column * stride_column
    update = tl.load(source, mask=mask).to(tl.float32)
    target = parameter_ptr + matrix * rows * columns + row * columns + column
    parameter = tl.load(target, mask=mask)
    if ROW_FACTORS:
        update *= tl.load(factor_ptr + matrix * rows + row, mask=row < rows)
    if COLUMN_FACTORS:
        update *= tl.load(factor_ptr + matrix * columns + column, mask=column < columns)
    decay = lr * weight_decay
    if CAUTIOUS:
        decay = tl.where(update * parameter >= 0.0, decay, 0.0)
    parameter = (1.0 - decay) * parameter - (lr * scale) * update
    tl.store(target, parameter, mask=mask)


# Two launches instead of atomics: partial sums in a fixed order give the same bits in every run.
@triton.jit
def _sum_squares_kernel(x_ptr, squares_ptr, size, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum of squares of one program's part of a matrix; threads accumulate separately until the end."""
    matrix, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(part * BLOCK, size, tl.num_programs(1) * BLOCK):
        offset = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + matrix * size + offset, mask=offset < size, other=0.0).to(tl.float32)
        total += x * x
    tl.store(squares_ptr + matrix * PROGRAMS + part, tl.sum(total))


# Every program adds the same partial sums of its matrix again: that is cheaper than a kernel between the two.
@triton.jit
def _frobenius_normalize_kernel(
    x_ptr, squares_ptr, out_ptr, size, factor, eps, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr
):
    matrix, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    parts = tl.arange(0, PROGRAMS)
    squares = tl.load(squares_ptr + matrix * PROGRAMS + parts, mask=parts < tl.num_programs(1), other=0.0)
    divisor = tl.sqrt(tl.sum(squares)) * factor + eps
    for first in range(part * BLOCK, size, tl.num_programs(1) * BLOCK):
        offset = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + matrix * size + offset, mask=offset < size).to(tl.float32)
        target = out_ptr + matrix * size + offset
        tl.store(target, (x / divisor).to(out_ptr.dtype.element_ty), mask=offset < size)


def _grid(stack: Tensor) -> tuple[int, int]:
    count, rows, columns = stack.shape
    return -(-rows // UPDATE_TILE) * -(-columns // UPDATE_TILE), count


def _as_stack(x: Tensor) -> Tensor:
    """A view of a parameter as (count, rows, columns)."""
    return x.view(-1, *x.shape[-2:])


def _on_device(value: float | Tensor, like: Tensor) -> Tensor:
    """A scalar as a 0-d fp32 tensor that kernels read: a captured step then sees the value set since."""
    return value if isinstance(value, Tensor) else torch.full((), value, device=like.device)


def update_momentum_triton(
    out: list[Tensor],
    gradients: list[Tensor],
    momenta: list[Tensor],
    row_squares: list[Tensor] | None = None,
    *,
    beta: float | Tensor,
    nesterov: bool,
) -> None:
    """`update_momentum_reference` in Triton."""
    rate = _on_device(beta, momenta[0])
    for index, (target, gradient, momentum) in enumerate(zip(out, gradients, momenta, strict=True)):
        assert momentum.is_contiguous(), "momentum must be contiguous"
        assert row_squares is None or row_squares[index].is_contiguous(), "sums must be contiguous"
        stack = _as_stack(target)
        _update_momentum_kernel[_grid(stack)](
            gradient.contiguous(),
            momentum,
            stack,
            rate if row_squares is None else row_squares[index],
            rate,
            *stack.shape[1:],
            *stack.stride(),
            NESTEROV=nesterov,
            ROW_SQUARES=row_squares is not None,
            TILE=UPDATE_TILE,
        )


def scale_matrices_triton_(matrices: Tensor, factors: Tensor) -> None:
    """`scale_matrices_reference_` in Triton, computed in fp32."""
    assert matrices.is_contiguous(), "matrices must be contiguous"
    count, rows, columns = matrices.shape
    grid = triton.cdiv(rows, SCALE_TILE[0]) * triton.cdiv(columns, SCALE_TILE[1]), count
    _scale_matrices_kernel[grid](
        matrices,
        factors.contiguous(),
        rows,
        columns,
        BY_ROW=factors.shape[-1] == 1,
        TILE=SCALE_TILE[0],
        WIDE_TILE=SCALE_TILE[1],
    )


def frobenius_normalize_triton(matrices: Tensor, factor: float, eps: float) -> Tensor:
    """`frobenius_normalize_reference` in Triton, computed in fp32."""
    count, size = len(matrices), matrices.shape[-2] * matrices.shape[-1]
    x, out = matrices.contiguous(), torch.empty_like(matrices, memory_format=torch.contiguous_format)
    squares = torch.empty(count, NORM_MAX_PROGRAMS, dtype=torch.float32, device=x.device)
    grid = count, min(NORM_MAX_PROGRAMS, triton.cdiv(size, NORM_BLOCK))
    options = {"PROGRAMS": NORM_MAX_PROGRAMS, "BLOCK": NORM_BLOCK}
    _sum_squares_kernel[grid](x, squares, size, **options)
    _frobenius_normalize_kernel[grid](x, squares, out, size, factor, eps, **options)
    return out


def apply_update_triton(
    parameters: list[Tensor],
    updates: list[Tensor],
    scales: list[float],
    factors: list[Tensor] | None = None,
    *,
    lr: float | Tensor,
    weight_decay: float,
    cautious: bool = False,
    scaled_decay: bool = False,
) -> None:
    """`apply_update_reference` in Triton."""
    rate = _on_device(lr, parameters[0])
    for index, (parameter, update, scale) in enumerate(zip(parameters, updates, scales, strict=True)):
        assert parameter.is_contiguous(), "parameters must be contiguous"
        stack = _as_stack(update)
        factor = None if factors is None else factors[index].contiguous()
        by_column = factor is not None and factor.shape[-1] != 1
        _apply_update_kernel[_grid(stack)](
            parameter,
            stack,
            rate,
            rate if factor is None else factor,
            *stack.shape[1:],
            *stack.stride(),
            scale,
            weight_decay * scale if scaled_decay else weight_decay,
            ROW_FACTORS=factor is not None and not by_column,
            COLUMN_FACTORS=by_column,
            CAUTIOUS=cautious,
            TILE=UPDATE_TILE,
        )
