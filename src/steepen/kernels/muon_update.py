"""The passes of Muon over weights, gradients and momentum, each number read and written once.

The plain twins in `eager` have the same names.
"""

# Inside a kernel the names are Triton's own language, which carries no types for a checker to follow,
# and a launch takes options that the kernel's signature does not have.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

AT_ONCE, PARTS = 2048, 128  # numbers a program takes at a time, and the most programs for a matrix
EDGE = 64  # a tile is read along one side and may be written along the other: both must be long enough


@triton.jit
def _momentum_into(
    gradient_ptr,
    momentum_ptr,
    out_ptr,
    rows,
    columns,
    stride_matrix,
    stride_row,
    stride_column,
    follow,
    NESTEROV: tl.constexpr,
    EDGE: tl.constexpr,
):
    across = tl.cdiv(columns, EDGE)
    row = (tl.program_id(0) // across) * EDGE + tl.arange(0, EDGE)[:, None]
    column = (tl.program_id(0) % across) * EDGE + tl.arange(0, EDGE)[None, :]
    inside = (row < rows) & (column < columns)
    matrix = tl.program_id(1).to(tl.int64)
    here = matrix * rows * columns + row * columns + column
    gradient = tl.load(gradient_ptr + here, mask=inside).to(tl.float32)
    momentum = tl.load(momentum_ptr + here, mask=inside)
    momentum += follow * (gradient - momentum)
    tl.store(momentum_ptr + here, momentum, mask=inside)
    direction = momentum
    if NESTEROV:
        direction += follow * (gradient - momentum)
    there = out_ptr + matrix * stride_matrix + row * stride_row + column * stride_column
    tl.store(there, direction.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _decay_and_add(
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
    EDGE: tl.constexpr,
):
    across = tl.cdiv(columns, EDGE)
    row = (tl.program_id(0) // across) * EDGE + tl.arange(0, EDGE)[:, None]
    column = (tl.program_id(0) % across) * EDGE + tl.arange(0, EDGE)[None, :]
    inside = (row < rows) & (column < columns)
    matrix = tl.program_id(1).to(tl.int64)
    lr = tl.load(lr_ptr)
    there = update_ptr + matrix * stride_matrix + row * stride_row + column * stride_column
    update = tl.load(there, mask=inside).to(tl.float32)
    here = parameter_ptr + matrix * rows * columns + row * columns + column
    parameter = tl.load(here, mask=inside)
    parameter = (1.0 - lr * weight_decay) * parameter - (lr * scale) * update
    tl.store(here, parameter, mask=inside)


@triton.jit
def _squares(x_ptr, squares_ptr, size, PARTS: tl.constexpr, AT_ONCE: tl.constexpr):
    """The sum of squares of a part of a matrix, added up by each thread for itself until the end."""
    matrix, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    total = tl.zeros((AT_ONCE,), dtype=tl.float32)
    for first in range(part * AT_ONCE, size, tl.num_programs(1) * AT_ONCE):
        place = first + tl.arange(0, AT_ONCE)
        x = tl.load(x_ptr + matrix * size + place, mask=place < size, other=0.0).to(tl.float32)
        total += x * x
    tl.store(squares_ptr + matrix * PARTS + part, tl.sum(total))


@triton.jit
def _normalised(x_ptr, squares_ptr, out_ptr, size, factor, least, PARTS: tl.constexpr, AT_ONCE: tl.constexpr):
    matrix, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    parts = tl.arange(0, PARTS)
    squares = tl.load(squares_ptr + matrix * PARTS + parts, mask=parts < tl.num_programs(1), other=0.0)
    divisor = tl.sqrt(tl.sum(squares)) * factor + least
    for first in range(part * AT_ONCE, size, tl.num_programs(1) * AT_ONCE):
        place = first + tl.arange(0, AT_ONCE)
        x = tl.load(x_ptr + matrix * size + place, mask=place < size).to(tl.float32)
        tl.store(
            out_ptr + matrix * size + place, (x / divisor).to(out_ptr.dtype.element_ty), mask=place < size
        )


def normalised(matrices: Tensor, factor: float, least: float) -> Tensor:
    """As `eager.normalised`, but in fp32 at most."""
    count, size = len(matrices), matrices.shape[-2] * matrices.shape[-1]
    x, out = matrices.contiguous(), torch.empty_like(matrices, memory_format=torch.contiguous_format)
    squares = torch.empty(count, PARTS, dtype=torch.float32, device=x.device)
    grid = count, min(PARTS, triton.cdiv(size, AT_ONCE))
    _squares[grid](x, squares, size, PARTS=PARTS, AT_ONCE=AT_ONCE)
    _normalised[grid](x, squares, out, size, factor, least, PARTS=PARTS, AT_ONCE=AT_ONCE)
    return out


def _grid(stack: Tensor) -> tuple[int, int]:
    count, rows, columns = stack.shape
    return -(-rows // EDGE) * -(-columns // EDGE), count


def _stack(x: Tensor) -> Tensor:
    """A view of a parameter as (count, rows, columns)."""
    return x.view(-1, *x.shape[-2:])


def momentum_into(
    out: list[Tensor], gradients: list[Tensor], momenta: list[Tensor], beta: float, nesterov: bool
) -> None:
    """Let each momentum follow its gradient, and write where it points (Nesterov's way or not) into `out`."""
    for target, gradient, momentum in zip(out, gradients, momenta, strict=True):
        assert momentum.is_contiguous(), "momentum must be contiguous"
        stack = _stack(target)
        _momentum_into[_grid(stack)](
            gradient.contiguous(),
            momentum,
            stack,
            *stack.shape[1:],
            *stack.stride(),
            1 - beta,
            NESTEROV=nesterov,
            EDGE=EDGE,
        )


def decay_and_add(
    parameters: list[Tensor],
    updates: list[Tensor],
    scales: list[float],
    lr: float | Tensor,
    weight_decay: float,
) -> None:
    """p ← (1 − lr·wd)·p − lr·scale·update for each parameter, in its own precision."""
    rate = lr if isinstance(lr, Tensor) else torch.full((), lr, device=parameters[0].device)
    for parameter, update, scale in zip(parameters, updates, scales, strict=True):
        assert parameter.is_contiguous(), "parameters must be contiguous"
        stack = _stack(update)
        _decay_and_add[_grid(stack)](
            parameter,
            stack,
            rate,
            *stack.shape[1:],
            *stack.stride(),
            scale,
            weight_decay,
            EDGE=EDGE,
        )
