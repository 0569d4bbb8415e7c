"""Cross-entropy that turns logits into their gradient in place: one read and one write of them.

A row is read twice, but the second time it comes from the cache: few rows are in flight at once.
"""

# Triton's language is untyped.
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportCallIssue=false, reportReturnType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

EACH = 8  # neighbours one thread takes at a time: sixteen bytes of bf16


@triton.jit
def _capped(raw, cap, CAPPED: tl.constexpr):
    # tanh(z) = 2·sigmoid(2z) − 1
    if CAPPED:
        return cap * (2 * tl.sigmoid(2 * raw / cap) - 1)
    return raw


@triton.jit
def _cross_entropy_kernel(
    x_ptr, target_ptr, loss_ptr, scale, cap, VOCABULARY: tl.constexpr,
    CAPPED: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * VOCABULARY
    target = tl.load(target_ptr + row)
    right = _capped(tl.load(x_ptr + target).to(tl.float32), cap, CAPPED)
    offset = tl.arange(0, LANES)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    # Each lane keeps its own running maximum and sum: no lane waits for another until the end.
    most = tl.full([LANES], -3.0e38, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    for start in range(0, VOCABULARY, LANES * EACH):
        inside = start + offset < VOCABULARY
        x = tl.load(x_ptr + start + offset, mask=inside, other=-float("inf")).to(tl.float32)
        x = tl.where(inside, _capped(x, cap, CAPPED), -float("inf"))
        higher = tl.maximum(most, tl.max(x, axis=1))
        total = total * tl.exp(most - higher) + tl.sum(tl.exp(x - higher[:, None]), axis=1)
        most = higher
    top = tl.max(most)
    whole = tl.log(tl.sum(total * tl.exp(most - top))) + top
    tl.store(loss_ptr + row, whole - right)
    tl.debug_barrier()  # the target's logit has been read by all before anyone overwrites it
    for start in range(0, VOCABULARY, LANES * EACH):
        inside = start + offset < VOCABULARY
        raw = tl.load(x_ptr + start + offset, mask=inside, other=0.0).to(tl.float32)
        x = _capped(raw, cap, CAPPED)
        d = tl.exp(x - whole) - tl.where(start + offset == target, 1.0, 0.0)
        if CAPPED:
            d = d * (1 - (x / cap) * (x / cap))
        tl.store(x_ptr + start + offset, (d * scale).to(x_ptr.dtype.element_ty), mask=inside)


def cross_entropy_(logits: Tensor, targets: Tensor, scale: float, softcap: float | None) -> Tensor:
    """As `eager.cross_entropy_`."""
    rows, vocabulary = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    lanes = min(1024, max(32, triton.next_power_of_2(triton.cdiv(vocabulary, EACH))))
    _cross_entropy_kernel[(rows,)](
        logits, targets, losses, scale, softcap or 1.0, VOCABULARY=vocabulary,
        CAPPED=softcap is not None, LANES=lanes, EACH=EACH, num_warps=lanes // 32,
    )  # fmt: skip
    return losses
