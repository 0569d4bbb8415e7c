"""Losses: fused linear cross-entropy for the CPU, and the mean loss over many batches.

The logits of a batch are by far its largest tensor, and a tiny model spends a third of its time on them.
`linear_cross_entropy` computes them for a few hundred tokens at a time and turns each chunk into losses, its
gradient, and both gradient GEMMs while it is in the cache; no logits are stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from steepen.model.network import Network

CHUNK = 256  # tokens at a time


def linear_cross_entropy(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    chunk: int = CHUNK,
) -> Tensor:
    """Mean cross-entropy of targets (…) under the logits scale·(stream @ head_weightᵀ), in fp32 or wider.

    `stream` is (…, width) and already normed, `head_weight` (vocabulary, width). With `softcap` a logit x is
    softcap·tanh(x/softcap). Gradients flow to stream and weight, once.
    """
    columns = hidden.flatten(0, -2).t()
    weight = head_weight.to(hidden.dtype)
    if not torch.is_grad_enabled():  # of which a function of autograd's is not told: it would make gradients
        columns, weight = columns.detach(), weight.detach()
    return cast(
        "Tensor", _LinearCrossEntropy.apply(columns, weight, targets.flatten(), scale, softcap, chunk)
    )


class _LinearCrossEntropy(torch.autograd.Function):
    """The stream comes as (width, tokens): sums over the vocabulary then run along the tokens."""

    @staticmethod
    def forward(
        ctx: Any,
        stream: Tensor,
        weight: Tensor,
        targets: Tensor,
        scale: float,
        softcap: float | None,
        chunk: int,
    ) -> Tensor:
        width, count = stream.shape
        wide = torch.promote_types(stream.dtype, torch.float32)
        wanted = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        d_stream = torch.empty(width, count, dtype=stream.dtype, device=stream.device) if wanted else None
        d_weight = torch.zeros(weight.shape, dtype=wide, device=stream.device)
        losses = torch.empty(count, dtype=wide, device=stream.device)
        for first in range(0, count, chunk):
            piece = slice(first, first + chunk)
            x, answers = stream[:, piece], targets[piece].unsqueeze(0)
            logits = torch.mm(weight, x).to(wide)
            slope: Tensor | None = None
            # Exponentials are taken to base 2: several times faster on a CPU.
            if softcap is None:
                logits.mul_(scale / math.log(2))
            else:
                logits.mul_(scale / softcap).tanh_()
                slope = 1 - logits.square()
                logits.mul_(softcap / math.log(2))
            right = logits.gather(0, answers)
            most = logits.amax(0, keepdim=True)
            powers = logits.sub_(most).exp2_()
            total = powers.sum(0, keepdim=True)
            losses[piece] = (total.log2() + most - right).mul_(math.log(2))[0]
            if d_stream is None:
                continue
            d = powers.mul_(scale / (count * total))
            d.scatter_add_(0, answers, torch.full_like(right, -scale / count))
            if slope is not None:
                d.mul_(slope)
            narrow = d.to(stream.dtype)
            d_stream[:, piece] = torch.mm(weight.t(), narrow)
            d_weight += torch.mm(narrow, x.t())
        if d_stream is not None:
            ctx.save_for_backward(d_stream, d_weight.to(weight.dtype))
        return losses.mean()

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, ...]:
        d_stream, d_weight = ctx.saved_tensors
        factor = gradients[0]
        return (
            d_stream * factor.to(d_stream.dtype),
            d_weight * factor.to(d_weight.dtype),
            None,
            None,
            None,
            None,
        )


@torch.no_grad()
def mean_loss(network: Network, batches: Iterable[tuple[Tensor, Tensor]], passes: int | None = None) -> float:
    """Mean cross-entropy per token over (inputs, targets) batches of any sizes, summed in fp64."""
    device = network.embedding.device
    total, tokens = 0.0, 0
    training = network.training
    network.eval()
    try:
        for inputs, targets in batches:
            loss = network(inputs.to(device), targets.to(device), passes=passes)
            total += loss.double().item() * targets.numel()
            tokens += targets.numel()
    finally:
        network.train(training)
    return total / tokens
