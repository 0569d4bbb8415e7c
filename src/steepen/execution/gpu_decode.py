"""Generation on a GPU: a block's forward of one new token per row, with fused kernels between the GEMMs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from steepen.execution.linear import accumulate_gemm_
from steepen.kernels.dispatch import kernels_for
from steepen.kernels.triton_backend import has_triton_kernels
from steepen.model.block import TransformerBlock, linear

if TYPE_CHECKING:
    from steepen.model.network import Network


def supports_fused_decoding(network: Network) -> bool:
    """Whether `decode_block` can run a network: built-in blocks with bf16 weights on a GPU with Triton."""
    if network.embedding.dtype != torch.bfloat16 or not has_triton_kernels(network.embedding.device):
        return False
    return all(type(block) is TransformerBlock for block in network.blocks())


def decode_block(
    block: TransformerBlock,
    x: Tensor,
    rotary: Tensor,
    keys: Tensor,
    values: Tensor,
    index: Tensor,
    padding: Tensor,
) -> Tensor:
    """`TransformerBlock.forward` of one token per row, (rows, 1, width); it updates the cache.

    The arguments after `rotary` are those of `kernels.decode_attention`.
    """
    kernels, dtype = kernels_for(x), rotary.dtype
    stream = x.flatten(0, 1)
    normed, _ = kernels.rms_norm(stream, block.eps, dtype)
    qkv = linear(normed, block.qkv).unflatten(-1, (3, block.heads, -1))
    attended = kernels.decode_attention(
        qkv, rotary.squeeze(2), keys, values, index, padding, block.eps, block.attention_scale
    )
    stream = stream.clone()  # the caller keeps x
    accumulate_gemm_(stream, attended, block.out.t(), block.residual)
    normed, _ = kernels.rms_norm(stream, block.eps, dtype)
    activated = kernels.swiglu(linear(normed, block.gate_up))
    accumulate_gemm_(stream, activated, block.down.t(), block.residual)
    return stream.view(x.shape)
