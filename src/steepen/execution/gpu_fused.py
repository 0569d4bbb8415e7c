"""The network's fast path: forward and backward written out, with fused kernels between the products.

It computes what `TransformerBlock` and `Network` do, in one compute precision, and differs in how:
- weights are rounded to the compute precision once per optimizer step, not at every use;
- gradients of weights are summed in fp32 straight into `.grad`, by the product that makes them;
- only what the backward needs is kept (no sums, no raw queries and keys, no activated MLP but in small
  networks), and logits, or the odds that stand for them, exist for a few thousand tokens at a time, never
  in fp32;
- with products in eight bits (`Product8`), what they take is rounded by the kernel that makes it, and the
  gradients of weights are added to `.grad` apart. Without gradients, as in validation, there are no eight
  bits: all is in the compute precision.
So autograd sees the stream but not the weights: `backward()` may be called once, and adds to `.grad`;
and who changes the weights says so with `Network.refresh`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from steepen.execution.float8_linear import Float8Linear, quantised
from steepen.execution.linear import FusedLinear, rounded
from steepen.kernels import kernels_for
from steepen.kernels.fp8 import exact
from steepen.model.shape import KEEP_ACTIVATION_MAX_WIDTH

if TYPE_CHECKING:
    from steepen.model.block import TransformerBlock
    from steepen.model.network import Network

LOGIT_BYTES = 2**29  # of logits, or odds, that exist at once
Make = Callable[..., FusedLinear]  # of a parameter and a factor, and whether it is the head


def piece_rows(rows: int, row_bytes: int) -> int:
    """Tokens whose logits exist at once: equal pieces, but for the last, that fit in `LOGIT_BYTES`."""
    pieces = max(1, math.ceil(rows * row_bytes / LOGIT_BYTES))
    pieces = 1 << (pieces - 1).bit_length()  # batches are powers of two: so all pieces are equal
    return math.ceil(rows / pieces)


class FusedBlock:
    """A `TransformerBlock`, fast. It stays valid when the block is copied with it."""

    def __init__(self, block: TransformerBlock, make: Make) -> None:
        self.heads, self.eps, self.scale = block.heads, block.eps, block.attention_scale
        self.qkv, self.out = make(block.qkv, 1.0), make(block.out, block.residual)
        self.gate_up, self.down = make(block.gate_up, 1.0), make(block.down, block.residual)
        self.eight = all(isinstance(product, Float8Linear) for product in self.products())

    def products(self) -> list[FusedLinear]:
        """The block's matrices."""
        return [self.qkv, self.out, self.gate_up, self.down]

    def __call__(self, x: Tensor, rotary: Tensor) -> Tensor:
        """What the block's forward gives."""
        return self.rest(*self.attend(x, rotary))

    def attend(self, x: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        """What attention gives, before its output projection, and the stream."""
        query, key, value, skip = _apply(_Queries, x, rotary, self)
        attended = functional.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            is_causal=True,
            scale=self.scale,
        )
        return attended.transpose(1, 2).flatten(-2), skip

    def rest(self, attended: Tensor, skip: Tensor) -> Tensor:
        """The stream after the block."""
        return _apply(_Rest, attended, skip, self)


def _rows(x: Tensor) -> Tensor:
    """(batch, time, width) as kernels take it: (tokens, width), row after row, however x lies in memory."""
    return x.flatten(0, -2).contiguous()


class _Queries(torch.autograd.Function):
    """Stream → queries, keys, values, and the stream again (so that its two gradients meet in one kernel)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rotary: Tensor, block: FusedBlock) -> tuple[Tensor, ...]:
        kernels = kernels_for(x, eight=block.eight and ctx.needs_input_grad[0])
        n, rstd = kernels.rms_norm(_rows(x), block.eps)
        qkv = block.qkv(n).view(*x.shape[:2], 3, block.heads, -1)
        sizes = kernels.rotate_norm_(qkv, rotary, block.eps)
        ctx.block = block
        ctx.save_for_backward(exact(n), rstd, qkv, sizes, rotary)
        return (*qkv.unbind(2), x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dq, dk, dv, skip = gradients
        n, rstd, qkv, sizes, rotary = ctx.saved_tensors
        block: FusedBlock = ctx.block
        kernels = kernels_for(skip, eight=block.eight)
        d = kernels.rotate_norm_backward(dq, dk, dv, qkv, sizes, rotary)
        dn = block.qkv.backward(d, kernels.normed(n))
        d = kernels_for(skip).rms_norm_backward(dn, n, rstd, _rows(skip))
        return d.view(skip.shape), None, None


class _Rest(torch.autograd.Function):
    """Attention's output and the stream → the stream after the block."""

    @staticmethod
    def forward(ctx: Any, attended: Tensor, x: Tensor, block: FusedBlock) -> Tensor:
        kernels = kernels_for(x, eight=block.eight and ctx.needs_input_grad[0])
        flat = _rows(attended)
        taken = kernels.quantise_activation(flat)
        size = kernels.size_of(taken)
        middle = block.out.plus(_rows(x), taken)
        if middle is not None:
            n, rstd = kernels.rms_norm(middle, block.eps)
        else:
            middle, n, rstd = kernels.add_rms_norm(_rows(x), block.out(taken), block.eps)
        del taken  # memory is scarcest here, in the last block
        gate_up = block.gate_up(n)
        activated = kernels.swiglu(gate_up)
        block.down.add_to_(middle, activated)
        kept = (
            activated
            if isinstance(activated, Tensor) and activated.shape[1] <= KEEP_ACTIVATION_MAX_WIDTH
            else None
        )
        ctx.block = block
        ctx.save_for_backward(flat, size, exact(n), rstd, gate_up, kept)
        return middle.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        shape = gradients[0].shape
        flat, size, n, rstd, gate_up, kept = ctx.saved_tensors
        block: FusedBlock = ctx.block
        kernels = kernels_for(flat, eight=block.eight)
        d = kernels.quantise_gradient(_rows(gradients[0]))
        product = block.down.dgrad(d)
        given = () if kept is None else (kept,)  # never in eight bits, whose kernels take none
        d_gate_up, activated = kernels.swiglu_backward_(gate_up, product, *given)
        del product
        block.down.wgrad(d, activated)
        del activated
        dn = block.gate_up.backward(d_gate_up, kernels.normed(n))
        del d_gate_up
        d = kernels.rms_norm_backward(dn, n, rstd, exact(d))
        del dn
        return block.out.backward(d, kernels.whole(flat, size)).view(shape), exact(d).view(shape), None


