"""Cross-entropy that overwrites logits with their gradient, so that each logit is read and written once.

A short row stays in its program's registers in between. A long row is read a second time, from the L2 cache:
few rows are in flight at once, and each tile is prefetched while the one before it is processed.
"""

# Triton kernels are untyped.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportReturnType=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from steepen.kernels.fp8 import (
    FP8_STORE_ELEMENTS,
    LOGIT_GRADIENT_DTYPE,
    RowwiseFp8,
    empty_rowwise,
    fp8_row_scale,
    quantize_rows_reference,
)
from steepen.kernels.norm import at_least_fp32
from steepen.kernels.triton_backend import tl, triton

PROBABILITY_MARGIN = 2.0**-20  # margin for fp32 rounding of 1 − p


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


def cross_entropy_fp8_reference_(
    logits: Tensor, targets: Tensor, scale: float, softcap: float | None, vocabulary: int | None = None
) -> tuple[Tensor, RowwiseFp8]:
    """`cross_entropy_reference_` with the gradient also quantized.

    A row's amax is known from its loss: it is at the target, 1 − p with p = exp(−loss).
    """
    losses, d = cross_entropy_reference_(logits, targets, scale, softcap, vocabulary)
    amax = abs(scale) * (PROBABILITY_MARGIN - torch.expm1(-losses))
    return losses, RowwiseFp8(d, *quantize_rows_reference(d, LOGIT_GRADIENT_DTYPE, amax))


TL_PROBABILITY_MARGIN = tl.constexpr(PROBABILITY_MARGIN)


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
def _gradient_multiplier(scale_ptr, loss, scale, FP8_MAX: tl.constexpr):
    """Store a row's fp8 scale and return its multiplier, both known from the loss before the gradient is.

    The gradient's amax is at the target, 1 − p with p = exp(−loss): all others add up to it.
    """
    multiplier = 1.0
    if FP8_MAX is not None:
        amax = tl.abs(scale) * (1 - tl.exp(-loss) + TL_PROBABILITY_MARGIN)
        multiplier, row_scale = fp8_row_scale(amax, FP8_MAX)
        tl.store(scale_ptr, row_scale)
    return multiplier


@triton.jit
def _store_gradient(pointer, fp8_pointer, d, multiplier, mask, FP8_MAX: tl.constexpr):
    d = d.to(pointer.dtype.element_ty)
    tl.store(pointer, d, mask=mask)
    if FP8_MAX is not None:
        tl.store(fp8_pointer, (d.to(tl.float32) * multiplier).to(fp8_pointer.dtype.element_ty), mask=mask)


