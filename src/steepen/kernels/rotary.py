"""RoPE and the norm of queries and keys, in place; and back."""

# Triton's language is untyped.
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportReturnType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rotate_norm_kernel(
    qkv_ptr, table_ptr, rstd_ptr, time, heads, half, eps,
    HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]  # queries' and keys' heads, one after the other
    column = tl.arange(0, HALF)[None, :]
    there = column < half
    inside = (head < 2 * heads) & there
    angle = table_ptr + (token % time) * half + column
    cos = tl.load(angle, mask=there, other=0.0).to(tl.float32)
    sin = tl.load(angle + time * half, mask=there, other=0.0).to(tl.float32)
    place = qkv_ptr + token * (6 * heads * half) + head * (2 * half) + column
    first = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(place + half, mask=inside, other=0.0).to(tl.float32)
    turned = first * cos - second * sin
    other = first * sin + second * cos
    rstd = tl.rsqrt(tl.sum(turned * turned + other * other, axis=1) / (2 * half) + eps)
    index = tl.arange(0, HEADS)
    tl.store(rstd_ptr + token * (2 * heads) + index, rstd, mask=index < 2 * heads)
    kind = qkv_ptr.dtype.element_ty
    tl.store(place, (turned * rstd[:, None]).to(kind), mask=inside)
    tl.store(place + half, (other * rstd[:, None]).to(kind), mask=inside)


@triton.jit
def turned_back(d_place, y_place, rstd, cos, sin, inside, half):
    """The gradient of the two halves of queries' or keys' heads."""
    first = tl.load(d_place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(d_place + half, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(y_place, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(y_place + half, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(first * y + second * z, axis=1) / (2 * half)
    first = rstd[:, None] * (first - y * mean[:, None])
    second = rstd[:, None] * (second - z * mean[:, None])
    return first * cos + second * sin, second * cos - first * sin


@triton.jit
def _back(d_place, y_place, out, rstd, cos, sin, inside, half):
    first, second = turned_back(d_place, y_place, rstd, cos, sin, inside, half)
    kind = out.dtype.element_ty
    tl.store(out, first.to(kind), mask=inside)
    tl.store(out + half, second.to(kind), mask=inside)


@triton.jit
def _rotate_norm_backward_kernel(
    dq_ptr, dk_ptr, dv_ptr, qb, qt, qh, kb, kt, kh, vb, vt, vh,
    qkv_ptr, rstd_ptr, table_ptr, out_ptr, time, heads, half,
    HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    batch, moment = token // time, token % time
    head = tl.arange(0, HEADS)[:, None]
    index = tl.arange(0, HEADS)
    column = tl.arange(0, HALF)[None, :]
    there = column < half
    inside = (head < heads) & there
    angle = table_ptr + moment * half + column
    cos = tl.load(angle, mask=there, other=0.0).to(tl.float32)
    sin = tl.load(angle + time * half, mask=there, other=0.0).to(tl.float32)
    offset = token * (6 * heads * half) + head * (2 * half) + column
    sizes = rstd_ptr + token * (2 * heads) + index
    rstd = tl.load(sizes, mask=index < heads, other=0.0)
    place = qkv_ptr + offset
    query = dq_ptr + batch * qb + moment * qt + head * qh + column
    _back(query, place, out_ptr + offset, rstd, cos, sin, inside, half)
    step = 2 * heads * half
    rstd = tl.load(sizes + heads, mask=index < heads, other=0.0)
    key = dk_ptr + batch * kb + moment * kt + head * kh + column
    _back(key, place + step, out_ptr + offset + step, rstd, cos, sin, inside, half)
    value = dv_ptr + batch * vb + moment * vt + head * vh + column
    out = out_ptr + offset + 2 * step
    tl.store(out, tl.load(value, mask=inside), mask=inside)
    tl.store(out + half, tl.load(value + half, mask=inside), mask=inside)


def _shape(heads: int, half: int) -> dict[str, int]:
    across, along = triton.next_power_of_2(heads), triton.next_power_of_2(half)
    # Eight neighbours, sixteen bytes of bf16, to a thread.
    return {"HEADS": across, "HALF": along, "num_warps": min(max(across * along // 256, 1), 8)}


def rotate_norm_(qkv: Tensor, table: Tensor, eps: float) -> Tensor:
    """As `eager.rotate_norm_`."""
    batch, time, _, heads, size = qkv.shape
    rstd = torch.empty(batch, time, 2, heads, dtype=torch.float32, device=qkv.device)
    _rotate_norm_kernel[(batch * time,)](
        qkv, table, rstd, time, heads, size // 2, eps, **_shape(2 * heads, size // 2)
    )  # fmt: skip
    return rstd


def along_heads(d: Tensor) -> Tensor:
    """d with each head's numbers side by side: of attention's backends the plainest may give others."""
    return d if d.stride(-1) == 1 else d.contiguous()


def rotate_norm_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor, rstd: Tensor, table: Tensor
) -> Tensor:
    """As `eager.rotate_norm_backward`."""
    batch, time, _, heads, size = qkv.shape
    out = torch.empty_like(qkv)
    dq, dk, dv = (along_heads(d) for d in (dq, dk, dv))
    strides = [stride for d in (dq, dk, dv) for stride in d.stride()[:3]]
    _rotate_norm_backward_kernel[(batch * time,)](
        dq, dk, dv, *strides, qkv, rstd, table, out, time, heads, size // 2, **_shape(heads, size // 2)
    )  # fmt: skip
    return out.view(batch * time, -1)