class _Embed(torch.autograd.Function):
    """Tokens → normed rows of the embedding."""

    @staticmethod
    def forward(ctx: Any, table: nn.Parameter, tokens: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        flat = tokens.flatten().contiguous()
        n, rstd = kernels_for(table).embed_norm(flat, table, eps, dtype)
        ctx.table = table
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
        return None, None, None, None


class _NormInject(torch.autograd.Function):
    """The boundary operator Norm(h) + α·e."""

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


class _Loss(torch.autograd.Function):
    """Stream and targets → `share` times the mean cross-entropy; gradients are made on the way forward.

    The head's own gradient is added to `.grad` there too: what multiplies the loss must be in `share`.
    """

    @staticmethod
    def forward(
        ctx: Any, stream: Tensor, targets: Tensor, head: FusedLinear, share: float, fast: FusedNetwork
    ) -> Tensor:
        gradient = ctx.needs_input_grad[0]
        kernels = kernels_for(stream, eight=isinstance(head, Float8Linear) and gradient)
        n, rstd = kernels.rms_norm(_rows(stream), fast.eps)
        answers, count = targets.flatten().contiguous(), targets.numel()
        rows = piece_rows(count, head.rows * stream.element_size())
        losses: list[Tensor] = []
        for first in range(0, count, rows):
            piece = slice(first, first + rows)
            loss, dn, factor = _head(n[piece], answers[piece], head, share / count, fast.softcap, gradient)
            losses.append(loss)
            if dn is not None:  # no one needs this piece again: the stream's gradient takes its place
                normed = exact(n)[piece]
                kernels_for(dn).rms_norm_backward(dn, normed, rstd[piece], factor=factor, out=normed)
            del dn
        if gradient:
            ctx.save_for_backward(exact(n))
            ctx.shape = stream.shape
        return torch.cat(losses).mean() * share

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (d,) = ctx.saved_tensors
        if d.is_cuda:  # the thread of the backward begins here, and its first product would warn otherwise
            torch.cuda.set_device(d.device)
        return d.view(ctx.shape), None, None, None, None


def _head(
    n: Any, targets: Tensor, head: FusedLinear, scale: float, softcap: float | None, gradient: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Losses of some tokens, the gradient of n times `scale` and what its rows are yet to be multiplied by.

    The head's own gradient is added to `.grad`.
    """
    if isinstance(n, Tensor):
        kernels = kernels_for(n)
        if kernels.has_odds(n, head.weight):
            losses, parts = kernels.odds(n, head.weight, targets, scale, softcap, gradient=gradient)
            if parts is None:
                return losses, None, None
            odds, factor, scaled = parts
            head.wgrad(odds, scaled)
            return losses, head.dgrad(odds), factor
    else:
        kernels = kernels_for(n.small, eight=True)
    losses, d = kernels.cross_entropy_(head(n), targets, scale, softcap)
    return losses, head.backward(d, n) if gradient else None, None


class FusedNetwork:
    """What `Network` hands its work to once `speed_up` has been called on it."""

    def __init__(self, network: Network, make: Make) -> None:
        self.network, self.make = network, make
        self.eps, self.softcap = network.options.norm_eps, network.options.softcap
        self.head = make(network.head, network.multipliers.output, head=True)
        self.products: list[FusedLinear] = []
        self.adopt_new_blocks()

    def adopt_new_blocks(self) -> None:
        """Take in blocks the network has gained."""
        from steepen.model.block import TransformerBlock

        self.products = [self.head]
        for block in self.network.blocks():
            if type(block) is TransformerBlock:
                if not isinstance(block.fused_forward, FusedBlock):
                    block.fused_forward = FusedBlock(block, self.make)
                self.products += block.fused_forward.products()
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the weights anew: due whenever they have changed."""
        rounded(self.products)
        quantised(self.products)

    def embed(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """The stream's beginning."""
        return _apply(_Embed, self.network.embedding, tokens, self.eps, dtype)

    def loss(self, hidden: Tensor, targets: Tensor, loss_scale: float) -> Tensor:
        """`loss_scale` times the mean cross-entropy."""
        # A custom block may have promoted the hidden states, for example by a gain in fp32.
        return _apply(_Loss, hidden.to(self.head.weight.dtype), targets, self.head, loss_scale, self)

    def norm_inject(self, h: Tensor, e: Tensor, alpha: float) -> Tensor:
        """The boundary operator."""
        return _apply(_NormInject, h, e, alpha, self.eps)


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    return function.apply(*arguments)


def install_fused_gpu(network: Network, make: Make) -> None:
    """Have a network compute on its fast path: built-in blocks, embedding, boundary and loss."""
    network.fused = FusedNetwork(network, make)
