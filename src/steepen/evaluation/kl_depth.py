"""KL effective depth: how far into the network the prediction is still far from what it will be.

The stream after every executed block, every pass counted, is read with the final norm and head (the logit
lens). Its divergence from the final distribution first rises, then falls; the depth used is the first block,
from the peak on, at which it is within a threshold.
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
from steepen.evaluation.validation_loss import tensors
from steepen.model.network import Network

Direction = Literal["final-to-block", "block-to-final"]
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
THRESHOLD = 2.0  # nats (Figure "Growth and looping raise KL effective depth")


@dataclass(frozen=True)
class KLDepth:
    """The divergence after each executed block, and the depth it gives."""

    depth: int  # counted from 1
    executed: int
    peak: int  # the block with the largest divergence, counted from 1
    curve: tuple[float, ...]  # nats, mean over tokens, one per executed block
    stages: tuple[str, ...]  # prelude, core 1, core 2, …, coda: where each block stands
    passes: int
    threshold: float
    direction: Direction
    tokens: int
    identity: str  # of the token set

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()
        }


def effective_depth(curve: tuple[float, ...] | list[float], threshold: float = THRESHOLD) -> tuple[int, int]:
    """The depth used and the peak's block, both counted from 1.

    The first of equal peaks counts. Where even the peak is within the threshold, it is the peak's own block.
    """
    peak = max(range(len(curve)), key=lambda block: curve[block])
    depth = next(block for block in range(peak, len(curve)) if curve[block] <= threshold)
    return depth + 1, peak + 1


def stage_names(network: Network, passes: int) -> tuple[str, ...]:
    """Where each executed block stands."""
    split = network.shape.allocation
    cores = [f"core {number}" for number in range(1, passes + 1) for _ in range(split.core)]
    return (*["prelude"] * split.prelude, *cores, *["coda"] * split.coda)


@torch.no_grad()
def depth_used(
    network: Network,
    validation: ValidationSet,
    passes: int | None = None,
    *,
    threshold: float = THRESHOLD,
    direction: Direction = "final-to-block",
    report: Callable[[int, int], None] | None = None,
) -> KLDepth:
    """KL effective depth of a network on a validation set.

    `direction` says which divergence: KL(final ‖ block), what the block's prediction would cost, is the
    default; the paper does not say. `report` is told how many of how many sequences are done.
    """
    if direction not in DIRECTIONS:
        raise UsageError(f"direction {direction!r} is not known: use {' or '.join(DIRECTIONS)}.")
    if not threshold > 0:
        raise UsageError(f"threshold {threshold} is not valid: it must be a positive number of nats.")
    passes = network.passes if passes is None else passes
    stages = stage_names(network, passes)
    device = network.embedding.device
    total = torch.zeros(len(stages), dtype=torch.float64)
    # One sequence at a time keeps the stream of every block in memory at once affordable at any depth.
    for done, (inputs, _) in enumerate(tensors(validation, rows=1), start=1):
        streams: list[Tensor] = []
        network.hidden_states(inputs.to(device), passes, visit=streams.append)
        assert len(streams) == len(stages)
        total += _divergences(network, streams, direction)
        if report:
            report(done, validation.chunks)
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


def _divergences(network: Network, streams: list[Tensor], direction: Direction) -> Tensor:
    """Divergence of every block's reading from the last one's, summed over tokens."""
    final = functional.log_softmax(network.logits(streams[-1]), dim=-1)
    found: list[Tensor] = []
    for stream in streams:
        block = functional.log_softmax(network.logits(stream), dim=-1)
        given, other = (final, block) if direction == "final-to-block" else (block, final)
        found.append((given.exp() * (given - other)).sum(dtype=torch.float64))
    return torch.stack(found).cpu()
