"""Loss and bits per byte on a prepared data set's validation tokens."""

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
    """The loss on one validation set; equal identities mean equal tokens."""

    loss: float  # nats per token
    bits_per_byte: float
    tokens: int
    passes: int
    identity: str

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def tensors(validation: ValidationSet, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    """A validation set as batches of inputs and targets."""
    return ((torch.from_numpy(x), torch.from_numpy(y)) for x, y in validation.batches(rows))


def rows_at_once(network: Network, context: int) -> int:
    """Sequences whose logits fit comfortably: 2³⁰ values on a GPU, 2²⁴ elsewhere."""
    room = 1 << (30 if network.embedding.device.type == "cuda" else 24)
    return max(1, room // (context * network.shape.vocabulary))


def validate(
    network: Network,
    validation: ValidationSet,
    passes: int | None = None,
    report: Callable[[int, int], None] | None = None,
) -> ValidationLoss:
    """The network's loss on a validation set, at a number of passes (default: its own).

    `report` is told how many of how many sequences are done.
    """
    passes = network.passes if passes is None else passes

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        done = 0
        for inputs, targets in tensors(validation, rows_at_once(network, validation.context)):
            yield inputs, targets
            done += len(inputs)
            if report:
                report(done, validation.chunks)

    loss = mean_loss(network, batches(), passes)
    return ValidationLoss(
        loss, validation.bits_per_byte(loss), validation.tokens, passes, validation.identity
    )
