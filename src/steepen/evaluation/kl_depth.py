"""KL effective depth: the block after which the prediction is close to the final one.

The residual stream before the first block (index 0) and after every executed block (each pass counts) is
decoded with the final norm and head (the logit lens). Its KL divergence from the final distribution first
rises, then falls; the effective depth is the first index after the peak at which it is below a threshold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from steepen.data import ValidationSet
from steepen.errors import UsageError
from steepen.evaluation.validation_loss import Measured, tensor_batches
from steepen.model.network import Network

Direction = Literal["final-to-block", "block-to-final"]
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
CONVENTION = "authors"  # scores without it counted from the first block and included peak and threshold
THRESHOLD = 2.0  # nats (Figure "Growth and looping raise KL effective depth")


@dataclass(frozen=True)
class KLDepth(Measured):
    """KL divergence before the first and after each executed block, and the effective depth."""

    convention: str  # CONVENTION
    depth: int  # executed blocks after which the prediction is near the final one
    executed: int
    peak: int  # index of the largest divergence; 0 is before the first block
    curve: tuple[float, ...]  # nats, mean over tokens; index 0 is before the first block
    stages: tuple[str, ...]  # the section of each block: prelude, core 1, …, coda (the key of saved scores)
    passes: int
    threshold: float
    direction: Direction
    tokens: int
    identity: str  # of the token set


def effective_depth(curve: tuple[float, ...] | list[float], threshold: float = THRESHOLD) -> tuple[int, int]:
    """The effective depth and the index of the peak; index 0 of the curve is before the first block.

    The depth is the first index after the peak whose divergence is below the threshold. Ties are resolved to
    the first peak.
    """
    peak = max(range(len(curve)), key=lambda index: curve[index])
    after = (index for index in range(peak + 1, len(curve)) if curve[index] < threshold)
    return next(after, len(curve) - 1), peak


@torch.no_grad()
def measure_kl_depth(
    network: Network,
    validation: ValidationSet,
    passes: int | None = None,
    *,
    threshold: float = THRESHOLD,
    direction: Direction = "final-to-block",
    progress: Callable[[int, int], None] | None = None,
) -> KLDepth:
    """KL effective depth of a network on a validation set.

    `direction` is final-to-block, KL(final ‖ block), or block-to-final; the paper does not say which.
    `progress(done, total)` is called with numbers of sequences.
    """
    if direction not in DIRECTIONS:
        raise UsageError(f"direction {direction!r} is not known: use {' or '.join(DIRECTIONS)}.")
    if not threshold > 0:
        raise UsageError(f"threshold {threshold} is not valid: it must be a positive number of nats.")
    passes = network.passes if passes is None else passes
    stages = network.shape.allocation.sections(passes)
    device = network.embedding.device
    total = torch.zeros(1 + len(stages), dtype=torch.float64)
    # One sequence at a time, because the hidden states of every block are in memory at once.
    for done, (inputs, _) in enumerate(tensor_batches(validation, rows=1), start=1):
        tokens = inputs.to(device)
        hidden = [network.embed(tokens, network.stream_dtype)]
        network.hidden_states(tokens, passes, visit=hidden.append)
        assert len(hidden) == 1 + len(stages)
        total += _kl_to_final(network, hidden, direction)
        if progress:
            progress(done, validation.windows)
    curve = tuple((total / validation.tokens).tolist())
    depth, peak = effective_depth(curve, threshold)
    executed, tokens, identity = len(stages), validation.tokens, validation.identity
    return KLDepth(
        CONVENTION, depth, executed, peak, curve, stages, passes, threshold, direction, tokens, identity
    )


def _kl_to_final(network: Network, hidden: list[Tensor], direction: Direction) -> Tensor:
    """KL divergence between the prediction from each state and from the last, summed over tokens, fp64."""
    final = functional.log_softmax(network.logits(hidden[-1]), dim=-1)
    divergences: list[Tensor] = []
    for state in hidden:
        block = functional.log_softmax(network.logits(state), dim=-1)
        p, q = (final, block) if direction == "final-to-block" else (block, final)
        divergences.append((p.exp() * (p - q)).sum(dtype=torch.float64))
    return torch.stack(divergences).cpu()
