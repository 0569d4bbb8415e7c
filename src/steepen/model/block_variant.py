"""The built-in block with other attention or another MLP (`BlockOptions`).

It computes what `TransformerBlock` computes where an option is absent. On a GPU torch.compile runs it;
grouped-query attention without other options has fused kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from steepen.model.arm import Arm
from steepen.model.block import CacheSlot, TransformerBlock, find_block, linear
from steepen.model.block_options import BlockOptions
from steepen.model.config import ModelOptions, Multipliers
from steepen.model.shape import Shape

# The choice of experts adds BIAS_SCALE times a parameter that AdamW moves by about its learning rate against
# the load: 0.001 a step at the paper's 0.04.
BIAS_SCALE = 0.025
BIAS_GRADIENT = 1e-3  # small beside real gradients in the norm that clipping reads; AdamW ignores the scale
BALANCE_WEIGHT = 0.01  # of the term of the loss
# Weights of hyper-connections move by 0.001 a step too, from where they start.
CONNECTION_SCALE = BIAS_SCALE


def make_block(arm: Arm, shape: Shape, multipliers: Multipliers, options: ModelOptions) -> TransformerBlock:
    """A block of an arm."""
    if arm.block == "transformer" and not arm.block_options.standard:
        return VariantBlock(shape, multipliers, options, arm.block_options)
    return find_block(arm.block)(shape, multipliers, options)


def active_matrices(block: nn.Module) -> int:
    """Parameters of the matrices that a token is multiplied by: all, unless the block says otherwise."""
    own = getattr(block, "active_parameters", None)
    return sum(p.numel() for p in block.parameters() if p.ndim >= 2) if own is None else own()


def count_block(arm: Arm, shape: Shape) -> tuple[int, int, int]:
    """Stored parameters of an arm's block, those of active matrices, and attention FLOPs per token."""
    with torch.device("meta"):
        block = make_block(arm, shape, Multipliers(), ModelOptions())
    stored = sum(p.numel() for p in block.parameters())
    return stored, active_matrices(block), block.attention_flops(shape, shape.context)


