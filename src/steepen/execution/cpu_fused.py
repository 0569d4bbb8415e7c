"""Fused execution of the transformer block on a CPU: hand-written forward and backward, channel-major.

Tiny models spend most of their time not in GEMMs but in many small operations on short rows (a head is a few
elements wide). So activations are stored channel-major, (width, tokens): every elementwise operation runs
along all tokens, and every GEMM is a plain one. The softmax needs no running maximum, because the QK norm
bounds the scores. Hidden states keep their shape (batch, time, width); only their strides differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from steepen.model.block import TransformerBlock
from steepen.model.network import Network

QUERY_BLOCK = 64  # queries per block of scores; blocks above the diagonal are skipped
# Scores computed at a time: 1 MiB of fp32, the L2 cache of the CPU measured (Zen 4).
MAX_CACHED_SCORES = 2**18
# Up to so many scores of a block and micro-batch (4 MiB of fp32) are kept for backward; more are recomputed.
MAX_KEPT_SCORES = 2**20
MAX_SCORE = 60.0  # the sum of exp(score) over a context stays far below the largest fp32 number


def install_fused_cpu(network: Network) -> None:
    """Install `FusedCpuBlock` in the built-in blocks of a network; deep copies made by growth keep it."""
    for block in network.blocks():
        if type(block) is TransformerBlock:
            block.fused_forward = FusedCpuBlock(block)


class FusedCpuBlock:
    """Fused forward of a `TransformerBlock` in fp32 or fp64; other dtypes, or two, run the reference."""

    def __init__(self, block: TransformerBlock) -> None:
        self.block = block
        head_dim = block.out.shape[-1] // block.heads
        self.scores_bounded = head_dim * block.attention_scale <= MAX_SCORE

    def __call__(self, x: Tensor, rotary: Tensor) -> Tensor:
        """`TransformerBlock.forward` without a mask."""
        block = self.block
        wide = x.dtype in (torch.float32, torch.float64)  # lower precisions need wider norms and sums
        if not (wide and x.dtype == rotary.dtype and self.scores_bounded and x.is_cpu):
            return block.forward_reference(x, rotary)
        weights = (w.to(x.dtype) for w in (block.qkv, block.out, block.gate_up, block.down))
        return cast("Tensor", _Block.apply(x, rotary, *weights, block))


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, rotary: Tensor, qkv: Tensor, out: Tensor, gate_up: Tensor, down: Tensor,
        block: TransformerBlock,
    ) -> Tensor:  # fmt: skip
        batch, time, width = x.shape
        hidden = x.permute(2, 0, 1).reshape(width, -1)
        normed1, rstd1 = _norm(hidden, block.eps)
        parts, rstd_qk = _rotate_norm(torch.mm(qkv.flatten(0, 1), normed1), rotary, block, batch)
        training = any(ctx.needs_input_grad)
        attended, total, powers = _attend(parts, keep=training)
        middle = torch.addmm(hidden, out, attended, alpha=block.residual)
        normed2, rstd2 = _norm(middle, block.eps)
        gated = torch.mm(gate_up.flatten(0, 1), normed2)
        gate, up = gated.chunk(2)
        result = middle.addmm_(down, functional.silu(gate).mul_(up), alpha=block.residual)
        if training:
            ctx.block = block
            ctx.save_for_backward(
                rotary, qkv, out, gate_up, down, normed1, rstd1, parts, rstd_qk, attended, total,
                normed2, rstd2, gated, *powers,
            )  # fmt: skip
        return result.view(width, batch, time).permute(1, 2, 0)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, ...]:
        (
            rotary, qkv, out, gate_up, down, normed1, rstd1, parts, rstd_qk, attended, total,
            normed2, rstd2, gated, *powers,
        ) = ctx.saved_tensors  # fmt: skip
        residual: float = ctx.block.residual
        batch, time, width = gradients[0].shape
        d = gradients[0].permute(2, 0, 1).reshape(width, -1)

        scaled = d * residual
        gate, up = gated.chunk(2)
        d_hidden, silu = torch.mm(down.t(), scaled), functional.silu(gate)
        hidden = silu * up
        d_down = torch.mm(scaled, hidden.t())
        d_gated = torch.empty_like(gated)
        d_gate, d_up = d_gated.chunk(2)
        torch.ops.aten.silu_backward.grad_input(torch.mul(d_hidden, up, out=hidden), gate, grad_input=d_gate)
        torch.mul(d_hidden, silu, out=d_up)
        d_gate_up = torch.mm(d_gated, normed2.t()).view(gate_up.shape)
        d_normed = torch.mm(gate_up.flatten(0, 1).t(), d_gated)
        d = _norm_backward_(d_normed, normed2, rstd2).add_(d)

        torch.mul(d, residual, out=scaled)
        d_out = torch.mm(scaled, attended.t())
        d_parts = _attend_backward(torch.mm(out.t(), scaled), attended, parts, total, powers)
        d_raw = _rotate_norm_backward_(d_parts, parts, rstd_qk, rotary, ctx.block)
        d_qkv = torch.mm(d_raw, normed1.t()).view(qkv.shape)
        d = _norm_backward_(torch.mm(qkv.flatten(0, 1).t(), d_raw), normed1, rstd1).add_(d)
        dx = d.view(width, batch, time).permute(1, 2, 0)
        return dx, None, d_qkv, d_out, d_gate_up, d_down, None


def _norm(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMSNorm of each column; returns (normed, reciprocal root mean square)."""
    rstd = x.square().mean(0).add_(eps).rsqrt_()
    return x * rstd, rstd


