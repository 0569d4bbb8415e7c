"""Elementwise passes of the Muon optimizer: momentum, Frobenius normalisation, weight decay and update.

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
    out: list[Tensor], gradients: list[Tensor], momenta: list[Tensor], beta: float, nesterov: bool
) -> None:
    """momentum ← lerp(momentum, gradient, 1 − beta) in place; write the update direction into `out`.

    The direction is the momentum, or with `nesterov` lerp(gradient, momentum, beta).
    """
    torch._foreach_lerp_(momenta, gradients, 1 - beta)
    directions = torch._foreach_lerp(gradients, momenta, beta) if nesterov else momenta
    torch._foreach_copy_(out, directions)


def frobenius_normalize_reference(matrices: Tensor, factor: float, eps: float) -> Tensor:
    """Each matrix of a (count, m, n) stack divided by factor·(its Frobenius norm) + eps."""
    wide = torch.promote_types(matrices.dtype, torch.float32)
    norm = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True, dtype=wide)
    return torch.div(matrices, norm * factor + eps, out=torch.empty_like(matrices))


def apply_update_reference(
    parameters: list[Tensor],
    updates: list[Tensor],
    scales: list[float],
    lr: float | Tensor,
    weight_decay: float,
) -> None:
    """p ← (1 − lr·weight_decay)·p − lr·scale·update for each parameter, in the parameter's dtype."""
    steps = [u.to(p.dtype) * (lr * -scale) for p, u, scale in zip(parameters, updates, scales, strict=True)]
    torch._foreach_mul_(parameters, 1 - lr * weight_decay)
    torch._foreach_add_(parameters, steps)


NORM_BLOCK = 2048  # elements a program of the norm kernels processes per iteration
NORM_MAX_PROGRAMS = 128  # programs per matrix
# Rows and columns of a tile: it is loaded along one side and may be stored along the other (transposed), so
# both sides must be long enough for coalesced access.
UPDATE_TILE = 64


@triton.jit
def _update_momentum_kernel(
    gradient_ptr,
    momentum_ptr,
    out_ptr,
    rows,
    columns,
    stride_matrix,
    stride_row,
    stride_column,
    one_minus_beta,
    NESTEROV: tl.constexpr,
    TILE: tl.constexpr,
):
    tiles_across = tl.cdiv(columns, TILE)
    row = (tl.program_id(0) // tiles_across) * TILE + tl.arange(0, TILE)[:, None]
    column = (tl.program_id(0) % tiles_across) * TILE + tl.arange(0, TILE)[None, :]
    mask = (row < rows) & (column < columns)
    matrix = tl.program_id(1).to(tl.int64)
    offset = matrix * rows * columns + row * columns + column
    gradient = tl.load(gradient_ptr + offset, mask=mask).to(tl.float32)
    momentum = tl.load(momentum_ptr + offset, mask=mask)
    momentum += one_minus_beta * (gradient - momentum)
    tl.store(momentum_ptr + offset, momentum, mask=mask)
    direction = momentum
    if NESTEROV:
        direction += one_minus_beta * (gradient - momentum)
    target = out_ptr + matrix * stride_matrix + row * stride_row + column * stride_column
    tl.store(target, direction.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _apply_update_kernel(
    parameter_ptr,
    update_ptr,
    lr_ptr,
    rows,
    columns,
    stride_matrix,
    stride_row,
    stride_column,
    scale,
    weight_decay,
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
    parameter = (1.0 - lr * weight_decay) * parameter - (lr * scale) * update
    tl.store(target, parameter, mask=mask)


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


def update_momentum_triton(
    out: list[Tensor], gradients: list[Tensor], momenta: list[Tensor], beta: float, nesterov: bool
) -> None:
    """`update_momentum_reference` in Triton."""
    for target, gradient, momentum in zip(out, gradients, momenta, strict=True):
        assert momentum.is_contiguous(), "momentum must be contiguous"
        stack = _as_stack(target)
        _update_momentum_kernel[_grid(stack)](
            gradient.contiguous(),
            momentum,
            stack,
            *stack.shape[1:],
            *stack.stride(),
            1 - beta,
            NESTEROV=nesterov,
            TILE=UPDATE_TILE,
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
    lr: float | Tensor,
    weight_decay: float,
) -> None:
    """`apply_update_reference` in Triton."""
    rate = lr if isinstance(lr, Tensor) else torch.full((), lr, device=parameters[0].device)
    for parameter, update, scale in zip(parameters, updates, scales, strict=True):
        assert parameter.is_contiguous(), "parameters must be contiguous"
        stack = _as_stack(update)
        _apply_update_kernel[_grid(stack)](
            parameter,
            stack,
            rate,
            *stack.shape[1:],
            *stack.stride(),
            scale,
            weight_decay,
            TILE=UPDATE_TILE,
        )
