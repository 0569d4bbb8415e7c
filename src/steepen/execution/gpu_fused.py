"""Fused execution on a GPU: hand-written forward and backward passes with fused kernels between the GEMMs.

It computes what `TransformerBlock` and `Network` compute, in one compute dtype. The residual stream and its
gradient are in that dtype too, or in fp32 (`ModelOptions.residual_stream`). Differences:
- Weights are cast to the compute dtype once per optimizer step, not at every use. After changing weights,
  call `Network.refresh`.
- Weight gradients are written to `.grad` inside the custom backward, outside autograd, so hooks on weights do
  not fire; call `backward()` once per forward. The wgrad GEMM accumulates in fp32.
- Only what the backward pass needs is saved: no residual sums, and no queries and keys before RoPE. Logits,
  or the exponentiated differences that replace them, exist for a chunk of tokens at a time and never in fp32.
- Where the stream is wider than the GEMMs, consecutive blocks run as a chain: the gradient of the stream
  passes from block to block as a `SplitFp32`, of which GEMMs read the rounded half, or with its fp8 form. fp8
  GEMMs cannot add to the stream; the norm that reads the sum does.
- With fp8 layers (`Float8Linear`), the kernel that produces a GEMM operand also quantizes it. Without
  gradients, as in validation, everything is computed in the compute dtype.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional

from steepen.execution.float8_linear import Float8Linear, quantize_weights
from steepen.execution.linear import ComputeCopy, FusedLinear, GradientSignal, cast_weights
from steepen.kernels.cross_entropy import logit_gradient_scale
from steepen.kernels.dispatch import block_kernels_for, fp8_gemm_kernels_for, kernels_for
from steepen.kernels.fp8 import (
    LOGIT_GRADIENT_DTYPE,
    RowwiseFp8,
    TransposedFp8,
    empty_transposed,
    unquantized,
)
from steepen.kernels.split_fp32 import SplitFp32
from steepen.model.block import TransformerBlock
from steepen.model.block_variant import VariantBlock
from steepen.model.network import Network

LOGIT_CHUNK_BYTES = 2**29  # of logits, or exponentiated differences, that exist at a time
MakeLinear = Callable[..., Any]  # (parameters, factor, head=False) → FusedLinear


def logit_chunk_tokens(tokens: int, bytes_per_token: int) -> int:
    """Tokens per chunk of logits: chunks of equal size, except the last, of at most `LOGIT_CHUNK_BYTES`."""
    chunks = max(1, math.ceil(tokens * bytes_per_token / LOGIT_CHUNK_BYTES))
    chunks = 1 << (chunks - 1).bit_length()  # batches are powers of two, so all chunks are then equal
    return math.ceil(tokens / chunks)


class FusedBlock:
    """Fused forward of a `TransformerBlock`, or of one with grouped-query attention; it stays valid when it
    is deep-copied with the block.
    """

    def __init__(self, block: TransformerBlock, make_linear: MakeLinear) -> None:
        self.heads, self.eps, self.attention_scale = block.heads, block.eps, block.attention_scale
        if isinstance(block, VariantBlock) and block.variant.kv_heads is not None:
            self.kv_heads, parameters = block.kv_heads, (block.query, block.key_value)
        else:
            self.kv_heads, parameters = block.heads, (block.qkv,)
        self.qkv = make_linear(parameters, 1.0)
        self.out = make_linear(block.out, block.residual)
        self.gate_up, self.down = make_linear(block.gate_up, 1.0), make_linear(block.down, block.residual)
        self.dtype: torch.dtype = self.qkv.weight.dtype  # of the GEMMs; the residual stream may be wider
        self.fp8 = all(isinstance(linear, Float8Linear) for linear in self.linears())

    def linears(self) -> list[FusedLinear]:
        """The block's four linear layers."""
        return [self.qkv, self.out, self.gate_up, self.down]

    def gains_by_chain(self, x: Tensor) -> bool:
        """Whether the gradient of the stream is not itself an operand of GEMMs."""
        return self.fp8 or x.dtype != self.dtype

    @property
    def adds_in_norm(self) -> bool:
        """Whether the norm of the next block adds the outputs of both branches to the stream."""
        return self.fp8

    def __call__(self, x: Any, rotary: Tensor) -> Any:
        """`TransformerBlock.forward` without a mask; a `Stream` instead of x gives the next `Stream`."""
        stream = x if isinstance(x, Stream) else Stream(x)
        attended, residual, inner = self.attention(
            stream.x, rotary, stream.edge, stream.normed, stream.addends
        )
        if stream is not x:
            return self.after_attention(attended, residual, inner)[0]
        edge, apart = Edge(), self.adds_in_norm and not stream.before_last
        x, *addends = self.after_attention(attended, residual, inner, edge, apart=apart)
        return Stream(x, edge, addends=tuple(addends))

    def attention(
        self,
        x: Tensor,
        rotary: Tensor,
        edge: Edge | None = None,
        normed: Tensor | None = None,
        addends: tuple[Tensor, ...] = (),
    ) -> tuple[Tensor, Tensor, Edge]:
        """Attention before its output projection, (batch, time, width), and the hidden states for the
        residual connection, with the edge along which their gradient returns. See `Stream`.
        """
        inner = Edge()
        if not torch.is_grad_enabled():  # a pass that truncated backpropagation skips may start from one
            x = x.detach()
        query, key, value, residual = _apply(_Qkv, rotary, self, edge, inner, normed, x, *addends)
        attended = functional.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            is_causal=True,
            scale=self.attention_scale,
            enable_gqa=self.kv_heads != self.heads,
        )
        return attended.transpose(1, 2).flatten(-2), residual, inner

    def after_attention(
        self,
        attended: Tensor,
        residual: Tensor,
        inner: Edge,
        edge: Edge | None = None,
        *,
        apart: bool = False,
    ) -> tuple[Tensor, ...]:
        """Output projection and MLP, with their residual connections: the block's output alone, or with
        `apart` the residual and the two outputs that are still to be added to it.
        """
        return _apply(_AfterAttention, attended, residual, self, inner, edge, apart)


