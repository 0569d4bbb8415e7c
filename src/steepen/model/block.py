"""The transformer block: pre-norm attention with RoPE and QK norm, then a pre-norm SwiGLU.

Matrices that read the same input are one parameter, a stack (count, out, in): one GEMM computes them all, and
the optimizer steps each matrix of the stack separately.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from steepen.errors import SteepenError, UsageError, is_out_of_memory
from steepen.model.arm import OWN_CODE
from steepen.model.config import ModelOptions, Multipliers
from steepen.model.shape import Shape
from steepen.utils.imports import import_object

if TYPE_CHECKING:
    from collections.abc import Callable


class CacheSlot(Protocol):
    """Keys and values of one executed block, kept between calls (`inference.kv_cache`)."""

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store those of new tokens, (batch, heads, time, head_dim), and return those to attend to."""
        ...


class Block(Protocol):
    """What the network expects of a block, and gives it; `TransformerBlock` has it all.

    The constructor is called on the meta device and only creates parameters: `initialize` fills those that
    `constant_init` names with a constant, and the others uniformly. Optional: `mask` and `cache` of
    `__call__` (see `TransformerBlock.forward`), and `active_parameters()`, the elements of the matrices
    that a token is multiplied by, if not all.
    """

    constant_init: ClassVar[dict[str, float]]

    def __init__(self, shape: Shape, multipliers: Multipliers, options: ModelOptions) -> None: ...

    def __call__(self, x: Tensor, rotary: Tensor, /) -> Tensor:
        """The next residual stream from x, (batch, time, width), in x's dtype.

        `rotary` is a table for `rotate`, (2, time, head_dim/2), or (2, batch, time, head_dim/2) where rows
        have positions of their own. Its dtype is that of the GEMMs; where x is wider, autocast is on.
        """
        ...

    def attention_flops(self, shape: Shape, context: int) -> int:
        """FLOPs per token, forward and backward, of operations without parameters."""
        ...


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weightᵀ in x's dtype: (…, in) × (out, in) or a stack (count, out, in) → (…, count·out)."""
    return functional.linear(x, weight.to(x.dtype).flatten(0, -2))


def rotary_table(shape: Shape, options: ModelOptions, length: int | None = None) -> Tensor:
    """RoPE table in fp64: cos and sin of the rotation angles, (2, context, head_dim/2).

    With `options.rope_table` bf16 the values are rounded to bf16.
    """
    half = shape.head_dim // 2
    if torch.get_default_device().type == "meta":  # torch's arithmetic on meta tensors imports its compiler
        return torch.empty(2, length or shape.context, half, dtype=torch.float64)
    frequency = options.rope_base ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.outer(torch.arange(length or shape.context, dtype=torch.float64), frequency)
    table = torch.stack([angle.cos(), angle.sin()])
    return table.bfloat16().double() if options.rope_table == "bf16" else table


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Apply RoPE to (…, time, heads, head_dim); channel i is paired with channel i + head_dim/2."""
    cos, sin = table[0].unsqueeze(-2), table[1].unsqueeze(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


def rms_norm(x: Tensor, eps: float) -> Tensor:
    """RMSNorm without gain, over the last dimension; `eps` is that of `ModelOptions.norm_eps`."""
    return functional.rms_norm(x, x.shape[-1:], eps=eps)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attention of (batch, heads, time, head_dim), causal or by the mask; keys may have fewer heads."""
    return functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=key.shape[1] != query.shape[1],
    )


class TransformerBlock(nn.Module):
    """The built-in block. A custom block derives from it, overriding what it changes, or is another `Block`.

    Without a `mask` argument, evaluation computes a shared prefix once per choice, and without a `cache`
    argument, generation computes the whole text for every new token.
    """

    # Parameters initialized to a constant; every other one is uniform (see init.py).
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

    def attention_flops(self, shape: Shape, context: int) -> int:
        """Attention FLOPs per token (scores and values), forward and backward, over (context + 1)/2 keys."""
        return 6 * shape.width * (context + 1)

    def forward(
        self, x: Tensor, rotary: Tensor, mask: Tensor | None = None, cache: CacheSlot | None = None
    ) -> Tensor:
        """Add attention and MLP to the residual stream: (batch, time, width) → the same shape.

        Attention is causal, or follows `mask` (batch, 1, time, keys), True where a query sees a key. Keys are
        those of x, or those that `cache` returns.
        """
        if self.fused_forward is not None and mask is None and cache is None:
            return self.fused_forward(x, rotary)
        # Custom blocks may override the two methods below without a cache argument.
        return self.forward_reference(x, rotary, mask, *(() if cache is None else (cache,)))

    def forward_reference(
        self, x: Tensor, rotary: Tensor, mask: Tensor | None = None, cache: CacheSlot | None = None
    ) -> Tensor:
        """The reference implementation of `forward`, which every faster implementation must reproduce.

        The branches are computed in the dtype of `rotary`; x, the residual stream, may be wider.
        """
        dtype = rotary.dtype
        slot = () if cache is None else (cache,)
        x = x + self.residual * self.attention(self.norm(x).to(dtype), rotary, mask, *slot)
        return x + self.residual * self.mlp(self.norm(x).to(dtype))

    def attention(
        self, x: Tensor, rotary: Tensor, mask: Tensor | None = None, cache: CacheSlot | None = None
    ) -> Tensor:
        """The attention branch of normed hidden states: (batch, time, width) → the same shape."""
        query, key, value = self.project(x)
        query, key = (self.norm(rotate(part, rotary)) for part in (query, key))
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        if cache is not None:
            key, value = cache.append(key, value)
        return linear(self.attend(query, key, value, mask).transpose(1, 2).flatten(-2), self.out)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, (batch, time, heads, head_dim)."""
        query, key, value = linear(x, self.qkv).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        return query, key, value

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Attention of (batch, heads, time, head_dim), causal or by the mask; keys may have fewer heads."""
        return attend(query, key, value, mask, self.attention_scale)

    def mlp(self, x: Tensor) -> Tensor:
        """The MLP branch of normed hidden states: (batch, time, width) → the same shape."""
        gate, up = linear(x, self.gate_up).chunk(2, dim=-1)
        return linear(functional.silu(gate) * up, self.down)

    def norm(self, x: Tensor) -> Tensor:
        """RMSNorm without gain, over the last dimension."""
        return rms_norm(x, self.eps)


def call_custom_block(name: str) -> Callable[..., Tensor]:
    """Return a caller for custom blocks that names the block where it raises or changes the shape.

    If the residual stream is wider than the compute dtype, that of `rotary`, the block runs under autocast.
    """

    def apply(block: nn.Module, x: Tensor, rotary: Tensor, *rest: Any) -> Tensor:
        same = x.dtype == rotary.dtype
        context = contextlib.nullcontext() if same else torch.autocast(x.device.type, rotary.dtype)
        try:
            with context:
                y = block(x, rotary, *rest)
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
                f"the block {name!r} turns hidden states of shape {tuple(x.shape)} into {given}; "
                "a block must return the shape it is given."
            )
        return y

    return apply


def find_block(name: str) -> type[TransformerBlock]:
    """Find a block class: "transformer", or the class that "module:attribute" names."""
    if name == "transformer":
        return TransformerBlock
    found = import_object(name, "block", own=OWN_CODE)
    if not (isinstance(found, type) and issubclass(found, nn.Module) and hasattr(found, "attention_flops")):
        raise UsageError(
            f"the block {name!r} is not a torch module class with attention_flops; "
            "derive it from steepen.model.block.TransformerBlock."
        )
    return cast("type[TransformerBlock]", found)
