"""Cross-entropy that overwrites logits with their gradient, so that each logit is read and written once.

A short row stays in its program's registers in between. A long row is read a second time, from the L2 cache:
few rows are in flight at once, and each tile is prefetched while the one before it is processed.

The fp8 gradient is needed twice, by rows and transposed, and a tile of many rows writes both. That is a
second kernel, which reads the logits again and leaves them: the first one finds the sums of whole rows.
"""

# Triton kernels are untyped.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportReturnType=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from steepen.kernels.fp8 import (
    FP8_STORE_ELEMENTS,
    LOGIT_GRADIENT_DTYPE,
    RowwiseFp8,
    store_transposed,
    transpose_grid,
    transpose_tile,
)
from steepen.kernels.norm import at_least_fp32
from steepen.kernels.triton_backend import tl, triton


def cross_entropy_reference_(
    logits: Tensor, targets: Tensor, scale: float, softcap: float | None, vocabulary: int | None = None
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each row (rows,); the logits are overwritten with `scale` times their gradient.

    Returns (losses, gradient). With `softcap` a logit x counts as softcap·tanh(x/softcap). Columns from
    `vocabulary` on are padding: they are left out of the softmax, and their gradient is zero.
    """
    raw = at_least_fp32(logits[:, :vocabulary])
    x = raw if softcap is None else softcap * torch.tanh(raw / softcap)
    losses = functional.cross_entropy(x, targets, reduction="none")
    gradient = torch.softmax(x, dim=-1)
    gradient[torch.arange(len(x), device=x.device), targets] -= 1
    if softcap is not None:
        gradient = gradient * (1 - (x / softcap).square())
    gradient = functional.pad(gradient, (0, logits.shape[1] - raw.shape[1]))
    return losses, logits.copy_(gradient * scale)


GRADIENT_EXPONENT = 15  # a gradient of 1 is 2¹⁵ in fp8, the largest power of two in e5m2


def logit_gradient_scale(scale: float) -> float:
    """The fp8 scale of `scale` times the gradient of any logits: without that factor it is at most 1.

    e5m2 then holds probabilities from 2⁻²⁹ with full precision, so that rows need no scales of their own.
    """
    return scale * 2.0**-GRADIENT_EXPONENT


def cross_entropy_fp8_reference(
    logits: Tensor,
    targets: Tensor,
    transposed: Tensor,
    scale: float,
    softcap: float | None,
    vocabulary: int | None = None,
) -> tuple[Tensor, RowwiseFp8]:
    """`cross_entropy_reference_` with the gradient in fp8 only; the logits stay.

    Its transpose goes into `transposed`, (vocabulary, rows or more). Both have `logit_gradient_scale`.
    """
    wide = logits.to(torch.float32, copy=True)
    losses, d = cross_entropy_reference_(wide, targets, scale, softcap, vocabulary)
    row_scale = torch.full((len(d), 1), logit_gradient_scale(scale), device=d.device)
    data = (d / row_scale).to(LOGIT_GRADIENT_DTYPE)
    transposed[:, : len(d)] = data.t()
    return losses, RowwiseFp8(None, data, row_scale)


BITS_PER_NAT = 1 / math.log(2)
TL_BITS_PER_NAT = tl.constexpr(BITS_PER_NAT)  # the GPU computes 2^x
TL_GRADIENT_EXPONENT = tl.constexpr(GRADIENT_EXPONENT)
TL_GRADIENT_OF_ONE = tl.constexpr(2.0**GRADIENT_EXPONENT)


@triton.jit
def softcapped(raw, softcap, SOFTCAP: tl.constexpr):
    """softcap·tanh(raw/softcap), or raw without SOFTCAP."""
    # tanh(z) = 2·sigmoid(2z) − 1
    if SOFTCAP:
        return softcap * (2 * tl.sigmoid(2 * raw / softcap) - 1)
    return raw


@triton.jit
def softcap_backward(d, x, softcap, SOFTCAP: tl.constexpr):
    """Gradient of a raw logit from the gradient d of the capped logit x."""
    if SOFTCAP:
        return d * (1 - (x / softcap) * (x / softcap))
    return d


@triton.jit
def _short_cross_entropy_kernel(
    x_ptr, target_ptr, loss_ptr, scale, softcap,
    VOCABULARY: tl.constexpr, REAL: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row of VOCABULARY columns, of which the first REAL count, per program, held in registers."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * VOCABULARY
    target = tl.load(target_ptr + row)
    target_logit = softcapped(tl.load(x_ptr + target).to(tl.float32), softcap, SOFTCAP)
    column = tl.arange(0, BLOCK)
    real = column < REAL
    x = tl.load(x_ptr + column, mask=real, other=-float("inf")).to(tl.float32)
    x = tl.where(real, softcapped(x, softcap, SOFTCAP), -float("inf"))
    row_max = tl.max(x)
    logsumexp = tl.log(tl.sum(tl.exp(x - row_max))) + row_max
    tl.store(loss_ptr + row, logsumexp - target_logit)
    d = tl.exp(x - logsumexp) - tl.where(column == target, 1.0, 0.0)
    d = tl.where(real, softcap_backward(d, x, softcap, SOFTCAP), 0.0)
    tl.store(x_ptr + column, (d * scale).to(x_ptr.dtype.element_ty), mask=column < VOCABULARY)


@triton.jit
def _logsumexp_of_row(
    x_ptr, softcap, VOCABULARY: tl.constexpr, REAL: tl.constexpr, SOFTCAP: tl.constexpr,
    LANES: tl.constexpr, PER_LANE: tl.constexpr,
):  # fmt: skip
    """log Σ exp of the first REAL of a row's VOCABULARY columns, read in tiles."""
    offset = tl.arange(0, LANES)[:, None] * PER_LANE + tl.arange(0, PER_LANE)[None, :]
    STEP: tl.constexpr = LANES * PER_LANE
    # Each lane has its own running maximum and sum, so lanes only wait for each other at the end.
    lane_max = tl.full([LANES], -1.0e38, tl.float32)
    lane_sum = tl.zeros([LANES], tl.float32)
    # The mask of a load is a multiple of what a thread loads at once.
    prefetched = tl.load(x_ptr + offset, mask=offset < VOCABULARY, other=-float("inf"))
    for start in range(0, REAL, STEP):
        x = softcapped(prefetched.to(tl.float32), softcap, SOFTCAP)
        if SOFTCAP or REAL != VOCABULARY:
            x = tl.where(start + offset < REAL, x, -float("inf"))
        column = start + STEP + offset
        prefetched = tl.load(x_ptr + column, mask=column < VOCABULARY, other=-float("inf"))
        new_max = tl.maximum(lane_max, tl.max(x, axis=1))
        bits = new_max * TL_BITS_PER_NAT
        # Exactly 1 where the maximum stays; with `bits` the rounding of a product would enter once per tile.
        lane_sum = lane_sum * tl.exp(lane_max - new_max)
        lane_sum += tl.sum(tl.exp2(x * TL_BITS_PER_NAT - bits[:, None]), axis=1)
        lane_max = new_max
    row_max = tl.max(lane_max)
    return tl.log(tl.sum(lane_sum * tl.exp(lane_max - row_max))) + row_max


@triton.jit
def _long_cross_entropy_kernel(
    x_ptr, target_ptr, loss_ptr, scale, softcap,
    VOCABULARY: tl.constexpr, REAL: tl.constexpr, SOFTCAP: tl.constexpr,
    LANES: tl.constexpr, PER_LANE: tl.constexpr,
):  # fmt: skip
    """One row of VOCABULARY columns, of which the first REAL count, per program, read in tiles, twice."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * VOCABULARY
    target = tl.load(target_ptr + row)
    target_logit = softcapped(tl.load(x_ptr + target).to(tl.float32), softcap, SOFTCAP)
    logsumexp = _logsumexp_of_row(x_ptr, softcap, VOCABULARY, REAL, SOFTCAP, LANES, PER_LANE)
    tl.store(loss_ptr + row, logsumexp - target_logit)
    tl.debug_barrier()  # all threads have read the target's logit before one overwrites it
    offset = tl.arange(0, LANES)[:, None] * PER_LANE + tl.arange(0, PER_LANE)[None, :]
    STEP: tl.constexpr = LANES * PER_LANE
    prefetched = tl.load(x_ptr + offset, mask=offset < VOCABULARY, other=0.0)
    for start in range(0, VOCABULARY, STEP):
        x = softcapped(prefetched.to(tl.float32), softcap, SOFTCAP)
        column = start + STEP + offset
        prefetched = tl.load(x_ptr + column, mask=column < VOCABULARY, other=0.0)
        column = start + offset
        d = tl.exp(x - logsumexp) - tl.where(column == target, 1.0, 0.0)
        d = softcap_backward(d, x, softcap, SOFTCAP)
        if REAL != VOCABULARY:
            d = tl.where(column < REAL, d, 0.0)
        tl.store(x_ptr + column, (d * scale).to(x_ptr.dtype.element_ty), mask=column < VOCABULARY)


@triton.jit
def _logsumexp_kernel(
    x_ptr, target_ptr, loss_ptr, logsumexp_ptr, softcap,
    VOCABULARY: tl.constexpr, REAL: tl.constexpr, SOFTCAP: tl.constexpr,
    LANES: tl.constexpr, PER_LANE: tl.constexpr,
):  # fmt: skip
    """The loss and log Σ exp of one row per program."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * VOCABULARY
    target_logit = softcapped(tl.load(x_ptr + tl.load(target_ptr + row)).to(tl.float32), softcap, SOFTCAP)
    logsumexp = _logsumexp_of_row(x_ptr, softcap, VOCABULARY, REAL, SOFTCAP, LANES, PER_LANE)
    tl.store(loss_ptr + row, logsumexp - target_logit)
    tl.store(logsumexp_ptr + row, logsumexp)


@triton.jit
def _fp8_gradient_kernel(
    x_ptr, target_ptr, loss_ptr, logsumexp_ptr, fp8_ptr, transposed_ptr, rows, stride, softcap,
    VOCABULARY: tl.constexpr, REAL: tl.constexpr, SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PER_THREAD: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile of logits and its transpose, in fp8 times 2^GRADIENT_EXPONENT."""
    first, row, column = transpose_tile(GROUP, ROWS, COLUMNS, PER_THREAD)
    offset = row.to(tl.int64) * VOCABULARY + column
    mask = (row < rows) & (column < VOCABULARY)
    logsumexp = tl.load(logsumexp_ptr + row, mask=row < rows, other=0.0)
    x = softcapped(tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32), softcap, SOFTCAP)
    d = tl.exp2(x * TL_BITS_PER_NAT - (logsumexp * TL_BITS_PER_NAT - TL_GRADIENT_EXPONENT))
    d = softcap_backward(d, x, softcap, SOFTCAP)
    if REAL != VOCABULARY:
        d = tl.where(column < REAL, d, 0.0)
    quantized = d.to(fp8_ptr.dtype.element_ty)
    tl.store(tl.max_contiguous(fp8_ptr + offset, [1, 1, FP8_STORE_ELEMENTS]), quantized, mask=mask)
    store_transposed(quantized, transposed_ptr, first, rows, VOCABULARY, stride, ROWS, COLUMNS)

    # At its target a row has p − 1, and p is known from the loss.
    tl.debug_barrier()  # all threads have stored p there
    row = first + tl.arange(0, ROWS)
    target = tl.load(target_ptr + row, mask=row < rows, other=0)
    mask = (row < rows) & (target // COLUMNS == tl.program_id(1))
    loss = tl.load(loss_ptr + row, mask=mask, other=0.0)
    logsumexp = tl.load(logsumexp_ptr + row, mask=mask, other=0.0)
    d = softcap_backward((tl.exp(-loss) - 1) * TL_GRADIENT_OF_ONE, logsumexp - loss, softcap, SOFTCAP)
    quantized = d.to(fp8_ptr.dtype.element_ty)
    tl.store(fp8_ptr + row.to(tl.int64) * VOCABULARY + target, quantized, mask=mask)
    tl.store(transposed_ptr + target * stride + row, quantized, mask=mask)


# A longer row would fill the registers of a streaming multiprocessor, and no second program could overlap it.
SHORT_ROW_MAX_VOCABULARY = 16_384
LONG_ROW_OPTIONS = {"LANES": 1024, "PER_LANE": 8, "num_warps": 32}
# This kernel reads rows once: many are in flight, and each program hides the latency of others.
LOGSUMEXP_OPTIONS = {"LANES": 256, "PER_LANE": 8, "num_warps": 4}
GRADIENT_TILE = {"ROWS": 128, "COLUMNS": 64, "PER_THREAD": 4, "GROUP": 8, "num_warps": 4}


def _options(logits: Tensor, softcap: float | None, real: int | None) -> dict[str, Any]:
    vocabulary = logits.shape[1]
    return {
        "VOCABULARY": vocabulary,
        "REAL": vocabulary if real is None else real,
        "SOFTCAP": softcap is not None,
    }


def cross_entropy_triton_(
    logits: Tensor, targets: Tensor, scale: float, softcap: float | None, vocabulary: int | None = None
) -> tuple[Tensor, Tensor]:
    """`cross_entropy_reference_` in Triton."""
    rows, columns = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    arguments = (logits, targets, losses, scale, softcap or 1.0)
    options = _options(logits, softcap, vocabulary)
    if columns <= SHORT_ROW_MAX_VOCABULARY:
        warps = 8 if columns > 2048 else 4
        block = max(128, triton.next_power_of_2(columns))
        _short_cross_entropy_kernel[(rows,)](*arguments, **options, BLOCK=block, num_warps=warps)
    else:
        _long_cross_entropy_kernel[(rows,)](*arguments, **options, **LONG_ROW_OPTIONS)
    return losses, logits


def cross_entropy_fp8_triton(
    logits: Tensor,
    targets: Tensor,
    transposed: Tensor,
    scale: float,
    softcap: float | None,
    vocabulary: int | None = None,
) -> tuple[Tensor, RowwiseFp8]:
    """`cross_entropy_fp8_reference` in Triton."""
    assert logits.is_contiguous(), "the matrix must be contiguous"
    (rows, columns), device = logits.shape, logits.device
    losses, logsumexp = (torch.empty(rows, dtype=torch.float32, device=device) for _ in range(2))
    data = torch.empty(rows, columns, dtype=LOGIT_GRADIENT_DTYPE, device=device)
    options, cap = _options(logits, softcap, vocabulary), softcap or 1.0
    _logsumexp_kernel[(rows,)](logits, targets, losses, logsumexp, cap, **options, **LOGSUMEXP_OPTIONS)
    _fp8_gradient_kernel[transpose_grid(rows, columns, GRADIENT_TILE)](
        logits, targets, losses, logsumexp, data, transposed, rows, transposed.stride(0), cap,
        **options, **GRADIENT_TILE,
    )  # fmt: skip
    return losses, RowwiseFp8(None, data, torch.full((rows, 1), logit_gradient_scale(scale), device=device))