@triton.jit
def _short_cross_entropy_kernel(
    x_ptr, target_ptr, loss_ptr, fp8_ptr, scale_ptr, scale, softcap,
    VOCABULARY: tl.constexpr, REAL: tl.constexpr, SOFTCAP: tl.constexpr, FP8_MAX: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One row of VOCABULARY columns, of which the first REAL count, per program, held in registers."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * VOCABULARY
    fp8_ptr += row * VOCABULARY
    target = tl.load(target_ptr + row)
    target_logit = softcapped(tl.load(x_ptr + target).to(tl.float32), softcap, SOFTCAP)
    column = tl.arange(0, BLOCK)
    real = column < REAL
    x = tl.load(x_ptr + column, mask=real, other=-float("inf")).to(tl.float32)
    x = tl.where(real, softcapped(x, softcap, SOFTCAP), -float("inf"))
    row_max = tl.max(x)
    logsumexp = tl.log(tl.sum(tl.exp(x - row_max))) + row_max
    tl.store(loss_ptr + row, logsumexp - target_logit)
    multiplier = _gradient_multiplier(scale_ptr + row, logsumexp - target_logit, scale, FP8_MAX)
    d = tl.exp(x - logsumexp) - tl.where(column == target, 1.0, 0.0)
    d = tl.where(real, softcap_backward(d, x, softcap, SOFTCAP), 0.0)
    fp8_pointer = tl.max_contiguous(fp8_ptr + column, FP8_STORE_ELEMENTS)
    _store_gradient(x_ptr + column, fp8_pointer, d * scale, multiplier, column < VOCABULARY, FP8_MAX)


@triton.jit
def _long_cross_entropy_kernel(
    x_ptr, target_ptr, loss_ptr, fp8_ptr, scale_ptr, scale, softcap,
    VOCABULARY: tl.constexpr, REAL: tl.constexpr, SOFTCAP: tl.constexpr, FP8_MAX: tl.constexpr,
    LANES: tl.constexpr, PER_LANE: tl.constexpr,
):  # fmt: skip
    """One row of VOCABULARY columns, of which the first REAL count, per program, read in tiles, twice."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * VOCABULARY
    fp8_ptr += row * VOCABULARY
    target = tl.load(target_ptr + row)
    target_logit = softcapped(tl.load(x_ptr + target).to(tl.float32), softcap, SOFTCAP)
    offset = tl.arange(0, LANES)[:, None] * PER_LANE + tl.arange(0, PER_LANE)[None, :]
    STEP: tl.constexpr = LANES * PER_LANE
    # Each lane has its own running maximum and sum, so lanes only wait for each other at the end.
    lane_max = tl.full([LANES], -3.0e38, tl.float32)
    lane_sum = tl.zeros([LANES], tl.float32)
    prefetched = tl.load(x_ptr + offset, mask=offset < REAL, other=-float("inf"))
    for start in range(0, VOCABULARY, STEP):
        x = softcapped(prefetched.to(tl.float32), softcap, SOFTCAP)
        if SOFTCAP:
            x = tl.where(start + offset < REAL, x, -float("inf"))
        column = start + STEP + offset
        prefetched = tl.load(x_ptr + column, mask=column < REAL, other=-float("inf"))
        new_max = tl.maximum(lane_max, tl.max(x, axis=1))
        lane_sum = lane_sum * tl.exp(lane_max - new_max) + tl.sum(tl.exp(x - new_max[:, None]), axis=1)
        lane_max = new_max
    row_max = tl.max(lane_max)
    logsumexp = tl.log(tl.sum(lane_sum * tl.exp(lane_max - row_max))) + row_max
    tl.store(loss_ptr + row, logsumexp - target_logit)
    multiplier = _gradient_multiplier(scale_ptr + row, logsumexp - target_logit, scale, FP8_MAX)
    tl.debug_barrier()  # all threads have read the target's logit before one overwrites it
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
        fp8_pointer = tl.max_contiguous(fp8_ptr + column, [1, FP8_STORE_ELEMENTS])
        _store_gradient(x_ptr + column, fp8_pointer, d * scale, multiplier, column < VOCABULARY, FP8_MAX)


# A longer row would fill the registers of a streaming multiprocessor, and no second program could overlap it.
SHORT_ROW_MAX_VOCABULARY = 16_384
LONG_ROW_OPTIONS = {"LANES": 1024, "PER_LANE": 8, "num_warps": 32}


def cross_entropy_triton_(
    logits: Tensor, targets: Tensor, scale: float, softcap: float | None, vocabulary: int | None = None
) -> tuple[Tensor, Tensor]:
    """`cross_entropy_reference_` in Triton."""
    return _launch(logits, targets, scale, softcap, vocabulary), logits


def cross_entropy_fp8_triton_(
    logits: Tensor, targets: Tensor, scale: float, softcap: float | None, vocabulary: int | None = None
) -> tuple[Tensor, RowwiseFp8]:
    """`cross_entropy_fp8_reference_` in Triton."""
    data, row_scale = empty_rowwise(*logits.shape, LOGIT_GRADIENT_DTYPE, logits.device)
    losses = _launch(logits, targets, scale, softcap, vocabulary, (data, row_scale))
    return losses, RowwiseFp8(logits, data, row_scale)


def _launch(
    logits: Tensor,
    targets: Tensor,
    scale: float,
    softcap: float | None,
    real: int | None,
    fp8: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Losses; the gradient overwrites the logits and, with `fp8` (data, scale), is also quantized there."""
    rows, vocabulary = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    data, row_scale = fp8 or (logits, losses)
    options: dict[str, Any] = {
        "VOCABULARY": vocabulary,
        "REAL": vocabulary if real is None else real,
        "SOFTCAP": softcap is not None,
        "FP8_MAX": torch.finfo(data.dtype).max if fp8 else None,
    }
    arguments = (logits, targets, losses, data, row_scale, scale, softcap or 1.0)
    if vocabulary <= SHORT_ROW_MAX_VOCABULARY:
        warps = 8 if vocabulary > 2048 else 4
        block = max(128, triton.next_power_of_2(vocabulary))
        _short_cross_entropy_kernel[(rows,)](*arguments, **options, BLOCK=block, num_warps=warps)
    else:
        _long_cross_entropy_kernel[(rows,)](*arguments, **options, **LONG_ROW_OPTIONS)
    return losses
