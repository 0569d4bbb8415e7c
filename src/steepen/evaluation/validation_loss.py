"""Validation loss and bits per byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from steepen.data import ValidationSet
from steepen.model.loss import mean_loss
from steepen.model.network import Network


@dataclass(frozen=True)
class ValidationLoss:
    """The mean loss on one validation set; equal identities mean equal tokens."""

    loss: float  # nats per token
    bits_per_byte: float
    tokens: int
    passes: int
    identity: str

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)


def tensor_batches(validation: ValidationSet, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    """A validation set as (inputs, targets) tensors, int64 (rows, context)."""
    return ((torch.from_numpy(x), torch.from_numpy(y)) for x, y in validation.batches(rows))


def rows_per_batch(network: Network, context: int) -> int:
    """Sequences per batch such that the logits have at most 2³⁰ values on a GPU, 2²⁴ on a CPU."""
    max_logits = 1 << (30 if network.embedding.device.type == "cuda" else 24)
    return max(1, max_logits // (context * network.shape.vocabulary))


def validate(
    network: Network,
    validation: ValidationSet,
    passes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ValidationLoss:
    """Mean loss of a network on a validation set at `passes` core passes (default: its own).

    `progress(done, total)` is called with numbers of sequences.
    """
    passes = network.passes if passes is None else passes

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        done = 0
        for inputs, targets in tensor_batches(validation, rows_per_batch(network, validation.context)):
            yield inputs, targets
            done += len(inputs)
            if progress:
                progress(done, validation.windows)

    found = mean_loss(network, batches(), passes, apart=validation.end_of_text)
    return ValidationLoss(
        found.loss, validation.bits_per_byte(*found), validation.tokens, passes, validation.identity
    )