def _norm_backward_(d: Tensor, normed: Tensor, rstd: Tensor) -> Tensor:
    """Gradient of a norm's input; overwrites d, the gradient of its output."""
    along = (d * normed).mean(0)
    return d.addcmul_(normed, along, value=-1).mul_(rstd)


def _query_factor(block: TransformerBlock) -> float:
    """Factor on the queries: the softmax uses exp2, which is several times faster than exp on a CPU."""
    return block.attention_scale / math.log(2)


def _rotate_norm(raw: Tensor, rotary: Tensor, block: TransformerBlock, batch: int) -> tuple[Tensor, Tensor]:
    """Queries, keys and values, (3, heads, batch, head_dim, time); queries and keys with RoPE and RMSNorm.

    The queries are also multiplied by `_query_factor`. Returns (parts, factor of the rotated queries and
    keys).
    """
    heads, time = block.heads, rotary.shape[1]
    raw = raw.view(3, heads, -1, batch, time)
    half = raw.shape[2] // 2
    cos, sin = rotary.mT.unsqueeze(2)  # each (half, 1, time)
    parts = torch.empty(3, heads, batch, 2 * half, time, dtype=raw.dtype)
    rotated = parts.transpose(2, 3)
    first, second = raw[:2, :, :half], raw[:2, :, half:]
    torch.mul(first, cos, out=rotated[:2, :, :half]).addcmul_(second, sin, value=-1)
    torch.mul(first, sin, out=rotated[:2, :, half:]).addcmul_(second, cos)
    # After the rotation: a table rounded to bf16 changes the length of a vector a little.
    factor = parts[:2].square().mean(3, keepdim=True).add_(block.eps).rsqrt_()
    factor[0].mul_(_query_factor(block))
    parts[:2].mul_(factor)
    rotated[2].copy_(raw[2])
    return parts, factor


def _rotate_norm_backward_(
    d: Tensor, parts: Tensor, factor: Tensor, rotary: Tensor, block: TransformerBlock
) -> Tensor:
    """Gradient of the input of `_rotate_norm`, (3·width, tokens); overwrites d."""
    _, heads, batch, head_dim, time = d.shape
    along = (d[:2] * parts[:2]).mean(3, keepdim=True)
    along[0].div_(_query_factor(block) ** 2)
    d[:2].addcmul_(parts[:2], along, value=-1).mul_(factor)
    half = head_dim // 2
    cos, sin = rotary.mT.unsqueeze(2)
    raw = torch.empty(3, heads, head_dim, batch, time, dtype=d.dtype)
    rotated = d.transpose(2, 3)
    first, second = rotated[:2, :, :half], rotated[:2, :, half:]
    torch.mul(first, cos, out=raw[:2, :, :half]).addcmul_(second, sin)
    torch.mul(second, cos, out=raw[:2, :, half:]).addcmul_(first, sin, value=-1)
    raw[2].copy_(rotated[2])
    return raw.view(3 * heads * head_dim, -1)