@dataclass(frozen=True)
class Stream:
    """The residual stream between two blocks: x plus the addends.

    `edge` leads to what made them, and `normed` is the RMSNorm of x if that was made too.
    """

    x: Tensor
    edge: Edge | None = None
    normed: Tensor | None = None
    addends: tuple[Tensor, ...] = ()
    before_last: bool = False  # of a chain, whose output is one tensor


def run_chain(blocks: Sequence[nn.Module], stream: Stream, rotary: Tensor) -> Stream:
    """The blocks one after the other, called as modules, for their hooks: the stream after the last."""
    for index, block in enumerate(blocks):
        stream = block(replace(stream, before_last=index + 1 == len(blocks)), rotary)
    return stream


class Edge:
    """Carries the gradient of the residual stream from one autograd node to the one before it, in the form
    that their kernels use; autograd itself passes a tensor of the right shape and dtype, which nobody reads.
    """

    def __init__(self) -> None:
        self._gradient: tuple[Tensor | SplitFp32, Any] | None = None

    def put(self, gradient: Tensor | SplitFp32, operand: Any = None) -> Tensor:
        """Set the gradient and the GEMM operand made of it; returns the tensor for autograd."""
        self._gradient = gradient, operand
        return gradient.storage if isinstance(gradient, SplitFp32) else gradient

    def take(self) -> tuple[Tensor | SplitFp32, Any] | None:
        """What was put, or None; it is kept no longer."""
        gradient, self._gradient = self._gradient, None
        return gradient


def has_fused_form(block: nn.Module) -> TypeGuard[TransformerBlock]:
    """Whether a block has a `FusedBlock`: the paper's, and the one with other heads of keys and values."""
    if isinstance(block, VariantBlock):
        return block.variant.only_grouped
    return type(block) is TransformerBlock


def _rows(x: Tensor) -> Tensor:
    """(batch, time, width) as a contiguous (tokens, width) matrix, whatever the strides of x."""
    return x.flatten(0, -2).contiguous()


