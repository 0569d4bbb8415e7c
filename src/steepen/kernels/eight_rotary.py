"""The way back through RoPE and the norm of queries and keys, with the result in eight bits."""

# Triton's language is untyped.
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportReturnType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from steepen.kernels.eight_rows import factors, room
from steepen.kernels.fp8 import GRADIENT, RowwiseFp8, most
from steepen.kernels.rotary import along_heads, turned_back


@triton.jit
def _larger(first, second):
    return tl.maximum(tl.abs(first), tl.abs(second))


@triton.jit
def _write(small_ptr, offset, first, second, factor, inside, half):
    kind = small_ptr.dtype.element_ty
    tl.store(small_ptr + offset, (first * factor).to(kind), mask=inside)
    tl.store(small_ptr + offset + half, (second * factor).to(kind), mask=inside)


@triton.jit
def _rotate_norm_backward8_kernel(
    dq_ptr, dk_ptr, dv_ptr, qb, qt, qh, kb, kt, kh, vb, vt, vh,
    qkv_ptr, rstd_ptr, table_ptr, small_ptr, scale_ptr, time, heads, half,
    MOST: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    batch, moment = token // time, token % time
    index = tl.arange(0, HEADS)
    head = index[:, None]
    column = tl.arange(0, HALF)[None, :]
    there = column < half
    inside = (head < heads) & there
    angle = table_ptr + moment * half + column
    cos = tl.load(angle, mask=there, other=0.0).to(tl.float32)
    sin = tl.load(angle + time * half, mask=there, other=0.0).to(tl.float32)
    offset = token * (6 * heads * half) + head * (2 * half) + column
    step = 2 * heads * half
    sizes = rstd_ptr + token * (2 * heads) + index

    rstd = tl.load(sizes, mask=index < heads, other=0.0)
    place = dq_ptr + batch * qb + moment * qt + head * qh + column
    q1, q2 = turned_back(place, qkv_ptr + offset, rstd, cos, sin, inside, half)
    rstd = tl.load(sizes + heads, mask=index < heads, other=0.0)
    place = dk_ptr + batch * kb + moment * kt + head * kh + column
    k1, k2 = turned_back(place, qkv_ptr + offset + step, rstd, cos, sin, inside, half)
    place = dv_ptr + batch * vb + moment * vt + head * vh + column
    v1 = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    v2 = tl.load(place + half, mask=inside, other=0.0).to(tl.float32)

    larger = tl.maximum(_larger(q1, q2), tl.maximum(_larger(k1, k2), _larger(v1, v2)))
    factor, scale = factors(tl.max(larger), MOST)
    tl.store(scale_ptr + token, scale)
    _write(small_ptr, offset, q1, q2, factor, inside, half)
    _write(small_ptr, offset + step, k1, k2, factor, inside, half)
    _write(small_ptr, offset + 2 * step, v1, v2, factor, inside, half)


def rotate_norm_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor, rstd: Tensor, table: Tensor
) -> RowwiseFp8:
    """As `eager8.rotate_norm_backward`."""
    batch, time, _, heads, size = qkv.shape
    small, scale = room(batch * time, 3 * heads * size, GRADIENT, qkv.device)
    dq, dk, dv = (along_heads(d) for d in (dq, dk, dv))
    strides = [stride for d in (dq, dk, dv) for stride in d.stride()[:3]]
    across, along = triton.next_power_of_2(heads), triton.next_power_of_2(size // 2)
    _rotate_norm_backward8_kernel[(batch * time,)](
        dq, dk, dv, *strides, qkv, rstd, table, small, scale, time, heads, size // 2,
        MOST=most(GRADIENT), HEADS=across, HALF=along, num_warps=min(max(across * along // 256, 1), 8),
    )  # fmt: skip
    return RowwiseFp8(None, small, scale)
