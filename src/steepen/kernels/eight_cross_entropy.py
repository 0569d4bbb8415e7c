"""Cross-entropy whose gradient is also written in eight bits.

A row's scale is known before its gradient is: the largest is the target's, since the others add up to it.
"""

# Triton's language is untyped.
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportReturnType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from steepen.kernels.cross_entropy import _capped, _exponentials, _read, pieces
from steepen.kernels.eager8 import MARGIN
from steepen.kernels.eight_rows import TOGETHER, factors, room
from steepen.kernels.twice import GRADIENT, Twice, most

SPARE = tl.constexpr(MARGIN)


@triton.jit
def _write8(
    x_ptr, small_ptr, kept, top, total, scale, factor, cap,
    START: tl.constexpr, SIZE: tl.constexpr, VOCABULARY: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    column = START + tl.arange(0, SIZE)
    if CAPPED:
        x = _capped(kept.to(tl.float32), cap, CAPPED)
        d = tl.exp(x - top) * (1 - (x / cap) * (x / cap))
    else:
        d = kept.to(tl.float32)
    d = (d * (scale / total)).to(x_ptr.dtype.element_ty)
    tl.store(x_ptr + column, d, mask=column < VOCABULARY)
    small = (d.to(tl.float32) * factor).to(small_ptr.dtype.element_ty)
    there = tl.max_contiguous(small_ptr + column, TOGETHER)
    tl.store(there, small, mask=column < VOCABULARY)


@triton.jit
def _cross_entropy8_kernel(
    x_ptr, target_ptr, loss_ptr, small_ptr, scale_ptr, scale, cap, MOST: tl.constexpr,
    VOCABULARY: tl.constexpr, CAPPED: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * VOCABULARY
    small_ptr += row * VOCABULARY
    target = tl.load(target_ptr + row)
    right = _capped(tl.load(x_ptr + target).to(tl.float32), cap, CAPPED)
    a = _read(x_ptr, 0, A, VOCABULARY)
    top = tl.max(a.to(tl.float32))
    if B:
        b = _read(x_ptr, A, B, VOCABULARY)
        top = tl.maximum(top, tl.max(b.to(tl.float32)))
    if C:
        c = _read(x_ptr, A + B, C, VOCABULARY)
        top = tl.maximum(top, tl.max(c.to(tl.float32)))
    top = _capped(top, cap, CAPPED)
    total, a = _exponentials(a, top, cap, CAPPED)
    if B:
        more, b = _exponentials(b, top, cap, CAPPED)
        total += more
    if C:
        more, c = _exponentials(c, top, cap, CAPPED)
        total += more
    tl.store(loss_ptr + row, tl.log(total) + top - right)
    chance = tl.exp(right - top) / total
    factor, undo = factors(tl.abs(scale) * (1 - chance + SPARE), MOST)
    tl.store(scale_ptr + row, undo)
    _write8(x_ptr, small_ptr, a, top, total, scale, factor, cap, 0, A, VOCABULARY, CAPPED)
    if B:
        _write8(x_ptr, small_ptr, b, top, total, scale, factor, cap, A, B, VOCABULARY, CAPPED)
    if C:
        _write8(x_ptr, small_ptr, c, top, total, scale, factor, cap, A + B, C, VOCABULARY, CAPPED)
    # The target's own, p − 1, may be a small difference of two numbers near one: not from a rounded p.
    tl.debug_barrier()
    d = chance - 1
    if CAPPED:
        d = d * (1 - (right / cap) * (right / cap))
    d = (d * scale).to(x_ptr.dtype.element_ty)
    tl.store(x_ptr + target, d)
    tl.store(small_ptr + target, (d.to(tl.float32) * factor).to(small_ptr.dtype.element_ty))


def cross_entropy_(
    logits: Tensor, targets: Tensor, scale: float, softcap: float | None
) -> tuple[Tensor, Twice]:
    """As `eager8.cross_entropy_`."""
    rows, vocabulary = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    small, sizes = room(rows, vocabulary, GRADIENT, logits.device)
    a, b, c = pieces(vocabulary)
    warps = 32 if vocabulary > 65_536 else 16 if vocabulary > 16_384 else 8 if vocabulary > 2048 else 4
    _cross_entropy8_kernel[(rows,)](
        logits, targets, losses, small, sizes, scale, softcap or 1.0, MOST=most(GRADIENT),
        VOCABULARY=vocabulary, CAPPED=softcap is not None, A=a, B=b, C=c, num_warps=warps,
    )  # fmt: skip
    return losses, Twice(logits, small, sizes)
