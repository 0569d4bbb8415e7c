"""Growth: more core passes in mid-run, and what becomes of the optimizer's state.

Tied growth changes only the number of passes. Untied growth stacks copies of the trained cores, core k of
the grown network starting as core (k mod K₀) of the old one (Algorithm 1).
"""

from __future__ import annotations

import copy
from typing import Literal

import torch
from torch import Tensor

from steepen.errors import UsageError
from steepen.model.network import Network

StatePolicy = Literal["copy", "zero", "fresh"]
STATE_POLICIES: tuple[StatePolicy, ...] = ("copy", "zero", "fresh")

MOMENTA = ("momentum", "exp_avg")  # what Muon and AdamW call the running mean of the gradient

# An optimizer's state by parameter name, then by the state's own name ("momentum", "step", …).
State = dict[str, dict[str, Tensor]]


def grow(network: Network, state: State, passes: int, policy: StatePolicy = "copy") -> dict[str, str]:
    """Let the network run `passes` core passes from now on; returns new parameter name → its source's name.

    `state` gains entries for the new parameters by `policy`: "copy" takes everything from the source core,
    "zero" too but with the momentum at zero, "fresh" takes nothing, as for a parameter never stepped.
    """
    if policy not in STATE_POLICIES:
        raise UsageError(
            f"growth state policy {policy!r} is not known: use one of {', '.join(STATE_POLICIES)}."
        )
    if passes < network.passes:
        raise UsageError(f"cannot grow from {network.passes} to {passes} passes: growth only adds passes.")
    sources: dict[str, str] = {}
    if not network.arm.tied:
        sources = _stack_cores(network, passes)
        if network.fused is not None:
            network.fused.adopt_new_blocks()
    network.passes = passes
    for new, source in sources.items():
        if source in state and policy != "fresh":
            state[new] = {
                name: torch.zeros_like(value) if policy == "zero" and name in MOMENTA else value.clone()
                for name, value in state[source].items()
            }
    return sources


def _stack_cores(network: Network, passes: int) -> dict[str, str]:
    first = len(network.cores)
    sources: dict[str, str] = {}
    for index in range(first, passes):
        origin = index % first
        # Copied with everything they carry (dtype, device, compiled forward), parameters apart.
        network.cores.append(copy.deepcopy(network.cores[origin]))
        for name, _ in network.cores[index].named_parameters():
            sources[f"cores.{index}.{name}"] = f"cores.{origin}.{name}"
    return sources
