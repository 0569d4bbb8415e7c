"""Cross-entropy that turns logits into their gradient in place: each is read and written once.

A short row waits in the registers of its program between the two. A long one is read again, from the cache:
few rows are under way at once, and each tile is asked for while the one before it is worked on. For products
in eight bits, whose largest number is MOST, the gradient is written in them too.
"""

# Triton's language is untyped.
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportReturnType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from steepen.kernels.eager8 import MARGIN
from steepen.kernels.eight_rows import TOGETHER, factors

SPARE = tl.constexpr(MARGIN)


@triton.jit
def capped(raw, cap, CAPPED: tl.constexpr):
    """A logit, softly capped where that is asked for."""
    # tanh(z) = 2·sigmoid(2z) − 1
    if CAPPED:
        return cap * (2 * tl.sigmoid(2 * raw / cap) - 1)
    return raw


@triton.jit
def uncapped(d, x, cap, CAPPED: tl.constexpr):
    """The gradient before the cap, where there is one, from that after it: x is what came out."""
    if CAPPED:
        return d * (1 - (x / cap) * (x / cap))
    return d


@triton.jit
def _factor(size_ptr, loss, scale, MOST: tl.constexpr):
    """What brings a row's gradient into eight bits, known before the gradient is.

    The largest is the target's, 1 − p with p = exp(−loss): the others add up to it.
    """
    factor = 1.0
    if MOST is not None:
        factor, size = factors(tl.abs(scale) * (1 - tl.exp(-loss) + SPARE), MOST)
        tl.store(size_ptr, size)
    return factor


@triton.jit
def _write(place, small, d, factor, inside, MOST: tl.constexpr):
    d = d.to(place.dtype.element_ty)
    tl.store(place, d, mask=inside)
    if MOST is not None:
        tl.store(small, (d.to(tl.float32) * factor).to(small.dtype.element_ty), mask=inside)


@triton.jit
def _short_cross_entropy_kernel(
    x_ptr, target_ptr, loss_ptr, small_ptr, size_ptr, scale, cap,
    VOCABULARY: tl.constexpr, CAPPED: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * VOCABULARY
    small_ptr += row * VOCABULARY
    target = tl.load(target_ptr + row)
    right = capped(tl.load(x_ptr + target).to(tl.float32), cap, CAPPED)
    column = tl.arange(0, BLOCK)
    inside = column < VOCABULARY
    x = tl.load(x_ptr + column, mask=inside, other=-float("inf")).to(tl.float32)
    x = tl.where(inside, capped(x, cap, CAPPED), -float("inf"))
    top = tl.max(x)
    whole = tl.log(tl.sum(tl.exp(x - top))) + top
    tl.store(loss_ptr + row, whole - right)
    factor = _factor(size_ptr + row, whole - right, scale, MOST)
    d = tl.exp(x - whole) - tl.where(column == target, 1.0, 0.0)
    d = uncapped(d, x, cap, CAPPED)
    small = tl.max_contiguous(small_ptr + column, TOGETHER)
    _write(x_ptr + column, small, d * scale, factor, inside, MOST)


@triton.jit
def _long_cross_entropy_kernel(
    x_ptr, target_ptr, loss_ptr, small_ptr, size_ptr, scale, cap,
    VOCABULARY: tl.constexpr, CAPPED: tl.constexpr, MOST: tl.constexpr,
    LANES: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * VOCABULARY
    small_ptr += row * VOCABULARY
    target = tl.load(target_ptr + row)
    right = capped(tl.load(x_ptr + target).to(tl.float32), cap, CAPPED)
    offset = tl.arange(0, LANES)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    STEP: tl.constexpr = LANES * EACH
    # Each lane keeps its own running maximum and sum: no lane waits for another until the end.
    most = tl.full([LANES], -3.0e38, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    following = tl.load(x_ptr + offset, mask=offset < VOCABULARY, other=-float("inf"))
    for start in range(0, VOCABULARY, STEP):
        x = capped(following.to(tl.float32), cap, CAPPED)
        if CAPPED:
            x = tl.where(start + offset < VOCABULARY, x, -float("inf"))
        column = start + STEP + offset
        following = tl.load(x_ptr + column, mask=column < VOCABULARY, other=-float("inf"))
        higher = tl.maximum(most, tl.max(x, axis=1))
        total = total * tl.exp(most - higher) + tl.sum(tl.exp(x - higher[:, None]), axis=1)
        most = higher
    top = tl.max(most)
    whole = tl.log(tl.sum(total * tl.exp(most - top))) + top
    tl.store(loss_ptr + row, whole - right)
    factor = _factor(size_ptr + row, whole - right, scale, MOST)
    tl.debug_barrier()  # the target's logit has been read by all before anyone overwrites it
    following = tl.load(x_ptr + offset, mask=offset < VOCABULARY, other=0.0)
    for start in range(0, VOCABULARY, STEP):
        x = capped(following.to(tl.float32), cap, CAPPED)
        column = start + STEP + offset
        following = tl.load(x_ptr + column, mask=column < VOCABULARY, other=0.0)
        column = start + offset
        d = tl.exp(x - whole) - tl.where(column == target, 1.0, 0.0)
        d = uncapped(d, x, cap, CAPPED)
        small = tl.max_contiguous(small_ptr + column, [1, TOGETHER])
        _write(x_ptr + column, small, d * scale, factor, column < VOCABULARY, MOST)


SHORT = 16_384  # a longer row would take a processor's registers for itself, and nothing would overlap
LONG = {"LANES": 1024, "EACH": 8, "num_warps": 32}


def cross_entropy_(
    logits: Tensor, targets: Tensor, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """As `eager.cross_entropy_`."""
    return launch(logits, targets, scale, softcap), logits


def launch(
    logits: Tensor,
    targets: Tensor,
    scale: float,
    softcap: float | None,
    eight: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The losses; the gradient is written over the logits, and in eight bits where there is room for it."""
    rows, vocabulary = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    small, sizes = eight or (logits, losses)
    common = {
        "VOCABULARY": vocabulary,
        "CAPPED": softcap is not None,
        "MOST": torch.finfo(small.dtype).max if eight else None,
    }
    arguments = (logits, targets, losses, small, sizes, scale, softcap or 1.0)
    if vocabulary <= SHORT:
        warps = 8 if vocabulary > 2048 else 4
        block = max(128, triton.next_power_of_2(vocabulary))
        _short_cross_entropy_kernel[(rows,)](*arguments, **common, BLOCK=block, num_warps=warps)
    else:
        _long_cross_entropy_kernel[(rows,)](*arguments, **common, **LONG)
    return losses
