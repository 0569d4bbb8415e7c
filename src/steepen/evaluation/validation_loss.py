"""Validation loss and bits per byte, also at more or fewer core passes than the network was trained with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from steepen.data import ValidationSet
from steepen.errors import UsageError
from steepen.model.loss import mean_loss
from steepen.model.network import Network


@dataclass(frozen=True)
class Measured:
    """What was measured on a validation set."""

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()
        }


@dataclass(frozen=True)
class ValidationLoss(Measured):
    """The mean loss on one validation set; equal identities mean equal tokens."""

    loss: float  # nats per token
    bits_per_byte: float
    tokens: int
    passes: int
    identity: str


def tensor_batches(validation: ValidationSet, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    """A validation set as (inputs, targets) tensors, int64 (rows, context)."""
    return ((torch.from_numpy(x), torch.from_numpy(y)) for x, y in validation.batches(rows))


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
    # Such that the logits have at most 2³⁰ values on a GPU, 2²⁴ on a CPU.
    max_logits = 1 << (30 if network.embedding.device.type == "cuda" else 24)
    rows = max(1, max_logits // (validation.context * network.shape.vocabulary))

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        done = 0
        for inputs, targets in tensor_batches(validation, rows):
            yield inputs, targets
            done += len(inputs)
            if progress:
                progress(done, validation.windows)

    found = mean_loss(network, batches(), passes, apart=validation.end_of_text)
    return ValidationLoss(
        found.loss, validation.bits_per_byte(*found), validation.tokens, passes, validation.identity
    )


@dataclass(frozen=True)
class PassesCurve(Measured):
    """Loss at each number of passes, on one validation set."""

    trained: int
    trained_loss: float
    passes: tuple[int, ...]
    losses: tuple[float, ...]
    differences: tuple[float, ...]  # L(k) − L(K trained) (Figure "Sensitivity to evaluation recurrence")
    tokens: int
    identity: str
    unsupported_passes: tuple[int, ...]  # requested, but the network cannot run them


def measure_test_time_passes(
    network: Network,
    validation: ValidationSet,
    requested: Sequence[int] = tuple(range(1, 9)),
    trained: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> PassesCurve:
    """The loss at the requested numbers of passes that the network can run, and at the trained one.

    A tied core runs any number; untied cores at most as many as there are cores; a network without a core
    only one. `progress(done, total)` counts sequences over all numbers of passes.
    """
    trained = network.passes if trained is None else trained
    if any(passes < 1 for passes in requested):
        raise UsageError(f"passes {min(requested)} is not valid: the core is applied at least once.")
    maximum = max(requested, default=0) if network.arm.tied else len(network.cores)
    maximum = 1 if network.shape.allocation.core == 0 else maximum
    chosen = tuple(sorted({passes for passes in requested if passes <= maximum}))
    losses: dict[int, float] = {}
    measured = sorted({*chosen, trained})
    for count, passes in enumerate(measured):

        def report(done: int, total: int, before: int = count) -> None:
            if progress:
                progress(before * total + done, len(measured) * total)

        losses[passes] = validate(network, validation, passes, report).loss
    own = tuple(losses[passes] for passes in chosen)
    differences = tuple(loss - losses[trained] for loss in own)
    impossible = tuple(sorted({*requested} - {*chosen}))
    tokens, identity = validation.tokens, validation.identity
    return PassesCurve(trained, losses[trained], chosen, own, differences, tokens, identity, impossible)
