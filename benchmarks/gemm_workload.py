"""The GEMMs and attention of a micro-batch without anything else, for the benchmarks.

Operands are random, never zero: GEMMs of zeros draw less power.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from gpu_timing import DEVICE
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from steepen.execution.gpu_fused import logit_chunk_tokens
from steepen.kernels.cublaslt_gemm import accumulate_gemm_, gemm
from steepen.model.shape import Shape

Gemm = Callable[..., Tensor]


def normal(*size: int) -> Tensor:
    """Standard normal numbers in bf16."""
    return torch.randn(size, dtype=torch.bfloat16, device=DEVICE)


def torch_gemm(x: Tensor, weight: Tensor, *, accumulate_into: Tensor | None = None) -> Tensor:
    """`steepen.kernels.cublaslt_gemm.gemm` with the cuBLAS algorithm that torch uses."""
    return x @ weight if accumulate_into is None else accumulate_into.addmm_(x, weight)


@dataclass
class Linear:
    """Forward, dgrad and wgrad GEMMs of a weight, as in training with two differences.

    The output projection does not add the residual, and weight gradients are always accumulated, where the
    first micro-batch of a training step writes them.
    """

    weight: Tensor
    grad: Tensor  # accumulated in fp32
    x: Tensor  # input
    d: Tensor  # gradient of the output
    residual: Tensor | None = None  # the result is added to it, as in the MLP's down projection

    @property
    def flops(self) -> int:
        """FLOPs of each of the three GEMMs."""
        return 2 * len(self.x) * self.weight.numel()

    def forward(self, run: Gemm = gemm) -> None:
        run(self.x, self.weight.t(), accumulate_into=self.residual)

    def dgrad(self, run: Gemm = gemm) -> None:
        run(self.d, self.weight)

    def wgrad(self) -> None:
        accumulate_gemm_(self.grad, self.d.t(), self.x, 1.0)


class MicroBatch:
    """The linear layers of each block by name, and the head, once per chunk of logits.

    Blocks have separate weights and the same activations, which are too large for the L2 cache.
    """

    def __init__(self, shape: Shape, tokens: int, blocks: int) -> None:
        w, h = shape.width, shape.mlp_width
        x = {n: normal(tokens, n) for n in (w, h)}
        d = {n: normal(tokens, n) for n in (w, 3 * w, 2 * h)}

        def weight_and_grad(out: int, inner: int) -> tuple[Tensor, Tensor]:
            return normal(out, inner) * inner**-0.5, torch.zeros(out, inner, device=DEVICE)

        def linear(out: int, inner: int, residual: Tensor | None = None) -> Linear:
            return Linear(*weight_and_grad(out, inner), x[inner], d[out], residual)

        residual = normal(tokens, w)
        self.blocks = [
            {
                "qkv": linear(3 * w, w),
                "out": linear(w, w),
                "gate_up": linear(2 * h, w),
                "down": linear(w, h, residual),
            }
            for _ in range(blocks)
        ]
        head = weight_and_grad(shape.vocabulary, w)
        rows = logit_chunk_tokens(tokens, shape.vocabulary * x[w].element_size())
        d_logits = normal(rows, shape.vocabulary)
        self.head = [Linear(*head, chunk, d_logits[: len(chunk)]) for chunk in x[w].split(rows)]


class Attention:
    """Causal attention of one block, with the strides of training."""

    def __init__(self, shape: Shape, rows: int, backend: SDPBackend) -> None:
        qkv = normal(rows, shape.context, 3, shape.heads, shape.head_dim)
        self.inputs = [part.transpose(1, 2).detach().requires_grad_() for part in qkv.unbind(2)]
        self.d = normal(rows, shape.context, shape.heads, shape.head_dim).transpose(1, 2)
        self.backend = backend
        self.outputs: list[Tensor] = []  # of forward; backward uses the last

    def forward(self) -> None:
        query, key, value = self.inputs
        with sdpa_kernel(self.backend) if DEVICE.type == "cuda" else contextlib.nullcontext():
            self.outputs.append(functional.scaled_dot_product_attention(query, key, value, is_causal=True))

    def backward(self, retain: bool = False) -> None:
        torch.autograd.grad(self.outputs[-1], self.inputs, self.d, retain_graph=retain)
        if not retain:
            self.outputs.pop()


def calls_of_step(batch: MicroBatch, attention: Attention) -> list[Any]:
    """All GEMMs and attention of a micro-batch in training's order; each is a method of what it computes."""
    # As in execution/gpu_fused.py, where the forward pass includes all of the head's GEMMs.
    order: list[Any] = []
    for b in batch.blocks:
        order += [b["qkv"].forward, attention.forward]
        order += [b["out"].forward, b["gate_up"].forward, b["down"].forward]
    for chunk in batch.head:
        order += [chunk.forward, chunk.wgrad, chunk.dgrad]
    for b in reversed(batch.blocks):
        order += [b["down"].dgrad, b["down"].wgrad, b["gate_up"].wgrad, b["gate_up"].dgrad]
        order += [b["out"].wgrad, b["out"].dgrad, attention.backward]
        order += [b["qkv"].wgrad, b["qkv"].dgrad]
    return order
