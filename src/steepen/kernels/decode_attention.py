"""Attention of one new token per row to a KV cache: RoPE, QK norm, the cache's update and softmax in one.

`qkv` is (rows, 3, heads, head_dim) and contiguous, of the new tokens. `table` is (2, rows, head_dim/2):
cosines and sines of their positions. `keys` and `values` are (rows, heads, length, head_dim), each head
contiguous. Row r has cached tokens from `padding[r]` on; the new one is stored at `index` (a tensor of one
element), the same in every row.
"""

# Triton kernels are untyped.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportReturnType=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from steepen.kernels.norm import at_least_fp32
from steepen.kernels.rotary import rotate_norm_reference_
from steepen.kernels.triton_backend import tl, triton

KEYS_PER_STEP = 128  # that a program loads at once


def decode_attention_reference(
    qkv: Tensor,
    table: Tensor,
    keys: Tensor,
    values: Tensor,
    index: Tensor,
    padding: Tensor,
    eps: float,
    scale: float,
) -> Tensor:
    """Store the new keys and values, and return what the new tokens attend to, (rows, heads·head_dim)."""
    new = qkv.clone()
    rotate_norm_reference_(new.unsqueeze(0), table, eps)
    query, key, value = new.unbind(1)
    keys.index_copy_(2, index, key.unsqueeze(2))
    values.index_copy_(2, index, value.unsqueeze(2))
    places = torch.arange(keys.shape[2], device=keys.device)
    visible = (places >= padding.unsqueeze(1)) & (places <= index)
    attended = functional.scaled_dot_product_attention(
        *(at_least_fp32(each) for each in (query.unsqueeze(2), keys, values)),
        attn_mask=visible[:, None, None],
        scale=scale,
    )
    return attended.flatten(1).to(qkv.dtype)


@triton.jit
def _rotate_and_norm(pointer, cos, sin, mask, half, eps):
    """Both halves of a head after RoPE and RMSNorm, rounded to the dtype they have in memory, in fp32."""
    first = tl.load(pointer, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(pointer + half, mask=mask, other=0.0).to(tl.float32)
    rotated_first = first * cos - second * sin
    rotated_second = first * sin + second * cos
    rstd = tl.rsqrt(
        tl.sum(rotated_first * rotated_first + rotated_second * rotated_second) / (2 * half) + eps
    )
    dtype = pointer.dtype.element_ty
    return (rotated_first * rstd).to(dtype).to(tl.float32), (rotated_second * rstd).to(dtype).to(tl.float32)


@triton.jit
def _decode_attention_kernel(
    qkv_ptr, table_ptr, keys_ptr, values_ptr, index_ptr, padding_ptr, out_ptr,
    rows, heads, half, row_stride, head_stride, eps, scale,
    HALF: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """One head of one row; softmax is accumulated over KEYS cached keys at a time, from the new key on."""
    row = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    index, padding = tl.load(index_ptr), tl.load(padding_ptr + row)
    column = tl.arange(0, HALF)
    mask = column < half
    cos = tl.load(table_ptr + row * half + column, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(table_ptr + (rows + row) * half + column, mask=mask, other=0.0).to(tl.float32)
    new = qkv_ptr + row * (6 * heads * half) + head * (2 * half) + column
    step = 2 * heads * half
    q1, q2 = _rotate_and_norm(new, cos, sin, mask, half, eps)
    k1, k2 = _rotate_and_norm(new + step, cos, sin, mask, half, eps)
    total1 = tl.load(new + 2 * step, mask=mask, other=0.0).to(tl.float32)
    total2 = tl.load(new + 2 * step + half, mask=mask, other=0.0).to(tl.float32)

    dtype = keys_ptr.dtype.element_ty
    cached = row * row_stride + head * head_stride + column
    place = cached + index * (2 * half)
    tl.store(keys_ptr + place, k1.to(dtype), mask=mask)
    tl.store(keys_ptr + place + half, k2.to(dtype), mask=mask)
    tl.store(values_ptr + place, total1.to(dtype), mask=mask)
    tl.store(values_ptr + place + half, total2.to(dtype), mask=mask)

    # The new token's own value has weight 1 at first; `largest` is the logarithm of what that stands for.
    largest = tl.sum(q1 * k1 + q2 * k2) * scale
    weight = 1.0
    for first in range(padding, index, KEYS):
        key = (first + tl.arange(0, KEYS))[:, None]
        visible = key < index
        inside = visible & mask[None, :]
        offset = cached[None, :] + key * (2 * half)
        products = tl.load(keys_ptr + offset, mask=inside, other=0.0).to(tl.float32) * q1[None, :]
        products += tl.load(keys_ptr + offset + half, mask=inside, other=0.0).to(tl.float32) * q2[None, :]
        scores = tl.where(visible, tl.sum(products, axis=1)[:, None] * scale, -float("inf"))
        now = tl.maximum(largest, tl.max(scores))
        factor, weights = tl.exp(largest - now), tl.exp(scores - now)
        values1 = tl.load(values_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        values2 = tl.load(values_ptr + offset + half, mask=inside, other=0.0).to(tl.float32)
        total1 = total1 * factor + tl.sum(weights * values1, axis=0)
        total2 = total2 * factor + tl.sum(weights * values2, axis=0)
        weight = weight * factor + tl.sum(weights)
        largest = now
    out = out_ptr + row * (2 * heads * half) + head * (2 * half) + column
    tl.store(out, (total1 / weight).to(dtype), mask=mask)
    tl.store(out + half, (total2 / weight).to(dtype), mask=mask)


def decode_attention_triton(
    qkv: Tensor,
    table: Tensor,
    keys: Tensor,
    values: Tensor,
    index: Tensor,
    padding: Tensor,
    eps: float,
    scale: float,
) -> Tensor:
    """`decode_attention_reference` in Triton. The number of cached keys is read on the GPU, so that one CUDA
    graph serves every step."""
    rows, _, heads, head_dim = qkv.shape
    out = torch.empty(rows, heads * head_dim, dtype=qkv.dtype, device=qkv.device)
    half = head_dim // 2
    _decode_attention_kernel[(rows * heads,)](
        qkv, table, keys, values, index, padding, out, rows, heads, half, keys.stride(0), keys.stride(1),
        eps, scale, HALF=triton.next_power_of_2(half), KEYS=KEYS_PER_STEP, num_warps=8,
    )  # fmt: skip
    return out
