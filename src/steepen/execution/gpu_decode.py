"""One decode step on a GPU: the token that follows, for every row, in about five kernels per block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from steepen.kernels.decode import DecodeAttention, DecodeChoice, Epilogue, decode_linear
from steepen.kernels.norm import embed_norm_triton, norm_inject_triton, rms_norm_triton
from steepen.kernels.triton_backend import has_triton_kernels
from steepen.model.block import TransformerBlock
from steepen.model.block_options import BlockOptions
from steepen.model.block_variant import VariantBlock
from steepen.model.boundary import Boundary, normalize_and_inject
from steepen.model.network import Network


def has_decode_kernels(network: Network) -> bool:
    """Whether `DecodeStep` runs a network: built-in blocks without experts or hyper-connections, on a GPU."""

    def runs(block: nn.Module) -> bool:
        if isinstance(block, VariantBlock):
            given = block.variant
            return given == BlockOptions(
                kv_heads=given.kv_heads,
                window=given.window,
                activation=given.activation,
                parallel=given.parallel,
            )
        return type(block) is TransformerBlock

    return (
        has_triton_kernels(network.embedding.device)
        and network.branch_dtype in (torch.bfloat16, torch.float32)
        and network.multipliers.output > 0  # the order of the head's products is that of the logits
        and network.visit is None
        and all(map(runs, network.blocks()))
    )


@dataclass(frozen=True)
class BlockWeights:
    """The matrices of a block in the compute dtype, stacks flattened, and what its options change."""

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor
    activation: Epilogue
    parallel: bool
    residual: float

    @staticmethod
    def of(block: nn.Module, dtype: torch.dtype) -> BlockWeights:
        """The weights of a block; those that have the dtype already are not copied."""
        assert isinstance(block, TransformerBlock)
        variant = block.variant if isinstance(block, VariantBlock) else None

        def matrix(parameter: Tensor) -> Tensor:
            return parameter.detach().to(dtype).flatten(0, -2).contiguous()

        if isinstance(block, VariantBlock) and block.variant.kv_heads is not None:
            qkv = torch.cat([matrix(block.query), matrix(block.key_value)])
        else:
            qkv = matrix(block.qkv)
        return BlockWeights(
            qkv, matrix(block.out), matrix(block.gate_up), matrix(block.down),
            activation="relu2" if variant is not None and variant.activation == "relu2" else "swiglu",
            parallel=variant is not None and variant.parallel,
            residual=block.residual,
        )  # fmt: skip


class ChoiceOptions(Protocol):
    """How tokens are chosen (`inference.decoding.Sampling`)."""

    @property
    def temperature(self) -> float:
        """Divides the logits; 0 is greedy decoding."""
        ...

    @property
    def top_p(self) -> float:
        """Mass of the most probable tokens that are sampled from."""
        ...


class DecodeStep:
    """Computes hidden states of the newest tokens and chooses the next; all that it needs is on the GPU.

    `slots` has (keys, values) of every executed block, each (rows, kv_heads, length, head_dim). A call
    replaces `tokens` (rows), which are at `index` (rows) of the cache, counts `index` on, and writes the
    tokens to a column of `found` (rows, new tokens); column 0 is at index `prompt`. `uniforms` has a random
    number for each. Row i of the cache begins at `padding[i]`.
    """

    def __init__(
        self,
        network: Network,
        passes: int,
        slots: Sequence[Sequence[Tensor]],
        tokens: Tensor,
        found: Tensor,
        index: Tensor,
        padding: Tensor,
        uniforms: Tensor,
        sampling: ChoiceOptions,
        *,
        prompt: int,
        vocabulary: int | None = None,
    ) -> None:
        self.network, self.passes, self.slots, self.tokens = network, passes, slots, tokens
        dtype, options, first = network.branch_dtype, network.options, next(iter(network.blocks()))
        assert isinstance(first, TransformerBlock)
        self.eps = options.norm_eps
        self.weights = {block: BlockWeights.of(block, dtype) for block in network.blocks()}
        self.head = network.head.detach().to(dtype)
        self.vocabulary = min(vocabulary or network.token_ids, network.token_ids)
        self.attend = DecodeAttention(
            network.rotary.to(dtype), index, padding, heads=first.heads, length=slots[0][0].shape[2],
            window=network.arm.block_options.window, scale=first.attention_scale, eps=self.eps,
        )  # fmt: skip
        self.choose = DecodeChoice(
            uniforms[:, : found.shape[1]].contiguous(), tokens, found, index,
            prompt=prompt, multiplier=network.multipliers.output, softcap=options.softcap,
            temperature=sampling.temperature, top_p=sampling.top_p,
        )  # fmt: skip

    def __call__(self) -> None:
        """Replace the tokens by those that follow."""
        network, slots = self.network, iter(self.slots)
        x = embed_norm_triton(self.tokens, network.embedding.detach(), self.eps, network.stream_dtype)[0]
        e = self._run(network.prelude, x, slots)
        e = rms_norm_triton(e, self.eps)[0] if network.arm.norm_prelude else e
        h: Tensor | None = None
        for core in network.applied_cores(self.passes):
            as_is = h is None and network.options.first_pass == "prelude"
            h = self._run(core, e if as_is else self._boundary(network.core_boundary, h, e), slots)
        x = self._run(network.coda, self._boundary(network.coda_boundary, h, e), slots)
        self.choose(decode_linear(x, self.head, outputs=self.vocabulary, norm_eps=self.eps))

    def _run(self, blocks: nn.ModuleList, x: Tensor, slots: Iterator[Sequence[Tensor]]) -> Tensor:
        for block in blocks:
            x = self._block(self.weights[block], x, *next(slots))
        return x

    def _block(self, block: BlockWeights, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """The residual stream after a block, (rows, width)."""

        def hidden(source: Tensor) -> Tensor:
            return decode_linear(source, block.gate_up, norm_eps=self.eps, epilogue=block.activation)

        attended = self.attend(decode_linear(x, block.qkv, norm_eps=self.eps), keys, values)
        middle = decode_linear(attended, block.out, epilogue="add", residual=x, factor=block.residual)
        activated = hidden(x if block.parallel else middle)
        return decode_linear(
            activated, block.down, epilogue="add", residual=middle, factor=block.residual, out=middle
        )

    def _boundary(self, boundary: Boundary, h: Tensor | None, e: Tensor) -> Tensor:
        alpha = self.network.multipliers.injection
        if boundary is normalize_and_inject and h is not None:
            return norm_inject_triton(h, e, alpha, self.eps)[0]
        # One in Python is given hidden states as in a forward pass, (batch, time, width).
        state = None if h is None else h.unsqueeze(1)
        return boundary(state, e.unsqueeze(1), alpha, self.network.norm).squeeze(1).contiguous()
