"""RoPE and RMSNorm of queries and keys, in place, and the backward pass of both.

`qkv` is (batch, time, heads + 2·kv_heads, head_dim) and contiguous: the heads of the queries, of the keys and
of the values, as one GEMM writes them. `table` is (2, time, head_dim/2): cosines and sines. RoPE pairs each
element of the first half of a head with the same element of the second half.

Both operations read and write each element once, so a program handles all heads of one token: it reads the
token's angles once, and the heads lie next to each other in memory. The norm comes after the rotation, as in
the reference: a table that is rounded to bf16 changes the length of a vector a little.
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


def rotate_norm_reference_(qkv: Tensor, table: Tensor, eps: float, kv_heads: int) -> Tensor:
    """Apply RoPE, then RMSNorm over head_dim, to queries and keys in place.

    Returns the norms' reciprocal root mean squares, (batch, time, heads + kv_heads).
    """
    qk = at_least_fp32(qkv[:, :, :-kv_heads])
    cos, sin = at_least_fp32(table)[:, :, None].unbind()
    first, second = qk.chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
    rstd = torch.rsqrt(rotated.square().mean(-1) + eps)
    qkv[:, :, :-kv_heads] = (rotated * rstd[..., None]).to(qkv.dtype)
    return rstd


def rotate_norm_backward_reference(
    dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor, rstd: Tensor, table: Tensor
) -> Tensor:
    """Gradient of the input of `rotate_norm_`, (tokens, (heads + 2·kv_heads)·head_dim), from those of query,
    key and value.

    dq is (batch, time, heads, head_dim), dk and dv have kv_heads, all of any strides; `qkv` is what
    `rotate_norm_` wrote: the norm's output is all that its gradient needs besides `rstd`.
    """
    d, y = at_least_fp32(torch.cat([dq, dk], dim=2)), at_least_fp32(qkv[:, :, : -dk.shape[2]])
    d = rstd[..., None] * (d - y * (d * y).mean(-1, keepdim=True))
    cos, sin = at_least_fp32(table)[:, :, None].unbind()
    first, second = d.chunk(2, dim=-1)
    d_qk = torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1)
    return torch.cat([d_qk.to(qkv.dtype), dv], dim=2).flatten(0, 1).flatten(1)


def rotate_norm_backward_fp8_reference(
    dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor, rstd: Tensor, table: Tensor
) -> RowwiseFp8:
    """`rotate_norm_backward_reference`, quantized; the unquantized gradient is not kept."""
    d = rotate_norm_backward_reference(dq, dk, dv, qkv, rstd, table)
    return RowwiseFp8(None, *quantize_rows_reference(d, GRADIENT_DTYPE))


@triton.jit
def _rotate_norm_kernel(
    qkv_ptr, table_ptr, rstd_ptr, time, heads, row, half, eps,
    HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """One token of `row` elements: HEADS covers the query heads and then the key heads, HALF half a head."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, HALF)[None, :]
    column_mask = column < half
    mask = (head < heads) & column_mask
    angle = table_ptr + (token % time) * half + column
    cos = tl.load(angle, mask=column_mask, other=0.0).to(tl.float32)
    sin = tl.load(angle + time * half, mask=column_mask, other=0.0).to(tl.float32)
    pointer = qkv_ptr + token * row + head * (2 * half) + column
    first = tl.load(pointer, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(pointer + half, mask=mask, other=0.0).to(tl.float32)
    rotated_first = first * cos - second * sin
    rotated_second = first * sin + second * cos
    squares = tl.sum(rotated_first * rotated_first + rotated_second * rotated_second, axis=1)
    rstd = tl.rsqrt(squares / (2 * half) + eps)
    index = tl.arange(0, HEADS)
    tl.store(rstd_ptr + token * heads + index, rstd, mask=index < heads)
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
def _token_heads(token, offset, heads, row, half, HEADS: tl.constexpr, HALF: tl.constexpr):
    """Mask and offsets, in a token's row of qkv, of `heads` heads of which the first has number `offset`."""
    head = tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, HALF)[None, :]
    return (head < heads) & (column < half), token * row + (offset + head) * (2 * half) + column


