"""Optimizer state by parameter name, and how it is extended at growth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

import torch
from torch import Tensor

from steepen.errors import UsageError
from steepen.optim.config import GrowthState

# Parameter name → state key ("momentum", "exp_avg", "step", …) → tensor.
OptimizerState = dict[str, dict[str, Tensor]]

# Keys under which Muon, AdamW and torch's SGD keep the running mean of the gradient.
MOMENTUM_KEYS = ("momentum", "exp_avg", "momentum_buffer")


def grow_state(state: OptimizerState, sources: Mapping[str, str], policy: GrowthState = "copy") -> None:
    """Add entries for the parameters that growth made; `sources` maps a new name to the copied one.

    "copy" clones the state of the source, "zero" does the same but zeros the momentum, and "fresh" adds
    nothing, as for a parameter that was never stepped.
    """
    if policy not in get_args(GrowthState):
        raise UsageError(
            f"growth state policy {policy!r} is not known: use one of {', '.join(get_args(GrowthState))}."
        )
    if policy == "fresh":
        return
    for new, source in sources.items():
        if source in state:
            state[new] = {
                key: torch.zeros_like(value) if policy == "zero" and key in MOMENTUM_KEYS else value.clone()
                for key, value in state[source].items()
            }
