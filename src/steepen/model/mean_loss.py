"""The mean loss of a network over many batches."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from steepen.model.network import Network


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
