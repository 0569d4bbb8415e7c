"""Cross-entropy that turns logits into their gradient in place: each is read once and written once.

A row waits in the registers of one program between the two. It is cut into at most three pieces of sizes
that are powers of two, so that a vocabulary such as 50,304 fills them (32,768 + 16,384 + 2,048).
"""

# Triton's language is untyped.
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportReturnType=false, reportPossiblyUnbound=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _capped(raw, cap, CAPPED: tl.constexpr):
    # tanh(z) = 2·sigmoid(2z) − 1
    if CAPPED:
        return cap * (2 * tl.sigmoid(2 * raw / cap) - 1)
    return raw


@triton.jit
def _read(x_ptr, START: tl.constexpr, SIZE: tl.constexpr, VOCABULARY: tl.constexpr):
    column = START + tl.arange(0, SIZE)
    return tl.load(x_ptr + column, mask=column < VOCABULARY, other=-float("inf"))


@triton.jit
def _exponentials(x, top, cap, CAPPED: tl.constexpr):
    """The sum of a piece's exponentials, and the piece to keep: they themselves, or where capped the logits."""
    e = tl.exp(_capped(x.to(tl.float32), cap, CAPPED) - top)
    kept = x if CAPPED else e.to(x.dtype)
    return tl.sum(e), kept


@triton.jit
def _write(
    x_ptr, kept, top, total, scale, cap,
    START: tl.constexpr, SIZE: tl.constexpr, VOCABULARY: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    column = START + tl.arange(0, SIZE)
    if CAPPED:
        x = _capped(kept.to(tl.float32), cap, CAPPED)
        d = tl.exp(x - top) * (1 - (x / cap) * (x / cap))
    else:
        d = kept.to(tl.float32)
    tl.store(x_ptr + column, (d * (scale / total)).to(x_ptr.dtype.element_ty), mask=column < VOCABULARY)


@triton.jit
def _cross_entropy_kernel(
    x_ptr, target_ptr, loss_ptr, scale, cap,
    VOCABULARY: tl.constexpr, CAPPED: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * VOCABULARY
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
    _write(x_ptr, a, top, total, scale, cap, 0, A, VOCABULARY, CAPPED)
    if B:
        _write(x_ptr, b, top, total, scale, cap, A, B, VOCABULARY, CAPPED)
    if C:
        _write(x_ptr, c, top, total, scale, cap, A + B, C, VOCABULARY, CAPPED)
    # The target's own, p − 1: a small difference of numbers that may both be near one, so not from a rounded p.
    tl.debug_barrier()
    d = tl.exp(right - top) / total - 1
    if CAPPED:
        d = d * (1 - (right / cap) * (right / cap))
    tl.store(x_ptr + target, (d * scale).to(x_ptr.dtype.element_ty))


def pieces(vocabulary: int) -> tuple[int, int, int]:
    """Three powers of two, the later ones perhaps zero, that cover a row and little more."""
    first = 1 << (vocabulary.bit_length() - 1)
    rest = vocabulary - first
    if rest == 0:
        return first, 0, 0
    second = 1 << (rest.bit_length() - 1)
    third = rest - second
    return first, second, 0 if third == 0 else max(128, triton.next_power_of_2(third))


def cross_entropy_(
    logits: Tensor, targets: Tensor, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """As `eager.cross_entropy_`."""
    rows, vocabulary = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    a, b, c = pieces(vocabulary)
    # A thread's share of the row must fit in its registers: about a hundred numbers.
    warps = 32 if vocabulary > 65_536 else 16 if vocabulary > 16_384 else 8 if vocabulary > 2048 else 4
    _cross_entropy_kernel[(rows,)](
        logits, targets, losses, scale, softcap or 1.0,
        VOCABULARY=vocabulary, CAPPED=softcap is not None, A=a, B=b, C=c, num_warps=warps,
    )  # fmt: skip
    return losses, logits