class VariantBlock(TransformerBlock):
    """The block of an arm with `BlockOptions`."""

    constant_init: ClassVar[dict[str, float]] = {
        **TransformerBlock.constant_init,
        "expert_down": 0.0,
        "choice_bias": 0.0,
        "attention_connection": 0.0,
        "mlp_connection": 0.0,
    }

    def __init__(
        self, shape: Shape, multipliers: Multipliers, options: ModelOptions, variant: BlockOptions
    ) -> None:
        super().__init__(shape, multipliers, options)
        self.variant = variant
        self.loss_weight = 1.0  # fraction of the batch that the micro-batch is; set by the network
        width, hidden = shape.width, variant.mlp_width(shape)
        self.kv_heads = variant.heads(shape)
        if variant.kv_heads is not None:
            del self.qkv
            self.query = nn.Parameter(torch.empty(width, width))
            self.key_value = nn.Parameter(torch.empty(2, self.kv_heads * shape.head_dim, width))
        parts = 2 if variant.activation == "swiglu" else 1
        dense = variant.shared_experts if variant.experts is not None else 1
        del self.gate_up, self.down
        if dense:
            self.gate_up = nn.Parameter(torch.empty(parts, dense * hidden, width))
            self.down = nn.Parameter(torch.empty(width, dense * hidden))
        if variant.experts is not None:
            self.router = nn.Parameter(torch.empty(variant.experts, width))
            self.expert_gate_up = nn.Parameter(torch.empty(variant.experts * parts, hidden, width))
            self.expert_down = nn.Parameter(torch.empty(variant.experts, width, hidden))
            if variant.balance == "bias":
                self.choice_bias = nn.Parameter(torch.empty(variant.experts))

        if variant.streams is not None:
            # Vectors, so that AdamW steps them: Muon would orthogonalize a matrix of mixing weights.
            weights = variant.streams * (variant.streams + 2)
            self.attention_connection = nn.Parameter(torch.empty(weights))
            if not variant.parallel:
                self.mlp_connection = nn.Parameter(torch.empty(weights))

    def attention_flops(self, shape: Shape, context: int) -> int:
        """As of the paper's block, over the keys of the window."""
        return round(12 * shape.width * self.variant.visible_keys(context))

    def active_parameters(self) -> int:
        """Parameters of the matrices that a token is multiplied by."""
        matrices = sum(p.numel() for p in self.parameters() if p.ndim >= 2)
        if self.variant.experts is None:
            return matrices
        expert = (self.expert_gate_up.numel() + self.expert_down.numel()) // self.variant.experts
        return matrices - (self.variant.experts - self.variant.active_experts) * expert

    def forward_reference(
        self, x: Tensor, rotary: Tensor, mask: Tensor | None = None, cache: CacheSlot | None = None
    ) -> Tensor:
        """Attention, then the MLP; or both of the same input.

        With hyper-connections x is (batch, time, streams, width).
        """

        def attention(normed: Tensor) -> Tensor:
            return self.attention(normed, rotary, mask, cache)

        def both(normed: Tensor) -> Tensor:
            return attention(normed) + self.mlp(normed)

        if self.variant.parallel:
            return self._connect(x, "attention_connection", both, rotary.dtype)
        x = self._connect(x, "attention_connection", attention, rotary.dtype)
        return self._connect(x, "mlp_connection", self.mlp, rotary.dtype)

    def _connect(
        self, x: Tensor, name: str, branch: Callable[[Tensor], Tensor], dtype: torch.dtype
    ) -> Tensor:
        """Add a branch of normed hidden states to the residual stream, or to its copies.

        A branch reads one copy, is added to all, and the copies move on by one place, so that the branches
        of a network read them in turn: with equal weights all copies would stay equal. Training changes
        each of these weights. One copy is then the residual connection.
        """
        streams = self.variant.streams
        if streams is None:
            return x + self.residual * branch(self.norm(x).to(dtype))
        change = CONNECTION_SCALE * getattr(self, name).to(x.dtype)
        read, write, mix = change.split([streams, streams, streams**2])
        copies = torch.eye(streams, dtype=x.dtype, device=x.device)
        source = torch.einsum("...sw,s->...w", x, copies[0] + read)
        added = self.residual * branch(self.norm(source).to(dtype))
        moved = torch.einsum("...sw,st->...tw", x, copies.roll(1, 1) + mix.view(streams, streams))
        return moved + (1 + write).unsqueeze(-1) * added.unsqueeze(-2)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, (batch, time, heads, head_dim); of the latter two there may be fewer."""
        if self.variant.kv_heads is None:
            return super().project(x)
        key, value = linear(x, self.key_value).unflatten(-1, (2, self.kv_heads, -1)).unbind(-3)
        return linear(x, self.query).unflatten(-1, (self.heads, -1)), key, value

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Attention over the keys of the window; a mask that is given has it already."""
        window, time = self.variant.window, query.shape[-2]
        if mask is None and window is not None and window < time:
            steps = torch.arange(time, device=query.device)
            distance = steps[:, None] - steps
            mask = (distance >= 0) & (distance < window)
        return super().attend(query, key, value, mask)

    def mlp(self, x: Tensor) -> Tensor:
        """The MLP, or the shared experts and the routed ones: (batch, time, width) → the same shape."""
        if self.variant.experts is None:
            return self._dense(x, self.gate_up, self.down)
        routed = self._routed(x)
        return routed + self._dense(x, self.gate_up, self.down) if self.variant.shared_experts else routed

    def _dense(self, x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        return linear(self._activate(linear(x, gate_up)), down)

    def _activate(self, hidden: Tensor) -> Tensor:
        if self.variant.activation == "relu2":
            return functional.relu(hidden).square()
        gate, up = hidden.chunk(2, dim=-1)
        return functional.silu(gate) * up

    def _routed(self, x: Tensor) -> Tensor:
        """Each token through the experts that its scores choose, weighted by them.

        The weights are the softmax of the chosen scores; of a single choice, its probability among all
        experts: a weight of 1 would leave the router without a gradient.
        """
        variant, experts = self.variant, self.router.shape[0]
        tokens = x.flatten(0, -2)
        scores = linear(tokens, self.router).to(torch.promote_types(x.dtype, torch.float32))
        biased = scores.detach()
        if variant.balance == "bias":
            biased = biased.softmax(-1) + BIAS_SCALE * self.choice_bias.detach()
        chosen = biased.topk(variant.active_experts, dim=-1).indices  # (tokens, active)
        # Not bincount: the compiler does not know the shape of its result.
        load = (chosen.flatten().unsqueeze(-1) == torch.arange(experts, device=x.device)).sum(0)
        if variant.active_experts == 1:
            weights = scores.softmax(-1).gather(-1, chosen)
        else:
            weights = scores.gather(-1, chosen).softmax(-1)
        if torch.is_grad_enabled() and variant.balance == "bias":
            excess = self.loss_weight * (load / chosen.numel() - 1 / experts)
            weights = _WithGradient.apply(weights, self.choice_bias, BIAS_GRADIENT * excess)
        elif torch.is_grad_enabled() and variant.balance == "loss":
            term = _balance_loss(scores.view(*x.shape[:-1], -1), chosen.view(*x.shape[:-1], -1))
            term = BALANCE_WEIGHT * self.loss_weight * term
            weights = _WithGradient.apply(weights, term, torch.ones_like(term))
        # Tokens in the order of their experts, so that each expert is one GEMM.
        order = chosen.flatten().argsort(stable=True)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        found = self._experts(tokens[order // variant.active_experts], load)[back].unflatten(0, chosen.shape)
        return (found * weights.to(x.dtype).unsqueeze(-1)).sum(-2).view_as(x)

    def _experts(self, tokens: Tensor, load: Tensor) -> Tensor:
        """Each expert on its tokens: `load` of them, one expert after the other."""
        gate_up = self.expert_gate_up.unflatten(0, (len(load), -1))
        if not has_grouped_gemm(tokens, self.expert_down):
            parts = tokens.split(load.tolist())
            each = zip(parts, gate_up, self.expert_down, strict=True)
            return torch.cat([self._dense(part, first, second) for part, first, second in each])
        # One launch for all experts, and their loads stay on the GPU: reading them would stop the host until
        # the router is done, and end torch.compile's graph.
        ends = load.cumsum(0, dtype=torch.int32)
        first, second = (w.to(tokens.dtype).mT for w in (gate_up.flatten(1, 2), self.expert_down))
        activated = self._activate(functional.grouped_mm(tokens, first, offs=ends))
        return functional.grouped_mm(activated, second, offs=ends)


def has_grouped_gemm(tokens: Tensor, weight: Tensor) -> bool:
    """Whether one GEMM can run all experts: in bf16 on a GPU, with rows of multiples of 16 bytes."""
    return (
        tokens.is_cuda and tokens.dtype == torch.bfloat16 and not any(side % 8 for side in weight.shape[1:])
    )


def _balance_loss(scores: Tensor, chosen: Tensor) -> Tensor:
    """Mean over sequences of Σ (fraction of choices × mean probability) · experts; 1 at an even load.

    By sequence, so that micro-batches and ranks add up to the term of the whole batch.
    """
    experts = scores.shape[-1]
    fraction = functional.one_hot(chosen, experts).to(scores.dtype).mean((-3, -2))  # (batch, experts)
    return experts * (fraction * scores.softmax(-1).mean(-2)).sum(-1).mean()


class _WithGradient(torch.autograd.Function):
    """Return the weights, and give another tensor a gradient.

    To a term of the loss 1, as if it had been added to the loss. To the bias the excess load: the optimizer,
    its checkpoints and the sum over ranks then do what a rule of its own would have to.
    """

    @staticmethod
    def forward(ctx: Any, weights: Tensor, other: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient.to(other.dtype))
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return grads[0], gradient, None
