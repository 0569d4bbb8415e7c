"""The transformer block: pre-norm attention with RoPE and QK norm, then a pre-norm SwiGLU.

Matrices that share an input are stored as one stack of logical matrices, (count, out, in): one product
computes them all, and the optimizer still sees each matrix on its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from steepen.errors import SteepenError, UsageError, is_out_of_memory
from steepen.model.config import ModelOptions, Multipliers
from steepen.model.shape import Shape
from steepen.utils.imports import import_object

if TYPE_CHECKING:
    from collections.abc import Callable


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x times a matrix or a stack of matrices (their outputs side by side), in x's precision."""
    return functional.linear(x, weight.to(x.dtype).flatten(0, -2))


def rotary_table(shape: Shape, options: ModelOptions, length: int | None = None) -> Tensor:
    """cos and sin of the rotation angles, stacked: (2, context, head_dim/2)."""
    half = shape.head_dim // 2
    frequency = options.rope_base ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.outer(torch.arange(length or shape.context, dtype=torch.float64), frequency)
    return torch.stack([angle.cos(), angle.sin()])


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Apply RoPE to (..., time, heads, head_dim), pairing each half of the head with the other."""
    cos, sin = table[0].unsqueeze(-2), table[1].unsqueeze(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class TransformerBlock(nn.Module):
    """One block. A block of your own has the same constructor, forward, `starts` and `attention_flops`.

    `mask` may be left out of a block of your own: evaluation then computes shared prefixes once per choice.
    """

    # Parameters that start at a constant; every other one starts uniform (see init.py).
    constant_init: ClassVar[dict[str, float]] = {"out": 0.0, "down": 0.0}

    def __init__(self, shape: Shape, multipliers: Multipliers, options: ModelOptions) -> None:
        super().__init__()
        # A faster implementation of `forward_reference`, installed by the `execution` package.
        self.fused_forward: Callable[[Tensor, Tensor], Tensor] | None = None
        self.heads = shape.heads
        self.residual = multipliers.residual
        self.eps = options.norm_eps
        self.attention_scale = options.qk_scale * shape.head_dim**-0.5
        width, hidden = shape.width, shape.mlp_width
        self.qkv = nn.Parameter(torch.empty(3, width, width))
        self.out = nn.Parameter(torch.empty(width, width))
        self.gate_up = nn.Parameter(torch.empty(2, hidden, width))
        self.down = nn.Parameter(torch.empty(width, hidden))

    @staticmethod
    def attention_flops(shape: Shape, context: int) -> int:
        """FLOPs per token of scores and values, forward and backward, causal (half the square)."""
        return 6 * shape.width * context

    def forward(self, x: Tensor, rotary: Tensor, mask: Tensor | None = None) -> Tensor:
        """Add the block's attention and MLP to the residual stream.

        Attention is causal, or where `mask` (batch, 1, time, time) is True.
        """
        if self.fused_forward is not None and mask is None:
            return self.fused_forward(x, rotary)
        return self.forward_reference(x, rotary, mask)

    def forward_reference(self, x: Tensor, rotary: Tensor, mask: Tensor | None = None) -> Tensor:
        """The reference implementation of `forward`, which every faster implementation must reproduce."""
        x = x + self._attend(self._norm(x), rotary, mask)
        gate, up = linear(self._norm(x), self.gate_up).chunk(2, dim=-1)
        return x + self.residual * linear(functional.silu(gate) * up, self.down)

    def _attend(self, x: Tensor, rotary: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, value = linear(x, self.qkv).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        query, key = (self._norm(rotate(part, rotary)) for part in (query, key))
        attended = functional.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.attention_scale,
        )
        return self.residual * linear(attended.transpose(1, 2).flatten(-2), self.out)

    def _norm(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], eps=self.eps)


def call_custom_block(name: str) -> Callable[..., Tensor]:
    """Applies a block of a user's own, and says whose fault it is where that fails or gives another shape."""

    def apply(block: nn.Module, x: Tensor, *rest: Tensor) -> Tensor:
        try:
            y = block(x, *rest)
        except SteepenError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UsageError(f"the block {name!r} failed: {type(error).__name__}: {reason}") from error
        if not isinstance(y, Tensor) or y.shape != x.shape:
            given = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
            raise UsageError(
                f"the block {name!r} turns a stream of shape {tuple(x.shape)} into {given}; "
                "a block gives the stream back in the shape it came in."
            )
        return y

    return apply


def find_block(name: str) -> type[TransformerBlock]:
    """The built-in block, or the class that "module:attribute" names."""
    if name == "transformer":
        return TransformerBlock
    found = import_object(name, "block")
    if not (isinstance(found, type) and issubclass(found, nn.Module) and hasattr(found, "attention_flops")):
        raise UsageError(
            f"the block {name!r} is not a torch module class with attention_flops; "
            "derive it from steepen.model.block.TransformerBlock."
        )
    return cast("type[TransformerBlock]", found)
