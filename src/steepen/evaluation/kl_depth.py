"""KL effective depth: the block after which the prediction is close to the final one.

The residual stream after every executed block (each pass counts) is decoded with the final norm and head (the
logit lens). Its KL divergence from the final distribution first rises, then falls; the effective depth is the
first block at or after the peak at which it is within a threshold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from steepen.data import ValidationSet
from steepen.errors import UsageError
from steepen.evaluation.validation_loss import tensor_batches
from steepen.model.network import Network

Direction = Literal["final-to-block", "block-to-final"]
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
THRESHOLD = 2.0  # nats (Figure "Growth and looping raise KL effective depth")


@dataclass(frozen=True)
class KLDepth:
    """KL divergence after each executed block, and the effective depth."""

    depth: int  # counted from 1
    executed: int
    peak: int  # the block with the largest divergence, counted from 1
    curve: tuple[float, ...]  # nats, mean over tokens, one per executed block
    stages: tuple[str, ...]  # the section of each block: prelude, core 1, core 2, …, coda
    passes: int
    threshold: float
    direction: Direction
    tokens: int
    identity: str  # of the token set

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()
        }


def effective_depth(curve: tuple[float, ...] | list[float], threshold: float = THRESHOLD) -> tuple[int, int]:
    """The effective depth and the block of the peak, both counted from 1.

    Ties are resolved to the first peak. If the peak is within the threshold, the depth is the peak's block.
    """
    peak = max(range(len(curve)), key=lambda block: curve[block])
    depth = next(block for block in range(peak, len(curve)) if curve[block] <= threshold)
    return depth + 1, peak + 1


def stage_names(network: Network, passes: int) -> tuple[str, ...]:
    """The stage of each executed block."""
    blocks = network.shape.allocation
    cores = [f"core {number}" for number in range(1, passes + 1) for _ in range(blocks.core)]
    return (*["prelude"] * blocks.prelude, *cores, *["coda"] * blocks.coda)


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
    stages = stage_names(network, passes)
    device = network.embedding.device
    total = torch.zeros(len(stages), dtype=torch.float64)
    # One sequence at a time, because the hidden states of every block are in memory at once.
    for done, (inputs, _) in enumerate(tensor_batches(validation, rows=1), start=1):
        hidden: list[Tensor] = []
        network.hidden_states(inputs.to(device), passes, visit=hidden.append)
        assert len(hidden) == len(stages)
        total += _kl_to_final(network, hidden, direction)
        if progress:
            progress(done, validation.chunks)
    curve = tuple((total / validation.tokens).tolist())
    depth, peak = effective_depth(curve, threshold)
    return KLDepth(
        depth,
        len(stages),
        peak,
        curve,
        stages,
        passes,
        threshold,
        direction,
        validation.tokens,
        validation.identity,
    )


def _kl_to_final(network: Network, hidden: list[Tensor], direction: Direction) -> Tensor:
    """KL divergence between every block's prediction and the last one's, summed over tokens, fp64."""
    final = functional.log_softmax(network.logits(hidden[-1]), dim=-1)
    divergences: list[Tensor] = []
    for state in hidden:
        block = functional.log_softmax(network.logits(state), dim=-1)
        p, q = (final, block) if direction == "final-to-block" else (block, final)
        divergences.append((p.exp() * (p - q)).sum(dtype=torch.float64))
    return torch.stack(divergences).cpu()
