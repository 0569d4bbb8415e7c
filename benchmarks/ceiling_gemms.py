"""A micro-batch's products and attention with nothing around them, for `ceilings.py` to time.

Numbers are random, never zero: products of zeros draw less power.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from throughput import DEVICE
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from steepen.execution.gpu_fused import logit_chunk_tokens
from steepen.execution.linear import accumulate_gemm_
from steepen.kernels.cublaslt_gemm import gemm
from steepen.model.shape import Shape

Gemm = Callable[..., Tensor]


def normal(*size: int) -> Tensor:
    return torch.randn(size, dtype=torch.bfloat16, device=DEVICE)


def torch_gemm(x: Tensor, weight: Tensor, *, accumulate_into: Tensor | None = None) -> Tensor:
    """As `steepen.kernels.cublaslt_gemm.gemm`, with the algorithm that torch has cuBLAS choose."""
    return x @ weight if accumulate_into is None else accumulate_into.addmm_(x, weight)


@dataclass
class Matrix:
    """A matrix and its three products as training makes them, with two differences in what is read.

    Here the output projection does not add to the stream, and gradients of weights are always added to what
    there is, where a step writes its first.
    """

    weight: Tensor
    total: Tensor  # its gradient, summed in fp32
    x: Tensor
    d: Tensor
    stream: Tensor | None = None  # what the product is added to, as the MLP's last one is

    @property
    def flops(self) -> int:
        """Of each of the three."""
        return 2 * len(self.x) * self.weight.numel()

    def forward(self, run: Gemm = gemm) -> None:
        run(self.x, self.weight.t(), accumulate_into=self.stream)

    def dgrad(self, run: Gemm = gemm) -> None:
        run(self.d, self.weight)

    def wgrad(self) -> None:
        accumulate_gemm_(self.total, self.d.t(), self.x, 1.0)


class MicroBatch:
    """The matrices of so many blocks by name, and the head's, once for each piece of the logits.

    Blocks have weights of their own and share what flows through them, which is too much for a cache.
    """

    def __init__(self, shape: Shape, tokens: int, blocks: int) -> None:
        w, h = shape.width, shape.mlp_width
        x = {n: normal(tokens, n) for n in (w, h)}
        d = {n: normal(tokens, n) for n in (w, 3 * w, 2 * h)}

        def weight_and_total(out: int, inner: int) -> tuple[Tensor, Tensor]:
            return normal(out, inner) * inner**-0.5, torch.zeros(out, inner, device=DEVICE)

        def matrix(out: int, inner: int, stream: Tensor | None = None) -> Matrix:
            return Matrix(*weight_and_total(out, inner), x[inner], d[out], stream)

        stream = normal(tokens, w)
        self.blocks = [
            {
                "qkv": matrix(3 * w, w),
                "out": matrix(w, w),
                "gate_up": matrix(2 * h, w),
                "down": matrix(w, h, stream),
            }
            for _ in range(blocks)
        ]
        head = weight_and_total(shape.vocabulary, w)
        rows = logit_chunk_tokens(tokens, shape.vocabulary * x[w].element_size())
        d_logits = normal(rows, shape.vocabulary)
        self.head = [Matrix(*head, piece, d_logits[: len(piece)]) for piece in x[w].split(rows)]


class Attention:
    """One block's causal attention, on queries, keys and values as they lie in training."""

    def __init__(self, shape: Shape, rows: int, backend: SDPBackend) -> None:
        qkv = normal(rows, shape.context, 3, shape.heads, shape.head_dim)
        self.inputs = [part.transpose(1, 2).detach().requires_grad_() for part in qkv.unbind(2)]
        self.d = normal(rows, shape.context, shape.heads, shape.head_dim).transpose(1, 2)
        self.backend = backend
        self.kept: list[Tensor] = []  # what forward gave; backward takes the last first

    def forward(self) -> None:
        query, key, value = self.inputs
        with sdpa_kernel(self.backend) if DEVICE.type == "cuda" else contextlib.nullcontext():
            self.kept.append(functional.scaled_dot_product_attention(query, key, value, is_causal=True))

    def backward(self, keep: bool = False) -> None:
        torch.autograd.grad(self.kept[-1], self.inputs, self.d, retain_graph=keep)
        if not keep:
            self.kept.pop()