class _Qkv(torch.autograd.Function):
    """Hidden states, or the terms of their sum → RMSNorm → queries, keys, values with RoPE and QK norm.

    Also returns the hidden states, so that both of their gradients meet in one backward kernel. With the norm
    given, that kernel is its maker's.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rotary: Tensor,
        block: FusedBlock,
        edge: Edge | None,
        inner: Edge,
        normed: Tensor | None,
        *terms: Tensor,
    ) -> tuple[Tensor, ...]:
        x, *addends = terms
        needs_gradient = any(ctx.needs_input_grad)
        kernels = block_kernels_for(x, fp8=block.fp8 and needs_gradient)
        # One GEMM for queries, keys and values, in whose output RoPE and QK norm work in place: attention and
        # the backward pass read that one buffer, and neither needs what was there before.
        if normed is not None:
            n, rstd = _rows(normed), None
        elif addends:
            flat = tuple(_rows(addend) for addend in addends)
            total, n, rstd = kernels.add_rms_norm(_rows(x), flat, block.eps, block.dtype)
            x = total.view(x.shape)
        else:
            n, rstd = kernels.rms_norm(_rows(x), block.eps, block.dtype)
        heads = [block.heads, block.kv_heads, block.kv_heads]
        qkv = block.qkv(n).view(*x.shape[:2], sum(heads), -1)
        qk_rstd = kernels.rotate_norm_(qkv, rotary, block.eps, block.kv_heads)
        ctx.block, ctx.edge, ctx.inner, ctx.addends = block, edge, inner, len(addends)
        if needs_gradient:
            block.qkv.used()
        ctx.save_for_backward(unquantized(n), rstd, qkv, qk_rstd, rotary)
        return (*qkv.split(heads, dim=2), x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dq, dk, dv, d_residual = gradients
        n, rstd, qkv, qk_rstd, rotary = ctx.saved_tensors
        block: FusedBlock = ctx.block
        edge: Edge | None = ctx.edge
        kernels = block_kernels_for(d_residual, fp8=block.fp8)
        # The kernel also packs the three gradients into the matrix that one dgrad and one wgrad GEMM read.
        d = kernels.rotate_norm_backward(dq, dk, dv, qkv, qk_rstd, rotary)
        dn = block.qkv.backward(d, kernels.wgrad_normed(n))
        block.qkv.written()
        found = ctx.inner.take()
        residual = _rows(d_residual) if found is None else found[0]
        d_normed = None
        if edge is None:
            d = kernels_for(d_residual).rms_norm_backward(dn, n, rstd, residual)
        elif rstd is None:
            d, d_normed = edge.put(residual), dn.view(d_residual.shape)
        else:
            d = edge.put(*kernels.rms_norm_backward(dn, n, rstd, residual))
        return None, None, None, None, d_normed, d.view(d_residual.shape), *[None] * ctx.addends


class _AfterAttention(torch.autograd.Function):
    """Attention output and hidden states → output projection, residual, RMSNorm, SwiGLU MLP, residual.

    With `apart` it returns the hidden states and the outputs of both branches, which the next norm adds.
    """

    @staticmethod
    def forward(
        ctx: Any,
        attended: Tensor,
        x: Tensor,
        block: FusedBlock,
        inner: Edge,
        edge: Edge | None,
        apart: bool,
    ) -> tuple[Tensor, ...]:
        kernels = block_kernels_for(x, fp8=block.fp8 and ctx.needs_input_grad[0])
        flat = _rows(attended)
        operand = kernels.quantize_activation(flat)
        scale = kernels.wgrad_scale(operand)
        # The GEMM's epilogue adds the residual stream where cuBLASLt can; otherwise the norm's kernel does,
        # since it reads both anyway.
        middle = None if apart else block.out.added_to(_rows(x), operand)
        if middle is not None:
            branch = None
            n, rstd = kernels.rms_norm(middle, block.eps, block.dtype)
        else:
            branch = block.out(operand)
            middle, n, rstd = kernels.add_rms_norm(
                _rows(x), (branch,), block.eps, block.dtype, keep_sum=not apart
            )
        del operand  # memory peaks here, in the last block
        gate_up = block.gate_up(n)
        activated = kernels.swiglu(gate_up)
        if apart and branch is not None:
            results = x, branch.view(x.shape), block.down(activated).view(x.shape)
        else:
            results = (block.down.add_to_(middle, activated).view(x.shape),)
        ctx.block, ctx.inner, ctx.edge = block, inner, edge
        ctx.set_materialize_grads(False)  # those of the branches are None: the edge carries them
        if ctx.needs_input_grad[0]:
            for linear in (block.out, block.gate_up, block.down):
                linear.used()
        quantized = isinstance(activated, RowwiseFp8)
        saved = (activated.data, activated.scale) if quantized else (activated, None)
        ctx.save_for_backward(flat, scale, unquantized(n), rstd, gate_up, *saved)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        shape = gradients[0].shape
        flat, scale, n, rstd, gate_up, activated, activated_scale = ctx.saved_tensors
        block: FusedBlock = ctx.block
        kernels = block_kernels_for(flat, fp8=block.fp8)
        found = None if ctx.edge is None else ctx.edge.take()
        if found is None:
            d_stream = _rows(gradients[0])
            d = kernels.quantize_gradient(d_stream if block.fp8 else d_stream.to(block.dtype))
        else:
            d_stream, d = found
        # The branches have one gradient, so the kernel that wrote it also made the operand of the GEMMs.
        if activated_scale is not None:
            activated = RowwiseFp8(None, activated, activated_scale)
        d_activated = block.down.backward(d, activated)
        block.down.written()
        del activated
        d_gate_up = kernels.swiglu_backward_(gate_up, d_activated)
        del d_activated
        dn = block.gate_up.backward(d_gate_up, kernels.wgrad_normed(n))
        block.gate_up.written()
        del d_gate_up
        d_stream, d = kernels.rms_norm_backward(dn, n, rstd, d_stream)
        del dn
        d_attended = block.out.backward(d, kernels.wgrad_activation(flat, scale))
        block.out.written()
        return d_attended.view(shape), ctx.inner.put(d_stream).view(shape), *[None] * 4


class _Embed(torch.autograd.Function):
    """Tokens → RMSNorm of their embeddings."""

    @staticmethod
    def forward(
        ctx: Any, table: nn.Parameter, tokens: Tensor, eps: float, dtype: torch.dtype, signal: GradientSignal
    ) -> Tensor:
        flat = tokens.flatten().contiguous()
        n, rstd = kernels_for(table).embed_norm(flat, table, eps, dtype)
        ctx.table, ctx.signal = table, signal
        ctx.save_for_backward(flat, n, rstd)
        return n.view(*tokens.shape, -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        tokens, n, rstd = ctx.saved_tensors
        table: nn.Parameter = ctx.table
        if table.grad is None:
            table.grad = torch.zeros_like(table)
        d = _rows(gradients[0])
        kernels_for(d).embed_norm_backward_(table.grad, tokens, d, n, rstd)
        ctx.signal.written(table)
        return None, None, None, None, None


class _NormInject(torch.autograd.Function):
    """The boundary operator RMSNorm(h) + alpha·e."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, e: Tensor, alpha: float, eps: float) -> Tensor:
        flat = _rows(h)
        out, rstd = kernels_for(h).norm_inject(flat, _rows(e), alpha, eps)
        ctx.alpha = alpha
        ctx.save_for_backward(flat, rstd)
        return out.view(h.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        shape = gradients[0].shape
        h, rstd = ctx.saved_tensors
        d = _rows(gradients[0])
        dh, de = kernels_for(d).norm_inject_backward(d, h, rstd, ctx.alpha)
        return dh.view(shape), de.view(shape), None, None


class _InjectNorm(torch.autograd.Function):
    """The boundary operator RMSNorm(h) + alpha·e in fp32, and the RMSNorm with which the next block begins.

    `before` is the edge to what made h, and `edge` that to this node.
    """

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, e: Tensor, alpha: float, block: FusedBlock, before: Edge, edge: Edge
    ) -> tuple[Tensor, Tensor]:
        flat = _rows(h)
        found = kernels_for(h).inject_norm(flat, _rows(e), alpha, block.eps, block.dtype)
        x, h_rstd, n, rstd = found
        ctx.alpha, ctx.before, ctx.edge = alpha, before, edge
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(flat, h_rstd, n, rstd)
        return x.view(h.shape), n.view(h.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        h, h_rstd, n, rstd = ctx.saved_tensors
        _, dn = gradients
        dx, _ = ctx.edge.take()
        *dh, de = kernels_for(h).inject_norm_backward(_rows(dn), n, rstd, dx, h, h_rstd, ctx.alpha)
        return ctx.before.put(*dh).view(dn.shape), de.view(dn.shape), None, None, None, None


class _Loss(torch.autograd.Function):
    """Hidden states and targets → `loss_weight` times the mean cross-entropy.

    All gradients are computed in the forward pass, chunk by chunk, and the head's is added to `.grad` there,
    so every factor on the loss must be part of `loss_weight`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        targets: Tensor,
        head: Any,  # FusedLinear, or Float8Linear, whose wgrad takes fp8 operands
        loss_weight: float,
        fused: FusedNetwork,
    ) -> Tensor:
        gradient = ctx.needs_input_grad[0]
        kernels = block_kernels_for(hidden, fp8=isinstance(head, Float8Linear) and gradient)
        n, rstd = kernels.rms_norm(_rows(hidden), fused.eps, head.weight.dtype)
        flat_targets, tokens = targets.flatten().contiguous(), targets.numel()
        step = logit_chunk_tokens(tokens, head.rows * head.weight.element_size())
        # A chunk of n is not needed once its gradient is known: a gradient of the same dtype overwrites it.
        same = hidden.dtype == head.weight.dtype
        d_hidden = (
            unquantized(n) if same or not gradient else torch.empty_like(unquantized(n), dtype=hidden.dtype)
        )
        d_transposed = None
        if isinstance(n, RowwiseFp8):
            d_transposed = empty_transposed(tokens, head.rows, LOGIT_GRADIENT_DTYPE, hidden.device)
        losses: list[Tensor] = []
        for first in range(0, tokens, step):
            chunk = slice(first, first + step)
            loss, dn, row_factor = _head_loss(
                n[chunk],
                flat_targets[chunk],
                head,
                loss_weight / tokens,
                fused.softcap,
                gradient,
                fused.token_ids,
                None if d_transposed is None else d_transposed[:, chunk],
            )
            losses.append(loss)
            if dn is not None:
                normed, out = unquantized(n)[chunk], d_hidden[chunk]
                kernels_for(dn).rms_norm_backward(dn, normed, rstd[chunk], row_factor=row_factor, out=out)
            del dn
        if d_transposed is not None:
            scale = torch.full((), logit_gradient_scale(loss_weight / tokens), device=hidden.device)
            head.wgrad(TransposedFp8(d_transposed, scale), n)
        if gradient:
            head.written()
            ctx.save_for_backward(d_hidden)
            ctx.shape = hidden.shape
        return torch.cat(losses).mean() * loss_weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (d,) = ctx.saved_tensors
        if (
            d.is_cuda
        ):  # autograd's thread starts here, and its first cuBLAS call warns without a current device
            torch.cuda.set_device(d.device)
        return d.view(ctx.shape), None, None, None, None


def _head_loss(
    n: Tensor | RowwiseFp8,
    targets: Tensor,
    head: Any,
    scale: float,
    softcap: float | None,
    gradient: bool,
    vocabulary: int,
    d_transposed: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Losses (tokens,), `scale` times the gradient of n, and a factor per row still to be applied to that.

    Only the first `vocabulary` rows of the head have a logit. With `gradient` the head's own gradient is
    added to `.grad`, or in fp8 what its wgrad needs is written to `d_transposed`, (vocabulary, tokens).
    """
    if isinstance(n, Tensor):
        kernels = kernels_for(n)
        if kernels.supports_fused_linear_cross_entropy(n, head.weight):
            losses, logit_gradient = kernels.fused_linear_cross_entropy(
                n, head.weight, targets, scale, softcap, vocabulary, gradient=gradient
            )
            if logit_gradient is None:
                return losses, None, None
            head.wgrad(logit_gradient.exp_differences, logit_gradient.scaled_input)
            return losses, head.dgrad(logit_gradient.exp_differences), logit_gradient.row_factor
        losses, d = kernels.cross_entropy_(head(n), targets, scale, softcap, vocabulary)
        return losses, head.backward(d, n) if gradient else None, None
    assert d_transposed is not None
    fp8_kernels = fp8_gemm_kernels_for(n.data)
    losses, d = fp8_kernels.cross_entropy(head(n), targets, d_transposed, scale, softcap, vocabulary)
    return losses, head.dgrad(d), None


class FusedNetwork:
    """The fused embedding, boundary, loss and blocks of a `Network` (its `FusedForward`)."""

    def __init__(self, network: Network, make_linear: MakeLinear) -> None:
        self.network, self.make_linear = network, make_linear
        self.eps, self.softcap = network.options.norm_eps, network.options.softcap
        self.signal = GradientSignal()
        self.token_ids = network.token_ids
        self.head: FusedLinear = make_linear(network.head, network.multipliers.output, head=True)
        self.linears: list[FusedLinear] = []
        self._last: tuple[weakref.ref[Tensor], Edge] | None = None  # result of `run`, and the edge to it
        self.install_in_new_blocks()

    def install_in_new_blocks(self) -> None:
        """Install a `FusedBlock` in every built-in block that has none yet."""
        self.linears = [self.head]
        for block in self.network.blocks():
            if has_fused_form(block):
                if not isinstance(block.fused_forward, FusedBlock):
                    block.fused_forward = FusedBlock(block, self.make_linear)
                self.linears += block.fused_forward.linears()
        for linear in self.linears:
            linear.signal = self.signal
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast and quantize the weights again; call it whenever they have changed."""
        cast_weights(self.linears)
        self.requantize()

    @torch.no_grad()
    def requantize(self, parameters: Collection[nn.Parameter] | None = None) -> None:
        """Quantize the compute copies (of these parameters) again; call it when only they have changed."""
        if parameters is None:
            quantize_weights(self.linears)
        else:
            changed = set(parameters)
            quantize_weights(
                [
                    linear
                    for linear in self.linears
                    if any(copy.parameter in changed for copy in linear.copies)
                ]
            )

    def compute_copies(self) -> dict[nn.Parameter, ComputeCopy]:
        """The copies of parameters in the compute dtype, by parameter."""
        return {copy.parameter: copy for linear in self.linears for copy in linear.copies}

    def run(
        self, blocks: nn.ModuleList, x: Tensor, rotary: Tensor, e: Tensor | None = None, alpha: float = 0.0
    ) -> Tensor | None:
        """The blocks one after the other, as a chain, or None where they cannot or need not be one.

        With e they read RMSNorm(x) + alpha·e, and nothing else reads x, the last result of this function.
        """
        forms = [getattr(block, "fused_forward", None) for block in blocks]
        fused = [form for form in forms if isinstance(form, FusedBlock)]
        if not fused or len(fused) < len(blocks) or not all(form.gains_by_chain(x) for form in fused):
            return None
        stream = Stream(x)
        if e is not None:
            last, before = self._last or (None, None)
            if before is None or last is None or last() is not x or x is e or fused[0].fp8:
                return None
            before, edge = before if x.requires_grad else Edge(), Edge()
            x, normed = _apply(_InjectNorm, x, e, alpha, fused[0], before, edge)
            stream = Stream(x, edge, normed)
        stream = run_chain(list(blocks), stream, rotary)
        assert stream.edge is not None and not stream.addends
        self._last = weakref.ref(stream.x), stream.edge
        return stream.x

    def embed(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """RMSNorm of the token embeddings, in `dtype`."""
        return _apply(_Embed, self.network.embedding, tokens, self.eps, dtype, self.signal)

    def loss(self, hidden: Tensor, targets: Tensor, loss_weight: float) -> Tensor:
        """`loss_weight` times the mean cross-entropy."""
        return _apply(_Loss, hidden, targets, self.head, loss_weight, self)

    def norm_inject(self, h: Tensor, e: Tensor, alpha: float) -> Tensor:
        """The boundary operator RMSNorm(h) + alpha·e."""
        return _apply(_NormInject, h, e, alpha, self.eps)


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    return function.apply(*arguments)


def install_fused_gpu(network: Network, make_linear: MakeLinear) -> None:
    """Run a network's built-in blocks, embedding, boundary and loss on the fused path."""
    network.fused = FusedNetwork(network, make_linear)