def _score_blocks(count: int, time: int) -> Iterator[tuple[slice, slice, slice]]:
    """Slices of heads, queries and keys whose scores fit the cache, the last queries of a head first."""
    # The last queries of a head see all its keys: their backward can write every key's gradient, and the
    # blocks after it add, so that nothing is filled with zeros first.
    each = max(1, MAX_CACHED_SCORES // (QUERY_BLOCK * time))
    for head in range(0, count, each):
        for first in reversed(range(0, time, QUERY_BLOCK)):
            end = min(first + QUERY_BLOCK, time)
            yield slice(head, head + each), slice(first, end), slice(end)


def _exponentials(query: Tensor, key: Tensor, visible: Tensor) -> Tensor:
    """exp2 of the scores, (·, key, query), of queries and all keys up to the last; 0 where not causal."""
    powers = torch.bmm(key.mT, query).exp2_()
    width = query.shape[-1]
    powers[:, -width:].mul_(visible[:width, :width])
    return powers


def _visible(like: Tensor) -> Tensor:
    """1 where a query sees a key, on the diagonal blocks of the scores."""
    return torch.ones(QUERY_BLOCK, QUERY_BLOCK, dtype=like.dtype).triu_()


def _attend(parts: Tensor, *, keep: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Attention output (width, tokens), the softmax denominators, and the exponentials kept for backward."""
    _, heads, batch, head_dim, time = parts.shape
    keep = keep and heads * batch * time**2 <= MAX_KEPT_SCORES
    kept: list[Tensor] = []
    query, key, value = parts.flatten(1, 2)
    visible, sums = _visible(parts), torch.empty_like(value)
    total = torch.empty(heads * batch, 1, time, dtype=value.dtype)
    for some, queries, keys in _score_blocks(heads * batch, time):
        powers = _exponentials(query[some, :, queries], key[some, :, keys], visible)
        if keep:
            kept.append(powers)
        torch.sum(powers, 1, keepdim=True, out=total[some, :, queries])
        sums[some, :, queries] = torch.bmm(value[some, :, keys], powers)
    total = total.view(heads, batch, 1, time)
    attended = torch.empty(heads, head_dim, batch, time, dtype=sums.dtype)
    torch.div(sums.view(heads, batch, -1, time), total, out=attended.transpose(1, 2))
    return attended.view(heads * head_dim, -1), total, kept


def _attend_backward(
    d: Tensor, attended: Tensor, parts: Tensor, total: Tensor, kept: Sequence[Tensor]
) -> Tensor:
    """The gradient of query, key and value, (3, heads, batch, head_dim, time).

    `kept` are the exponentials of every block of scores; if it is empty they are computed again.
    """
    _, heads, batch, head_dim, time = parts.shape
    shape = (heads, head_dim, batch, time)
    query, key, value = parts.flatten(1, 2)
    visible, d_parts = _visible(parts), torch.empty_like(parts)
    d_query, d_key, d_value = d_parts.flatten(1, 2)
    d_sums = torch.empty_like(value)
    torch.div(d.view(shape).transpose(1, 2), total, out=d_sums.view(heads, batch, -1, time))
    along = (d * attended).view(shape).sum(1).div_(total.squeeze(2)).view(-1, 1, time)
    for i, (some, queries, keys) in enumerate(_score_blocks(heads * batch, time)):
        query_, key_, d_sums_ = query[some, :, queries], key[some, :, keys], d_sums[some, :, queries]
        powers = kept[i] if kept else _exponentials(query_, key_, visible)
        # The first block of a head covers all its keys and writes their gradients; the others add to them.
        beta = 0.0 if queries.stop == time else 1.0
        d_value[some, :, keys].baddbmm_(d_sums_, powers.mT, beta=beta)
        d_powers = torch.bmm(value[some, :, keys].mT, d_sums_)
        d_scores = d_powers.sub_(along[some, :, queries]).mul_(powers)
        d_key[some, :, keys].baddbmm_(query_, d_scores.mT, beta=beta)
        d_query[some, :, queries] = torch.bmm(key_, d_scores)
    d_parts[:2].mul_(math.log(2))
    return d_parts
