"""RoPE and RMSNorm of queries and keys, in place, and the backward pass of both.

`qkv` is (batch, time, 3, heads, head_dim) and contiguous. `table` is (2, time, head_dim/2): cosines and
sines. RoPE pairs each element of the first half of a head with the same element of the second half.
"""

# Triton kernels are untyped.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportReturnType=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import torch
from torch import Tensor

from steepen.kernels.fp8 import (
    GRADIENT_DTYPE,
    RowwiseFp8,
    empty_rowwise,
    fp8_max,
    fp8_row_scale,
    quantize_rows_reference,
)
from steepen.kernels.norm import at_least_fp32
from steepen.kernels.triton_backend import tl, triton


def rotate_norm_reference_(qkv: Tensor, table: Tensor, eps: float) -> Tensor:
    """Apply RoPE, then RMSNorm over head_dim, to queries and keys in place.

    Returns the norms' reciprocal root mean squares, (batch, time, 2, heads).
    """
    qk = at_least_fp32(qkv[:, :, :2])
    cos, sin = at_least_fp32(table)[:, :, None, None].unbind()
    first, second = qk.chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
    rstd = torch.rsqrt(rotated.square().mean(-1) + eps)
    qkv[:, :, :2] = (rotated * rstd[..., None]).to(qkv.dtype)
    return rstd


def rotate_norm_backward_reference(
    dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor, rstd: Tensor, table: Tensor
) -> Tensor:
    """Gradient of the input of `rotate_norm_`, (tokens, 3·heads·head_dim), from that of query, key, value.

    dq, dk and dv are (batch, time, heads, head_dim) of any strides; `qkv` is what `rotate_norm_` wrote.
    """
    d, y = at_least_fp32(torch.stack([dq, dk], dim=2)), at_least_fp32(qkv[:, :, :2])
    d = rstd[..., None] * (d - y * (d * y).mean(-1, keepdim=True))
    cos, sin = at_least_fp32(table)[:, :, None, None].unbind()
    first, second = d.chunk(2, dim=-1)
    d_qk = torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1)
    return torch.cat([d_qk.to(qkv.dtype), dv[:, :, None]], dim=2).flatten(0, 1).flatten(1)


def rotate_norm_backward_fp8_reference(
    dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor, rstd: Tensor, table: Tensor
) -> RowwiseFp8:
    """`rotate_norm_backward_reference`, quantized; the unquantized gradient is not kept."""
    d = rotate_norm_backward_reference(dq, dk, dv, qkv, rstd, table)
    return RowwiseFp8(None, *quantize_rows_reference(d, GRADIENT_DTYPE))