@triton.jit
def _rotate_norm_heads_gradient(
    d_ptr, d_batch, d_time, d_head, qkv_ptr, rstd_ptr, table_ptr,
    token, offset, heads, rotated, row, time, half,
    HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Gradient of both halves of the query or key heads of one token, in fp32, with their mask and offsets.

    The gradient of attention has strides of its own; `qkv` and `rstd` are contiguous.
    """
    batch, position = token // time, token % time
    mask, offsets = _token_heads(token, offset, heads, row, half, HEADS, HALF)
    head = tl.arange(0, HEADS)
    column = tl.arange(0, HALF)[None, :]
    angle = table_ptr + position * half + column
    cos = tl.load(angle, mask=column < half, other=0.0).to(tl.float32)
    sin = tl.load(angle + time * half, mask=column < half, other=0.0).to(tl.float32)
    rstd = tl.load(rstd_ptr + token * rotated + offset + head, mask=head < heads, other=0.0)
    d = d_ptr + batch * d_batch + position * d_time + head[:, None] * d_head + column
    first, second = _rotate_norm_gradient(d, qkv_ptr + offsets, rstd, cos, sin, mask, half)
    return first, second, mask, offsets


@triton.jit
def _value_gradient(
    dv_ptr, dv_batch, dv_time, dv_head, token, offset, kv_heads, row, time, half,
    HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Gradient of both halves of the value heads of one token, with their mask and offsets."""
    batch, position = token // time, token % time
    mask, offsets = _token_heads(token, offset, kv_heads, row, half, HEADS, HALF)
    head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    pointer = dv_ptr + batch * dv_batch + position * dv_time + head * dv_head + column
    return (
        tl.load(pointer, mask=mask, other=0.0),
        tl.load(pointer + half, mask=mask, other=0.0),
        mask,
        offsets,
    )


@triton.jit
def _store_halves(out_ptr, offsets, first, second, mask, half):
    dtype = out_ptr.dtype.element_ty
    tl.store(out_ptr + offsets, first.to(dtype), mask=mask)
    tl.store(out_ptr + offsets + half, second.to(dtype), mask=mask)


@triton.jit
def _rotate_norm_backward_kernel(
    dq_ptr, dk_ptr, dv_ptr,
    dq_batch, dq_time, dq_head, dk_batch, dk_time, dk_head, dv_batch, dv_time, dv_head,
    qkv_ptr, rstd_ptr, table_ptr, out_ptr, time, heads, kv_heads, half,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """One token: queries, keys and values one after the other, so that few registers are held."""
    token = tl.program_id(0).to(tl.int64)
    rotated, row = heads + kv_heads, (heads + 2 * kv_heads) * 2 * half
    first, second, mask, offsets = _rotate_norm_heads_gradient(
        dq_ptr, dq_batch, dq_time, dq_head, qkv_ptr, rstd_ptr, table_ptr,
        token, 0, heads, rotated, row, time, half, HEADS, HALF,
    )  # fmt: skip
    _store_halves(out_ptr, offsets, first, second, mask, half)
    first, second, mask, offsets = _rotate_norm_heads_gradient(
        dk_ptr, dk_batch, dk_time, dk_head, qkv_ptr, rstd_ptr, table_ptr,
        token, heads, kv_heads, rotated, row, time, half, KV_HEADS, HALF,
    )  # fmt: skip
    _store_halves(out_ptr, offsets, first, second, mask, half)
    first, second, mask, offsets = _value_gradient(
        dv_ptr, dv_batch, dv_time, dv_head, token, rotated, kv_heads, row, time, half, KV_HEADS, HALF
    )  # fmt: skip
    _store_halves(out_ptr, offsets, first, second, mask, half)


@triton.jit
def _pair_amax(first, second):
    return tl.max(tl.maximum(tl.abs(first), tl.abs(second)))


@triton.jit
def _rotate_norm_backward_fp8_kernel(
    dq_ptr, dk_ptr, dv_ptr,
    dq_batch, dq_time, dq_head, dk_batch, dk_time, dk_head, dv_batch, dv_time, dv_head,
    qkv_ptr, rstd_ptr, table_ptr, fp8_ptr, scale_ptr, time, heads, kv_heads, half,
    FP8_MAX: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """One token, whose query, key and value gradients are one row of a GEMM and so share one fp8 scale: all
    of them stay in registers until it is known.
    """
    token = tl.program_id(0).to(tl.int64)
    rotated, row = heads + kv_heads, (heads + 2 * kv_heads) * 2 * half
    q1, q2, q_mask, q_offsets = _rotate_norm_heads_gradient(
        dq_ptr, dq_batch, dq_time, dq_head, qkv_ptr, rstd_ptr, table_ptr,
        token, 0, heads, rotated, row, time, half, HEADS, HALF,
    )  # fmt: skip
    k1, k2, k_mask, k_offsets = _rotate_norm_heads_gradient(
        dk_ptr, dk_batch, dk_time, dk_head, qkv_ptr, rstd_ptr, table_ptr,
        token, heads, kv_heads, rotated, row, time, half, KV_HEADS, HALF,
    )  # fmt: skip
    v1, v2, v_mask, v_offsets = _value_gradient(
        dv_ptr, dv_batch, dv_time, dv_head, token, rotated, kv_heads, row, time, half, KV_HEADS, HALF
    )  # fmt: skip
    v1, v2 = v1.to(tl.float32), v2.to(tl.float32)
    amax = tl.maximum(_pair_amax(q1, q2), tl.maximum(_pair_amax(k1, k2), _pair_amax(v1, v2)))
    multiplier, scale = fp8_row_scale(amax, FP8_MAX)
    tl.store(scale_ptr + token, scale)
    _store_halves(fp8_ptr, q_offsets, q1 * multiplier, q2 * multiplier, q_mask, half)
    _store_halves(fp8_ptr, k_offsets, k1 * multiplier, k2 * multiplier, k_mask, half)
    _store_halves(fp8_ptr, v_offsets, v1 * multiplier, v2 * multiplier, v_mask, half)


def _launch_options(heads: int, half: int) -> dict[str, int]:
    """One program per token; 8 neighbouring elements, 16 bytes of bf16, per thread."""
    block_heads, block_half = triton.next_power_of_2(heads), triton.next_power_of_2(half)
    warps = min(max(block_heads * block_half // 256, 1), 8)
    return {"HEADS": block_heads, "HALF": block_half, "num_warps": warps}


def rotate_norm_triton_(qkv: Tensor, table: Tensor, eps: float, kv_heads: int) -> Tensor:
    """`rotate_norm_reference_` in Triton."""
    batch, time, heads, head_dim = qkv.shape
    rotated = heads - kv_heads
    rstd = torch.empty(batch, time, rotated, dtype=torch.float32, device=qkv.device)
    _rotate_norm_kernel[(batch * time,)](
        qkv, table, rstd, time, rotated, heads * head_dim, head_dim // 2, eps,
        **_launch_options(rotated, head_dim // 2),
    )  # fmt: skip
    return rstd


def _backward_arguments(dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[list[Tensor | int], dict[str, int]]:
    """Gradients whose last dimension is contiguous (that of attention's math backend is not) with their
    strides, and launch options.
    """
    gradients = [d if d.stride(-1) == 1 else d.contiguous() for d in (dq, dk, dv)]
    strides = [stride for d in gradients for stride in d.stride()[:3]]
    options = _launch_options(dq.shape[2], dq.shape[3] // 2)
    return [*gradients, *strides], {**options, "KV_HEADS": triton.next_power_of_2(dk.shape[2])}


def rotate_norm_backward_triton(
    dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor, rstd: Tensor, table: Tensor
) -> Tensor:
    """`rotate_norm_backward_reference` in Triton."""
    batch, time, _, head_dim = qkv.shape
    out = torch.empty_like(qkv)
    gradients, options = _backward_arguments(dq, dk, dv)
    _rotate_norm_backward_kernel[(batch * time,)](
        *gradients, qkv, rstd, table, out, time, dq.shape[2], dk.shape[2], head_dim // 2, **options
    )  # fmt: skip
    return out.view(batch * time, -1)


def rotate_norm_backward_fp8_triton(
    dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor, rstd: Tensor, table: Tensor
) -> RowwiseFp8:
    """`rotate_norm_backward_fp8_reference` in Triton."""
    batch, time, heads, head_dim = qkv.shape
    data, scale = empty_rowwise(batch * time, heads * head_dim, GRADIENT_DTYPE, qkv.device)
    gradients, options = _backward_arguments(dq, dk, dv)
    _rotate_norm_backward_fp8_kernel[(batch * time,)](
        *gradients, qkv, rstd, table, data, scale, time, dq.shape[2], dk.shape[2], head_dim // 2,
        FP8_MAX=fp8_max(GRADIENT_DTYPE), **options,
    )  # fmt: skip
    return RowwiseFp8(None, data, scale)
