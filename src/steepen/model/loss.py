"""Losses: fused linear cross-entropy for the CPU, and the mean loss over many batches.

The logits of a batch are by far its largest tensor, and a tiny model spends a third of its time on them.
`linear_cross_entropy` computes them for a few hundred tokens at a time and turns each chunk into losses, its
gradient, and both gradient GEMMs while it is in the cache; no logits are stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

if TYPE_CHECKING:
    from steepen.model.network import Network

CHUNK = 256  # tokens at a time


class MeanLoss(NamedTuple):
    """Mean cross-entropy in nats per token, and the part of it that the targets of one token contribute."""

    loss: float
    apart: float


def combined(parts: Sequence[MeanLoss], sizes: Sequence[int]) -> MeanLoss:
    """The mean loss over several parts of these sizes together; of one part its own, to the bit."""
    if len(parts) == 1:
        return parts[0]
    loss, apart = (
        math.fsum(value * size for value, size in zip(values, sizes, strict=True)) / sum(sizes)
        for values in zip(*parts, strict=True)
    )
    return MeanLoss(loss, apart)


def linear_cross_entropy(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    vocabulary: int | None = None,
    chunk: int = CHUNK,
) -> Tensor:
    """Mean cross-entropy of targets (…) under the logits scale·(hidden @ head_weightᵀ), fp32 or wider.

    `hidden` is (…, width), already normed; `head_weight` is (vocabulary, width). With `softcap` a logit x
    becomes softcap·tanh(x/softcap). Only the first `vocabulary` rows of the weight have a logit; by default
    all. Gradients of hidden and weight are computed in the forward pass.
    """
    columns = hidden.flatten(0, -2).t()
    weight = head_weight.to(hidden.dtype)
    if not torch.is_grad_enabled():  # a custom Function cannot see this and would compute gradients
        columns, weight = columns.detach(), weight.detach()
    return cast(
        "Tensor",
        _LinearCrossEntropy.apply(
            columns, weight, targets.flatten(), scale, softcap, vocabulary or len(weight), chunk
        ),
    )


class _LinearCrossEntropy(torch.autograd.Function):
    """Takes hidden states as (width, tokens), so that vocabulary reductions vectorize over tokens."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        scale: float,
        softcap: float | None,
        vocabulary: int,
        chunk: int,
    ) -> Tensor:
        width, count = hidden.shape
        accumulate_dtype = torch.promote_types(hidden.dtype, torch.float32)
        wanted = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        d_hidden = torch.empty(width, count, dtype=hidden.dtype, device=hidden.device) if wanted else None
        d_weight = torch.zeros(weight.shape, dtype=accumulate_dtype, device=hidden.device)
        losses = torch.empty(count, dtype=accumulate_dtype, device=hidden.device)
        real = weight[:vocabulary]  # the other rows are padding
        for first in range(0, count, chunk):
            part = slice(first, first + chunk)
            x, answers = hidden[:, part], targets[part].unsqueeze(0)
            logits = torch.mm(real, x).to(accumulate_dtype)
            slope: Tensor | None = None
            # exp2 is several times faster than exp on a CPU.
            if softcap is None:
                logits.mul_(scale / math.log(2))
            else:
                logits.mul_(scale / softcap).tanh_()
                slope = 1 - logits.square()
                logits.mul_(softcap / math.log(2))
            correct = logits.gather(0, answers)
            largest = logits.amax(0, keepdim=True)
            powers = logits.sub_(largest).exp2_()
            total = powers.sum(0, keepdim=True)
            losses[part] = (total.log2() + largest - correct).mul_(math.log(2))[0]
            if d_hidden is None:
                continue
            d = powers.mul_(scale / (count * total))
            d.scatter_add_(0, answers, torch.full_like(correct, -scale / count))
            if slope is not None:
                d.mul_(slope)
            narrow = d.to(hidden.dtype)
            d_hidden[:, part] = torch.mm(real.t(), narrow)
            d_weight[:vocabulary] += torch.mm(narrow, x.t())
        if d_hidden is not None:
            ctx.save_for_backward(d_hidden, d_weight.to(weight.dtype))
        return losses.mean()

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = ctx.saved_tensors
        factor = gradients[0]
        found = (d * factor.to(d.dtype) for d in (d_hidden, d_weight))
        return (*found, *[None] * 5)


def sum_of_losses(network: Network, hidden: Tensor, rows: Tensor, target: int) -> Tensor:
    """Sum of the cross-entropy of one target over the rows (batch, time) of hidden states that are marked.

    The rows are padded with zeros, of which every logit is zero, to chunks of one size: a compiled loss is
    compiled once.
    """
    total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
    targets = torch.full((1, CHUNK), target, device=hidden.device)
    for chunk in hidden[rows].split(CHUNK):
        padding = CHUNK - len(chunk)
        padded = functional.pad(chunk, (0, 0, 0, padding))[None]
        total = total + CHUNK * network.loss(padded, targets) - padding * math.log(network.token_ids)
    return total


@torch.no_grad()
def mean_loss(
    network: Network,
    batches: Iterable[tuple[Tensor, Tensor]],
    passes: int | None = None,
    *,
    apart: int | None = None,
    sum_over_ranks: Callable[[Tensor], Tensor] | None = None,
) -> MeanLoss:
    """Mean cross-entropy per token over (inputs, targets) batches of any sizes, summed in fp64.

    `apart` is a token whose part of the mean is given too. With `sum_over_ranks`, which adds a tensor over
    ranks, the batches are this rank's part of them.
    """
    device = network.embedding.device
    total, own, tokens = 0.0, 0.0, 0
    training = network.training
    network.eval()
    try:
        for inputs, targets in batches:
            losses = network(inputs.to(device), targets.to(device), passes=passes, apart=apart)
            mean, *rest = losses.double().reshape(-1).tolist()
            total, own = total + mean * targets.numel(), own + sum(rest)
            tokens += targets.numel()
    finally:
        network.train(training)
    if sum_over_ranks is not None:
        sums = torch.tensor([total, own, tokens], dtype=torch.float64, device=device)
        total, own, tokens = sum_over_ranks(sums).tolist()
    return MeanLoss(total / tokens, own / tokens)