@triton.jit
def _rotate_norm_kernel(
    qkv_ptr, table_ptr, rstd_ptr, time, heads, half, eps,
    HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """One token: HEADS covers the query heads and then the key heads, HALF half a head."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, HALF)[None, :]
    column_mask = column < half
    mask = (head < 2 * heads) & column_mask
    angle = table_ptr + (token % time) * half + column
    cos = tl.load(angle, mask=column_mask, other=0.0).to(tl.float32)
    sin = tl.load(angle + time * half, mask=column_mask, other=0.0).to(tl.float32)
    pointer = qkv_ptr + token * (6 * heads * half) + head * (2 * half) + column
    first = tl.load(pointer, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(pointer + half, mask=mask, other=0.0).to(tl.float32)
    rotated_first = first * cos - second * sin
    rotated_second = first * sin + second * cos
    squares = tl.sum(rotated_first * rotated_first + rotated_second * rotated_second, axis=1)
    rstd = tl.rsqrt(squares / (2 * half) + eps)
    index = tl.arange(0, HEADS)
    tl.store(rstd_ptr + token * (2 * heads) + index, rstd, mask=index < 2 * heads)
    dtype = qkv_ptr.dtype.element_ty
    tl.store(pointer, (rotated_first * rstd[:, None]).to(dtype), mask=mask)
    tl.store(pointer + half, (rotated_second * rstd[:, None]).to(dtype), mask=mask)


@triton.jit
def _rotate_norm_gradient(d_pointer, y_pointer, rstd, cos, sin, mask, half):
    """Gradient of both halves of the query or key heads of one token, in fp32."""
    first = tl.load(d_pointer, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(d_pointer + half, mask=mask, other=0.0).to(tl.float32)
    y_first = tl.load(y_pointer, mask=mask, other=0.0).to(tl.float32)
    y_second = tl.load(y_pointer + half, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(first * y_first + second * y_second, axis=1) / (2 * half)
    first = rstd[:, None] * (first - y_first * mean[:, None])
    second = rstd[:, None] * (second - y_second * mean[:, None])
    return first * cos + second * sin, second * cos - first * sin


@triton.jit
def _store_rotate_norm_gradient(d_pointer, y_pointer, out, rstd, cos, sin, mask, half):
    first, second = _rotate_norm_gradient(d_pointer, y_pointer, rstd, cos, sin, mask, half)
    dtype = out.dtype.element_ty
    tl.store(out, first.to(dtype), mask=mask)
    tl.store(out + half, second.to(dtype), mask=mask)


@triton.jit
def _rotate_norm_backward_kernel(
    dq_ptr, dk_ptr, dv_ptr,
    dq_batch, dq_time, dq_head, dk_batch, dk_time, dk_head, dv_batch, dv_time, dv_head,
    qkv_ptr, rstd_ptr, table_ptr, out_ptr, time, heads, half,
    HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    batch, position = token // time, token % time
    head = tl.arange(0, HEADS)[:, None]
    index = tl.arange(0, HEADS)
    column = tl.arange(0, HALF)[None, :]
    column_mask = column < half
    mask = (head < heads) & column_mask
    angle = table_ptr + position * half + column
    cos = tl.load(angle, mask=column_mask, other=0.0).to(tl.float32)
    sin = tl.load(angle + time * half, mask=column_mask, other=0.0).to(tl.float32)
    offset = token * (6 * heads * half) + head * (2 * half) + column
    rstd_pointer = rstd_ptr + token * (2 * heads) + index
    rstd = tl.load(rstd_pointer, mask=index < heads, other=0.0)
    y_pointer = qkv_ptr + offset
    query = dq_ptr + batch * dq_batch + position * dq_time + head * dq_head + column
    _store_rotate_norm_gradient(query, y_pointer, out_ptr + offset, rstd, cos, sin, mask, half)
    step = 2 * heads * half
    rstd = tl.load(rstd_pointer + heads, mask=index < heads, other=0.0)
    key = dk_ptr + batch * dk_batch + position * dk_time + head * dk_head + column
    _store_rotate_norm_gradient(key, y_pointer + step, out_ptr + offset + step, rstd, cos, sin, mask, half)
    value = dv_ptr + batch * dv_batch + position * dv_time + head * dv_head + column
    out = out_ptr + offset + 2 * step
    tl.store(out, tl.load(value, mask=mask), mask=mask)
    tl.store(out + half, tl.load(value + half, mask=mask), mask=mask)


@triton.jit
def _pair_amax(first, second):
    return tl.maximum(tl.abs(first), tl.abs(second))


@triton.jit
def _store_pair_fp8(fp8_ptr, offset, first, second, multiplier, mask, half):
    dtype = fp8_ptr.dtype.element_ty
    tl.store(fp8_ptr + offset, (first * multiplier).to(dtype), mask=mask)
    tl.store(fp8_ptr + offset + half, (second * multiplier).to(dtype), mask=mask)


@triton.jit
def _rotate_norm_backward_fp8_kernel(
    dq_ptr, dk_ptr, dv_ptr,
    dq_batch, dq_time, dq_head, dk_batch, dk_time, dk_head, dv_batch, dv_time, dv_head,
    qkv_ptr, rstd_ptr, table_ptr, fp8_ptr, scale_ptr, time, heads, half,
    FP8_MAX: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """One token, whose query, key and value gradients share one fp8 scale."""
    token = tl.program_id(0).to(tl.int64)
    batch, position = token // time, token % time
    index = tl.arange(0, HEADS)
    head = index[:, None]
    column = tl.arange(0, HALF)[None, :]
    column_mask = column < half
    mask = (head < heads) & column_mask
    angle = table_ptr + position * half + column
    cos = tl.load(angle, mask=column_mask, other=0.0).to(tl.float32)
    sin = tl.load(angle + time * half, mask=column_mask, other=0.0).to(tl.float32)
    offset = token * (6 * heads * half) + head * (2 * half) + column
    step = 2 * heads * half
    rstd_pointer = rstd_ptr + token * (2 * heads) + index

    rstd = tl.load(rstd_pointer, mask=index < heads, other=0.0)
    pointer = dq_ptr + batch * dq_batch + position * dq_time + head * dq_head + column
    q1, q2 = _rotate_norm_gradient(pointer, qkv_ptr + offset, rstd, cos, sin, mask, half)
    rstd = tl.load(rstd_pointer + heads, mask=index < heads, other=0.0)
    pointer = dk_ptr + batch * dk_batch + position * dk_time + head * dk_head + column
    k1, k2 = _rotate_norm_gradient(pointer, qkv_ptr + offset + step, rstd, cos, sin, mask, half)
    pointer = dv_ptr + batch * dv_batch + position * dv_time + head * dv_head + column
    v1 = tl.load(pointer, mask=mask, other=0.0).to(tl.float32)
    v2 = tl.load(pointer + half, mask=mask, other=0.0).to(tl.float32)

    amax = tl.maximum(_pair_amax(q1, q2), tl.maximum(_pair_amax(k1, k2), _pair_amax(v1, v2)))
    multiplier, scale = fp8_row_scale(tl.max(amax), FP8_MAX)
    tl.store(scale_ptr + token, scale)
    _store_pair_fp8(fp8_ptr, offset, q1, q2, multiplier, mask, half)
    _store_pair_fp8(fp8_ptr, offset + step, k1, k2, multiplier, mask, half)
    _store_pair_fp8(fp8_ptr, offset + 2 * step, v1, v2, multiplier, mask, half)


def _launch_options(heads: int, half: int) -> dict[str, int]:
    """One program per token; 8 neighbouring elements, 16 bytes of bf16, per thread."""
    block_heads, block_half = triton.next_power_of_2(heads), triton.next_power_of_2(half)
    warps = min(max(block_heads * block_half // 256, 1), 8)
    return {"HEADS": block_heads, "HALF": block_half, "num_warps": warps}


def rotate_norm_triton_(qkv: Tensor, table: Tensor, eps: float) -> Tensor:
    """`rotate_norm_reference_` in Triton."""
    batch, time, _, heads, head_dim = qkv.shape
    rstd = torch.empty(batch, time, 2, heads, dtype=torch.float32, device=qkv.device)
    _rotate_norm_kernel[(batch * time,)](
        qkv, table, rstd, time, heads, head_dim // 2, eps, **_launch_options(2 * heads, head_dim // 2)
    )  # fmt: skip
    return rstd


def _with_contiguous_heads(*gradients: Tensor) -> list[Tensor]:
    """Gradients whose last dimension is contiguous; that of attention's math backend is not."""
    return [d if d.stride(-1) == 1 else d.contiguous() for d in gradients]


def rotate_norm_backward_triton(
    dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor, rstd: Tensor, table: Tensor
) -> Tensor:
    """`rotate_norm_backward_reference` in Triton."""
    batch, time, _, heads, head_dim = qkv.shape
    out = torch.empty_like(qkv)
    gradients = _with_contiguous_heads(dq, dk, dv)
    strides = [stride for d in gradients for stride in d.stride()[:3]]
    _rotate_norm_backward_kernel[(batch * time,)](
        *gradients, *strides, qkv, rstd, table, out, time, heads, head_dim // 2,
        **_launch_options(heads, head_dim // 2),
    )  # fmt: skip
    return out.view(batch * time, -1)


def rotate_norm_backward_fp8_triton(
    dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor, rstd: Tensor, table: Tensor
) -> RowwiseFp8:
    """`rotate_norm_backward_fp8_reference` in Triton."""
    batch, time, _, heads, head_dim = qkv.shape
    data, scale = empty_rowwise(batch * time, 3 * heads * head_dim, GRADIENT_DTYPE, qkv.device)
    gradients = _with_contiguous_heads(dq, dk, dv)
    strides = [stride for d in gradients for stride in d.stride()[:3]]
    _rotate_norm_backward_fp8_kernel[(batch * time,)](
        *gradients, *strides, qkv, rstd, table, data, scale, time, heads, head_dim // 2,
        FP8_MAX=fp8_max(GRADIENT_DTYPE), **_launch_options(heads, head_dim // 2),
    )  # fmt: skip
    return RowwiseFp8(None, data, scale)
